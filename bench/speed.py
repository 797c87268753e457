"""Speed of the kernels and of the whole call, compared with torch's flash and cuDNN attention in bf16.

    python bench/speed.py --json speed.json
    python bench/speed.py --arch sm80,sm89 --kernels build/retarget_sm_90 --headdim 128 --mask full
    python bench/speed.py --sustained 2 --seqlen 16384 --headdim 64,128

Each shape and arch has four rows. `kernel` is the attention launch alone, on quantized inputs; `quantize`, the launches
before it; `quantize kv`, these launches for a call of one query row, which has one tile of Q a head; `call`, the public
call with checks and allocations. TOPS count 4·B·H·N²·D operations, half of them when causal. Every output is checked
before it is timed; a wrong output ends the program with exit code 1.

Launches are queued back to back as a model would queue them, each repeat between two CUDA events. The L2 cache is not
flushed between repeats. Where the host is slower than the GPU, `call` has the host's time. With --graph, a repeat is a
replay of a CUDA graph of up to GRAPH_CALLS calls: it has the GPU's time alone, gaps between launches included. With
--sustained, a row works for so many seconds without a pause, as a model does, and the GPU lowers its clock to keep to
its power: clock and power are read in the middle. bench/latency.py has a call's host time, and a process's first call.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from statistics import median
from typing import Any, cast

import torch

import common
import sage_aot
from sage_aot._backends.cuda.backend import CudaBackend
from sage_aot._backends.cuda.call import CudaCall, addresses_of
from sage_aot._backends.loader import Library
from sage_aot._call import pipeline
from sage_aot._call.backends import handing
from sage_aot._cli.bench import USES
from sage_aot._launch.plan import Plan
from sage_aot._problem.given import Given
from sage_aot._problem.options import Options

FLASH, CUDNN = common.SDPA
COLUMNS = ("row", "heads", "headdim", "mask", "N", "µs", "p10–p90", "TOPS", "× cuDNN", "GB/s", "cosine",
           "clock, power")
GRAPH_CALLS = 10
"""Calls that a graph of short calls holds: enough that the gap between two replays does not count."""

GRAPH_US = 5000.0
"""GPU time of a graph, in microseconds, above which it holds no further call."""

ROUND_US = 5000.0
"""GPU time of a sample of interleaved works, in microseconds, but for a work of which two repeats take longer."""

BATCH_S = 0.05
"""Seconds of the batches of repeats of sustained work."""

WARM_UP_S = 0.2
"""Seconds of work before a row is timed: the clock needs some tens of milliseconds to settle."""


@dataclass(frozen=True)
class Shape:
    """Inputs of one block of rows; as many keys as queries."""

    headdim: int
    mask: str
    seqlen: int
    batch: int
    heads: int
    kv_heads: int

    @property
    def heads_cell(self) -> str:
        """Batch × heads, and the heads of K and V where they are fewer."""
        return f"{self.batch}×{self.heads}" + (f"/{self.kv_heads}" if self.kv_heads != self.heads else "")

    @property
    def is_causal(self) -> bool:
        return self.mask == "causal"

    @property
    def operations(self) -> float:
        """Multiplications and additions of both matrix products, as the papers count them."""
        total = 4.0 * self.batch * self.heads * self.seqlen**2 * self.headdim
        return total / 2 if self.is_causal else total


@dataclass(frozen=True)
class Timing:
    """Microseconds of one repeat: the median and the 10th and 90th percentile."""

    median_us: float
    p10_us: float
    p90_us: float
    clock_and_power: str = ""  # in the middle of sustained work, as nvidia-smi prints them

    @classmethod
    def of(cls, samples_us: list[float], clock_and_power: str = "") -> Timing:
        ordered = sorted(samples_us)
        last = len(ordered) - 1
        return cls(median(ordered), ordered[round(0.1 * last)], ordered[round(0.9 * last)], clock_and_power)

    def of_one(self, calls: int) -> Timing:
        """The times of one call, where a repeat makes several."""
        return Timing(self.median_us / calls, self.p10_us / calls, self.p90_us / calls, self.clock_and_power)


Timed = Callable[[Callable[[], object]], Timing]
"""A function that times the work of a row."""


@dataclass(frozen=True)
class Row:
    """One line of the table; None stands for figures that the row does not have."""

    row: str
    shape: Shape
    timing: Timing
    cosine: float | None  # with flash attention
    kernel: str | None = None  # name of the attention kernel
    moved_bytes: int | None = None  # bytes that the quantizers must read and write

    @property
    def tops(self) -> float | None:
        return None if self.moved_bytes else self.shape.operations / self.timing.median_us * 1e-6

    @property
    def gb_per_s(self) -> float | None:
        return self.moved_bytes / self.timing.median_us * 1e-3 if self.moved_bytes else None

    def ratio(self, cudnn: Row | None) -> float | None:
        """Speed as a multiple of cuDNN's in the same run."""
        return None if cudnn is None or self.moved_bytes else cudnn.timing.median_us / self.timing.median_us

    def cells(self, cudnn: Row | None) -> list[object]:
        shape, timing, ratio = self.shape, self.timing, self.ratio(cudnn)
        return [self.row, shape.heads_cell, shape.headdim, shape.mask, shape.seqlen, f"{timing.median_us:.1f}",
                f"{timing.p10_us:.1f}–{timing.p90_us:.1f}", self.tops and f"{self.tops:.0f}", ratio and f"{ratio:.2f}",
                self.gb_per_s and f"{self.gb_per_s:.0f}", self.cosine and f"{self.cosine:.6f}",
                timing.clock_and_power]

    def to_json(self, cudnn: Row | None, sm_clock: str) -> dict[str, object]:
        return {"row": self.row, **vars(self.shape), **vars(self.timing), "tops": self.tops,
                "ratio_to_cudnn": self.ratio(cudnn), "gb_per_s": self.gb_per_s, "cosine": self.cosine,
                "kernel": self.kernel, "sm_clock": sm_clock}


def main() -> int:
    arguments = parse()
    common.require_cuda()
    library = common.use_kernels(arguments.kernels)
    archs = arguments.arch or common.default_archs(library)
    heads = "" if arguments.use else f", batch {arguments.batch}, {arguments.heads} heads"
    header = common.header(library) | {"inputs": f"N(0, 1) bf16{heads}; median of {arguments.repeat}"}
    common.print_header(header)
    timed = (functools.partial(time_sustained, seconds=arguments.sustained) if arguments.sustained else
             functools.partial(time_by_graph if arguments.graph else time_on_gpu, repeat=arguments.repeat))
    rows = sweep(shapes(arguments), archs, library, timed)
    common.write_json(arguments.json, {"header": header, "rows": rows})
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    common.add_shape_arguments(parser, seqlen="1024,4096,16384,32768", batch=4, heads=32)
    parser.add_argument("--use", action="store_true", help="the shapes of `sage-aot bench` that have as many keys as "
                        "queries and no key mask, instead of those that options give")
    parser.add_argument("--arch", type=common.words, help="whose kernels (default: the arch that this GPU would run; "
                        "all of them for a retargeted folder)")
    parser.add_argument("--repeat", type=int, default=20, help="timed repeats of a row (default: %(default)s)")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--graph", action="store_true", help="the GPU's time alone, by replaying CUDA graphs")
    how.add_argument("--sustained", type=float, metavar="SECONDS", help="so long without a pause, instead of --repeat")
    arguments = parser.parse_args()
    if arguments.sustained is not None and not arguments.sustained > 0:
        parser.error(f"--sustained: expected more than 0 seconds, got {arguments.sustained}")
    return arguments


def shapes(arguments: argparse.Namespace) -> list[Shape]:
    if arguments.use:
        return [Shape(use.headdim, use.kind, use.keys, use.batch, use.heads, use.kv_heads) for use in USES
                if use.queries == use.keys and use.kind in ("full", "causal")]
    return [Shape(*values, arguments.batch, arguments.heads, arguments.heads)
            for values in itertools.product(arguments.headdim, arguments.mask, arguments.seqlen)]


# --- the sweep --------------------------------------------------------------------------------------------------------


def sweep(shapes: list[Shape], archs: list[str], library: Library, timed: Timed) -> list[dict[str, object]]:
    """Print the table row by row, and return it for the JSON file."""
    print(common.table_head(COLUMNS))
    results = []
    for shape in shapes:
        generator = torch.Generator("cuda").manual_seed(0)
        qkv = [torch.randn(shape.batch, heads, shape.seqlen, shape.headdim, device="cuda", dtype=torch.bfloat16,
                           generator=generator) for heads in (shape.heads, shape.kv_heads, shape.kv_heads)]
        sm_clock = clock_under_load(functools.partial(common.sdpa, FLASH, *qkv, shape.is_causal))
        cudnn = None
        for row in rows(shape, qkv, archs, library, timed):
            cudnn = row if row.row == CUDNN else cudnn
            print(common.table_row(row.cells(cudnn)), flush=True)
            results.append(row.to_json(cudnn, sm_clock))
    return results


def rows(shape: Shape, qkv: list[torch.Tensor], archs: list[str], library: Library, timed: Timed) -> Iterator[Row]:
    """Every row of a shape: flash attention first, whose output the other rows are checked against."""
    expected = common.sdpa(FLASH, *qkv, shape.is_causal)
    yield Row(FLASH, shape, timed(lambda: common.sdpa(FLASH, *qkv, shape.is_causal)), None)
    if torch.backends.cudnn.is_available() and torch.backends.cuda.cudnn_sdp_enabled():
        cosine = common.check_output(CUDNN, common.sdpa(CUDNN, *qkv, shape.is_causal), expected)
        yield Row(CUDNN, shape, timed(lambda: common.sdpa(CUDNN, *qkv, shape.is_causal)), cosine)
    for arch in archs:
        yield from arch_rows(shape, arch, qkv, expected, library, timed)


def arch_rows(shape: Shape, arch: str, qkv: list[torch.Tensor], expected: torch.Tensor, library: Library,
              timed: Timed) -> Iterator[Row]:
    """The rows of an arch: the pieces of a call, then the whole call."""
    common.check_arch(arch, library)
    backend = CudaBackend(library, arch)
    pieces = Pieces.of(backend, Given("dense", *qkv), shape.is_causal)
    name = pieces.plan.kernels.attn.name
    cosine = common.check_output(f"{arch} kernel", pieces.checked_output(), expected)
    yield Row(f"{arch} kernel", shape, timed(pieces.attend), cosine, name)
    yield Row(f"{arch} quantize", shape, timed(pieces.quantize), None, name,
              moved_bytes(pieces.plan, expected.element_size()))
    few = Pieces.of(backend, Given("dense", qkv[0][:, :, :1].contiguous(), *qkv[1:]), shape.is_causal)
    yield Row(f"{arch} quantize kv", shape, timed(few.quantize), None, name,
              moved_bytes(few.plan, expected.element_size()))
    with handing(backend):  # the first call prepares the kind of call for all others
        out = sage_aot.attn(*qkv, is_causal=shape.is_causal, out=common.poisoned(qkv[0]))
        cosine = common.check_output(f"{arch} call", out, expected)
        timing = timed(lambda: sage_aot.attn(*qkv, is_causal=shape.is_causal))
    yield Row(f"{arch} call", shape, timing, cosine, name)


class Pieces:
    """The launches of one call, to run one by one, on a workspace that they share."""

    def __init__(self, call: CudaCall, given: Given) -> None:
        self.plan = call.plan
        self._out = common.poisoned(given.like)
        workspace = torch.full((self.plan.workspace_bytes,), 0xFF, dtype=torch.uint8, device="cuda")  # NaNs
        self._tensors = (given, workspace)  # keeps them alive: the queues hold addresses only
        quantizers, attention = [], []
        for launch in call.launches():  # torch.randn aligns q, k and v
            (attention if launch.record.spec.kind in ("attn", "merge") else quantizers).append(launch)
        self._quantizers, self._attention = call.queue_of(quantizers), call.queue_of(attention)
        self._addresses = addresses_of(given, self._out, None, workspace)

    @classmethod
    def of(cls, backend: CudaBackend, given: Given, is_causal: bool) -> Pieces:
        """Pieces of a call of attn."""
        return cls(cast(CudaCall, pipeline.prepare(backend, given, Options(is_causal=is_causal)).run), given)

    def quantize(self) -> None:
        """Quantization of q, k and v."""
        self._quantizers(self._stream(), *self._addresses)

    def attend(self) -> None:
        """Attention on the workspace that :meth:`quantize` wrote."""
        self._attention(self._stream(), *self._addresses)

    def checked_output(self) -> torch.Tensor:
        """The output of all pieces in order; it held NaN before."""
        self.quantize()
        self.attend()
        return self._out

    def _stream(self) -> int:
        return torch.cuda.current_stream(self._out.device).cuda_stream


def moved_bytes(layout: Plan, element_size: int) -> int:
    """Bytes that the quantizers must move: q, k and v read once, the workspace written."""
    problem = layout.problem
    q = problem.batch * problem.num_q_heads * problem.seqlen_q * problem.headdim
    kv = 2 * problem.batch * problem.num_kv_heads * problem.seqlen_kv * problem.headdim
    written = sum(size for name, size in layout.sizes.items() if not name.startswith("partial_"))
    return (q + kv) * element_size + written


# --- clocks -----------------------------------------------------------------------------------------------------------


def time_on_gpu(work: Callable[[], object], repeat: int) -> Timing:
    """GPU time between two events around each repeat; all repeats are queued on the current stream at once."""
    warm_up(work)
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeat)]
    for begin, end in events:
        begin.record()
        work()
        end.record()
    torch.cuda.synchronize()
    return Timing.of([1e3 * begin.elapsed_time(end) for begin, end in events])


def time_by_graph(work: Callable[[], object], repeat: int) -> Timing:
    """GPU time of a call, from replays of a CUDA graph of up to GRAPH_CALLS calls; a repeat is a replay."""
    graph = Captured.of(work)
    return time_on_gpu(graph.replay, repeat).of_one(graph.calls)


@dataclass(frozen=True)
class Captured:
    """A CUDA graph of some calls."""

    replay: Callable[[], None]
    calls: int
    out: Any  # what the last call returned: a replay writes it

    @classmethod
    def of(cls, work: Callable[[], object]) -> Captured:
        """A graph of up to GRAPH_CALLS calls of `work`."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            work()  # the first call loads kernels, which a capture cannot
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            work()
            end.record()
        torch.cuda.current_stream().wait_stream(side)
        end.synchronize()
        calls = max(1, min(GRAPH_CALLS, round(GRAPH_US / (1e3 * begin.elapsed_time(end)))))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(torch.cuda.current_stream()), torch.cuda.graph(graph):  # a failed capture leaves its own
            for _ in range(calls):
                out = work()
        return cls(graph.replay, calls, out)


def time_interleaved(works: Mapping[str, Callable[[], object]], rounds: int, repeats: int = 0) -> dict[str, Timing]:
    """GPU time of each work, all of them one after another in each round, so that a clock that drifts hits all alike;
    every other round backwards, so that no work always follows one that heats the GPU.

    A sample is between two events around `repeats` repeats; 0: around so many that they take ROUND_US.
    """
    counts = {name: repeats or max(2, round(ROUND_US / time_between(work, 1))) for name, work in works.items()}
    samples: dict[str, list[float]] = {name: [] for name in works}
    forwards = [*works.items()]
    for i in range(rounds):
        for name, work in forwards if i % 2 == 0 else reversed(forwards):
            samples[name].append(time_between(work, counts[name]))
    return {name: Timing.of(values) for name, values in samples.items()}


def time_between(work: Callable[[], object], repeats: int) -> float:
    """Microseconds of a repeat, between two events around all of them; one goes before, untimed."""
    work()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(repeats):
        work()
    end.record()
    end.synchronize()
    return 1e3 * begin.elapsed_time(end) / repeats


def time_sustained(work: Callable[[], object], seconds: float) -> Timing:
    """GPU time of a repeat while the GPU works for so many seconds; the samples are batches of repeats, of which two
    are queued at any time."""
    batch = max(1, round(BATCH_S * 1e6 / time_on_gpu(work, 3).median_us))
    events = [torch.cuda.Event(enable_timing=True) for _ in range(max(4, round(seconds / BATCH_S)))]
    with ThreadPoolExecutor(1) as pool:
        events[0].record()
        for i, event in enumerate(events[1:], 1):
            for _ in range(batch):
                work()
            event.record()
            events[i - 1].synchronize()
            if i == len(events) // 2:
                state = pool.submit(common.nvidia_smi, "clocks.sm,power.draw")
    torch.cuda.synchronize()
    samples = [1e3 * begin.elapsed_time(end) / batch for begin, end in zip(events, events[1:])]
    return Timing.of(samples, state.result())


def warm_up(work: Callable[[], object]) -> int:
    """Run `work` for WARM_UP_S seconds, at least once. Returns how often it ran."""
    deadline, count = time.perf_counter() + WARM_UP_S, 0
    while count == 0 or time.perf_counter() < deadline:
        work()
        torch.cuda.synchronize()
        count += 1
    return count


def clock_under_load(work: Callable[[], object]) -> str:
    """The SM clock in the middle of queued work, as nvidia-smi prints it."""
    for _ in range(2 * warm_up(work)):
        work()
    clock = common.nvidia_smi("clocks.sm")
    torch.cuda.synchronize()
    return clock


if __name__ == "__main__":
    common.run(main)
