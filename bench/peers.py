"""Other libraries' attention compared with sage_aot's and torch's, all of them in one process, interleaved.

    python bench/peers.py --graph --json peers.json
    python bench/peers.py --headdim 128 --mask causal --seqlen 4096

A row ends in `kernel` where it is attention alone, on inputs that were quantized before, and in `call` where it is what
a user calls, quantization included; rows without either word take bf16. The libraries, of which those that are missing
are named as "not installed", in the versions that this program was written for:

- FlashAttention-3, github.com/Dao-AILab/flash-attention, folder hopper, commit 0251105 (flash_attn_3 3.0.0)
- SageAttention2, github.com/thu-ml/SageAttention, commit d1a57a5 (sageattention 2.2.0), its kernels for Hopper
- cuDNN in FP8: pip install nvidia-cudnn-frontend==1.32.0, which runs the cuDNN that torch brings
- comfy-kitchen, INT8: pip install comfy-kitchen==0.2.40

The first two are built from source, as their own pages say; PyPI's sageattention is an older one without kernels for
Hopper. FlashAttention-3 gets [batch, seq, heads, headdim], all others [batch, heads, seq, headdim], contiguous. FP8
inputs are scaled so that the largest magnitude is the largest of E4M3: by head for FlashAttention-3, by tensor for
cuDNN, which takes no other scale.

Each round times every row once, every other round backwards, between two events around so many calls that they take
some milliseconds; a row has the median over the rounds. `queued`: launched from Python, so that it has the host's time
where the host is slower. With --graph also `GPU`, the GPU's time alone, by replaying CUDA graphs of up to GRAPH_CALLS
calls; a library that cannot be captured has none, and is named. Every output is compared with attention in float64
before it is timed. A library that fails, or is further off than it should be, has no row; it is named at the end, and
the exit code is 1.
"""

from __future__ import annotations

import argparse
import functools
import gc
import importlib.metadata
import importlib.util
import itertools
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from importlib.machinery import PathFinder

import torch

import common
import sage_aot
from sage_aot._backends.cuda.backend import CudaBackend
from sage_aot._call.backends import handing
from sage_aot._problem.given import Given
from sage_aot._tools import reference
from sage_aot._tools.reference import Accuracy
from speed import CUDNN, Captured, Pieces, Shape, Timing, time_interleaved, warm_up

E4M3_MAX = 448.0
P_SCALE = 256.0
"""Factor of P, which is at most 1, before cuDNN's FP8 attention rounds it to E4M3."""

COLUMNS = ("row", "heads", "headdim", "mask", "N", "queued, µs", "p10–p90", "TOPS", "× cuDNN", "GPU, µs", "p10–p90",
           "TOPS", "× cuDNN", "cosine", "rel. L1")

Qkv = list[torch.Tensor]  # [batch, heads, seq, headdim] each


@dataclass(frozen=True)
class Library:
    """A package that may be missing."""

    name: str
    distribution: str
    module: str  # there where the package is, and not in another one of its name

    @property
    def version(self) -> str:
        """The distribution's version, or ``"not installed"``. Imports nothing."""
        first, *rest = self.module.split(".")
        found, path = importlib.util.find_spec(first), first
        for name in rest:
            path += f".{name}"
            found = found and PathFinder.find_spec(path, found.submodule_search_locations)
        if found is None:
            return "not installed"
        try:
            return importlib.metadata.version(self.distribution)
        except importlib.metadata.PackageNotFoundError:
            return "of unknown version"


FLASH3 = Library("FlashAttention-3", "flash_attn_3", "flash_attn_3._C")
SAGE2 = Library("SageAttention2", "sageattention", "sageattention._qattn_sm90")
CUDNN_FRONTEND = Library("cudnn-frontend", "nvidia-cudnn-frontend", "cudnn._compiled_module")
COMFY = Library("comfy-kitchen", "comfy-kitchen", "comfy_kitchen.sage_attention")
LIBRARIES = (FLASH3, SAGE2, CUDNN_FRONTEND, COMFY)


@dataclass(frozen=True)
class Prepared:
    """A row's work on inputs that it was prepared for."""

    work: Callable[[], torch.Tensor]
    decoded: Callable[[torch.Tensor], torch.Tensor] = lambda out: out  # what work returns, as q is laid out
    note: str = ""


Prepare = Callable[[Qkv, bool], Prepared]  # q, k and v, and is_causal


@dataclass(frozen=True)
class Contestant:
    """A row of every shape with one of its masks."""

    row: str
    library: Library | None  # None: sage_aot or torch
    most_l1: float  # relative L1 of the output, above which it was called wrongly or is broken
    prepare: Prepare
    masks: tuple[str, ...] = ("full", "causal")


# --- how each is called -----------------------------------------------------------------------------------------------


def prepare_sdpa(row: str, qkv: Qkv, is_causal: bool) -> Prepared:
    """torch's attention in bf16."""
    return Prepared(lambda: common.sdpa(row, *qkv, is_causal))


def prepare_call(qkv: Qkv, is_causal: bool) -> Prepared:
    """sage_aot's whole call."""
    return Prepared(lambda: sage_aot.attn(*qkv, is_causal=is_causal))


def prepare_kernel(backend: CudaBackend, qkv: Qkv, is_causal: bool) -> Prepared:
    """sage_aot's attention launch."""
    pieces = Pieces.of(backend, Given("dense", *qkv), is_causal)
    out = pieces.checked_output()

    def work() -> torch.Tensor:
        pieces.attend()
        return out

    return Prepared(work)


def prepare_flash3(qkv: Qkv, is_causal: bool) -> Prepared:
    """FlashAttention-3 in bf16."""
    from flash_attn_interface import flash_attn_func

    q, k, v = (x.transpose(1, 2).contiguous() for x in qkv)
    return Prepared(lambda: flash_attn_func(q, k, v, causal=is_causal), lambda out: out.transpose(1, 2))


def prepare_flash3_fp8(qkv: Qkv, is_causal: bool) -> Prepared:
    """FlashAttention-3 on E4M3 inputs."""
    from flash_attn_interface import flash_attn_func

    (q, of_q), (k, of_k), (v, of_v) = (to_e4m3(x.transpose(1, 2).contiguous(), (1, 3)) for x in qkv)
    descale = {f"{name}_descale": scale.flatten(1) for name, scale in zip("qkv", (of_q, of_k, of_v))}
    return Prepared(lambda: flash_attn_func(q, k, v, causal=is_causal, **descale), lambda out: out.transpose(1, 2))


def prepare_sage2_call(qkv: Qkv, is_causal: bool) -> Prepared:
    """SageAttention2's call for Hopper, with its defaults."""
    from sageattention import sageattn_qk_int8_pv_fp8_cuda_sm90

    return Prepared(lambda: sageattn_qk_int8_pv_fp8_cuda_sm90(*qkv, tensor_layout="HND", is_causal=is_causal))


def prepare_sage2_kernel(qkv: Qkv, is_causal: bool) -> Prepared:
    """SageAttention2's attention for Hopper, on what its call would hand to it."""
    from sageattention.quant import per_channel_fp8
    from sageattention.triton.quant_per_thread import per_thread_int8

    attend = torch.ops.sageattention_sm90.qk_int8_sv_f8_accum_f32_fuse_v_scale_attn_inst_buf
    q, k, v = qkv
    q_int8, q_scale, k_int8, k_scale = per_thread_int8(q, k, k.mean(2, keepdim=True), BLKQ=64, WARPQ=16, BLKK=128,
                                                       WARPK=128, tensor_layout="HND")
    v_fp8, v_scale, _ = per_channel_fp8(v, tensor_layout="HND", smooth_v=False)
    out, scale, hnd, per_thread = common.poisoned(q), q.shape[-1] ** -0.5, 1, 3

    def work() -> torch.Tensor:
        attend(q_int8, k_int8, v_fp8, out, q_scale, k_scale, v_scale, hnd, int(is_causal), per_thread, scale, 0)
        return out

    return Prepared(work)


def prepare_comfy(qkv: Qkv, is_causal: bool) -> Prepared:
    """comfy-kitchen's call in INT8, which has no causal mask."""
    from comfy_kitchen.sage_attention import int8_attention

    return Prepared(lambda: int8_attention(*qkv))


def prepare_cudnn_fp8(qkv: Qkv, is_causal: bool) -> Prepared:
    """cuDNN on E4M3 inputs, to bf16; where this cuDNN refuses that, to E4M3, scaled by the output's magnitude."""
    from cudnn import cudnnGraphNotSupportedError

    try:
        return cudnn_fp8(qkv, is_causal, torch.bfloat16, 1.0)
    except cudnnGraphNotSupportedError:
        largest = common.sdpa(CUDNN, *qkv, is_causal).abs().amax().item()
        return cudnn_fp8(qkv, is_causal, torch.float8_e4m3fn, E4M3_MAX / largest)


def cudnn_fp8(qkv: Qkv, is_causal: bool, out_dtype: torch.dtype, out_scale: float) -> Prepared:
    """cuDNN's FP8 attention as a graph of cudnn-frontend."""
    import cudnn

    f32, handle = cudnn.data_type.FLOAT, cudnn_handle()
    dtypes = {torch.bfloat16: cudnn.data_type.BFLOAT16, torch.float8_e4m3fn: cudnn.data_type.FP8_E4M3}
    inputs, descales = zip(*(to_e4m3(x, (0, 1, 2, 3)) for x in qkv))
    out, shape, strides = torch.empty_like(qkv[0], dtype=out_dtype), qkv[0].shape, qkv[0].stride()
    scalars = [*descales, *(torch.full((1, 1, 1, 1), value, device=out.device)
                            for value in (1 / P_SCALE, P_SCALE, out_scale))]
    largest = [torch.zeros(1, 1, 1, 1, device=out.device) for _ in range(2)]  # of P and of the output

    graph = cudnn.pygraph(io_data_type=dtypes[torch.float8_e4m3fn], intermediate_data_type=f32, compute_data_type=f32,
                          handle=handle)
    nodes = [graph.tensor(name=name, dim=list(x.shape), stride=list(x.stride()), data_type=dtypes[x.dtype])
             for name, x in zip("qkv", inputs)]
    names = ("descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o")
    nodes += [graph.tensor(name=name, dim=[1] * 4, stride=[1] * 4, data_type=f32) for name in names]
    result, _, *amax = graph.sdpa_fp8(**dict(zip(("q", "k", "v", *names), nodes)), attn_scale=shape[-1] ** -0.5,
                                      use_causal_mask=is_causal, generate_stats=False, name="sdpa")
    result.set_output(True).set_dim(list(shape)).set_stride(list(strides)).set_data_type(dtypes[out_dtype])
    for node in amax:
        node.set_output(True).set_dim([1] * 4).set_stride([1] * 4).set_data_type(f32)
    graph.build([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])

    bound = dict(zip([*nodes, result, *amax], [*inputs, *scalars, out, *largest]))
    workspace = torch.empty(max(1, graph.get_workspace_size()), dtype=torch.uint8, device=out.device)

    def work() -> torch.Tensor:
        cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream().cuda_stream)
        graph.execute(bound, workspace, handle=handle)
        return out

    return Prepared(work, lambda out: out.float() / out_scale, f"output in {str(out_dtype).removeprefix('torch.')}")


@functools.cache
def cudnn_handle() -> object:
    import cudnn

    return cudnn.create_handle()


def to_e4m3(x: torch.Tensor, dims: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """x in E4M3, and by what to multiply it: a scale for all elements along `dims`."""
    descale = x.abs().amax(dims, keepdim=True).float() / E4M3_MAX
    return (x / descale).to(torch.float8_e4m3fn), descale


def contestants(backend: CudaBackend, arch: str) -> list[Contestant]:
    """The rows, those last that may not be captured."""
    return [
        *(Contestant(row, None, 0.01, functools.partial(prepare_sdpa, row)) for row in common.SDPA),
        Contestant(f"{arch} kernel", None, 0.06, functools.partial(prepare_kernel, backend)),
        Contestant(f"{arch} call", None, 0.06, prepare_call),
        Contestant("fa3_bf16", FLASH3, 0.01, prepare_flash3),
        Contestant("fa3_fp8 kernel", FLASH3, 0.1, prepare_flash3_fp8),
        Contestant("cudnn_fp8 kernel", CUDNN_FRONTEND, 0.1, prepare_cudnn_fp8),
        Contestant("comfy_int8 call", COMFY, 0.06, prepare_comfy, masks=("full",)),
        Contestant("sage2_sm90 kernel", SAGE2, 0.06, prepare_sage2_kernel),
        Contestant("sage2_sm90 call", SAGE2, 0.06, prepare_sage2_call),
    ]


# --- the sweep --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    row: str
    shape: Shape
    queued: Timing
    graph: Timing | None  # None: not asked for, or not captured
    accuracy: Accuracy
    note: str = ""

    def cells(self, cudnn: Row | None) -> list[object]:
        shape = self.shape
        return [self.row, shape.heads_cell, shape.headdim, shape.mask, shape.seqlen,
                *timing_cells(shape, self.queued, cudnn and cudnn.queued),
                *timing_cells(shape, self.graph, cudnn and cudnn.graph), f"{self.accuracy.cosine:.6f}",
                f"{self.accuracy.relative_l1:.4f}"]

    def to_json(self, cudnn: Row | None) -> dict[str, object]:
        return {"row": self.row, **vars(self.shape), "queued": timing_json(self.shape, self.queued,
                                                                           cudnn and cudnn.queued),
                "graph": timing_json(self.shape, self.graph, cudnn and cudnn.graph), **vars(self.accuracy),
                "note": self.note}


def timing_cells(shape: Shape, timing: Timing | None, cudnn: Timing | None) -> list[object]:
    """Time, its spread, TOPS and the multiple of cuDNN's speed."""
    if timing is None:
        return [None] * 4
    return [f"{timing.median_us:.1f}", f"{timing.p10_us:.1f}–{timing.p90_us:.1f}",
            f"{shape.operations / timing.median_us * 1e-6:.0f}",
            cudnn and f"{cudnn.median_us / timing.median_us:.2f}"]


def timing_json(shape: Shape, timing: Timing | None, cudnn: Timing | None) -> dict[str, object] | None:
    return timing and {"median_us": timing.median_us, "p10_us": timing.p10_us, "p90_us": timing.p90_us,
                       "tops": shape.operations / timing.median_us * 1e-6,
                       "ratio_to_cudnn": cudnn and cudnn.median_us / timing.median_us}


Timed = Callable[[Mapping[str, Callable[[], object]]], dict[str, Timing]]
"""A function that times works, interleaved."""


@dataclass
class Sweep:
    """Rows shape by shape, and what went wrong."""

    contestants: list[Contestant]
    timed: Timed
    graphs: bool = False
    capture: Callable[[Callable[[], object]], Captured] = Captured.of
    wrong: dict[str, str] = field(default_factory=dict)  # by row and shape
    not_captured: dict[str, str] = field(default_factory=dict)  # by row; it is not tried again

    def rows(self, shape: Shape, qkv: Qkv) -> list[Row]:
        """The rows of a shape. Nothing that a library raises ends the run: its row alone is missing."""
        expected, _ = reference.attention(*qkv, is_causal=shape.is_causal)
        prepared, accuracies = {}, {}
        for contestant in self.contestants:
            if shape.mask not in contestant.masks:
                continue
            try:
                ready = contestant.prepare(qkv, shape.is_causal)
                freed = common.poisoned(qkv[0])  # so that an output that nothing writes is not an earlier one
                del freed
                accuracies[contestant.row] = self._accuracy(contestant, ready.decoded(ready.work()), expected)
                prepared[contestant.row] = ready
            except Exception as error:
                self.wrong[f"{contestant.row}, {label(shape)}"] = sentence(error)
        works = {row: ready.work for row, ready in prepared.items()}
        queued = self.timed(works)
        graphs = self._graphs(prepared, expected) if self.graphs else {}
        replayed = self.timed({row: graph.replay for row, graph in graphs.items()})
        return [Row(row, shape, queued[row], replayed[row].of_one(graphs[row].calls) if row in graphs else None,
                    accuracies[row], prepared[row].note) for row in works]

    @staticmethod
    def _accuracy(contestant: Contestant, out: torch.Tensor, expected: torch.Tensor) -> Accuracy:
        """ValueError for an output that is further off than it should be."""
        accuracy = reference.measure(out, expected)
        if not accuracy.relative_l1 <= contestant.most_l1:  # NaN is wrong, too
            raise ValueError(f"wrong output: expected a relative L1 of at most {contestant.most_l1}, got "
                             f"{accuracy.relative_l1:.4f}")
        return accuracy

    def _graphs(self, prepared: dict[str, Prepared], expected: torch.Tensor) -> dict[str, Captured]:
        """Graphs whose replays were seen to compute: a launch on a stream of its own is in no graph."""
        graphs = {}
        for contestant in self.contestants:
            row = contestant.row
            if row not in prepared or row in self.not_captured:
                continue
            try:
                graph = self.capture(prepared[row].work)
                graph.out.zero_()
                graph.replay()
                self._accuracy(contestant, prepared[row].decoded(graph.out), expected)
                graphs[row] = graph
            except Exception as error:
                self.not_captured[row] = sentence(error)
        return graphs


def sentence(error: Exception) -> str:
    """The first line of an error, and its type."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def label(shape: Shape) -> str:
    return f"head dim {shape.headdim}, {shape.mask}, {shape.seqlen}"


# --- command line -----------------------------------------------------------------------------------------------------


def main() -> int:
    arguments = parse()
    common.require_cuda()
    library = common.use_kernels(arguments.kernels)
    inputs = f"N(0, 1) bf16, batch {arguments.batch}, {arguments.heads} heads; median of {arguments.rounds} rounds"
    header = common.header(library) | versions() | {"inputs": inputs}
    common.print_header(header)
    arch = common.default_archs(library)[0]
    backend = CudaBackend(library, arch)
    interleaved = functools.partial(timed, rounds=arguments.rounds)
    sweep = Sweep(installed(contestants(backend, arch)), interleaved, arguments.graph)
    with handing(backend):
        rows = table(sweep, shapes(arguments))
    notes = {row["row"]: row["note"] for row in rows if row["note"]}
    for title, found in (("note", notes), ("not captured", sweep.not_captured), ("wrong", sweep.wrong)):
        for name, why in found.items():
            print(f"- {title}: {name}: {why}")
    common.write_json(arguments.json, {"header": header, "rows": rows, "not_captured": sweep.not_captured,
                                       "wrong": sweep.wrong})
    if sweep.wrong:
        print(f"peers.py: expected every library to compute attention, got {len(sweep.wrong)} rows that did not",
              file=sys.stderr)
    return 1 if sweep.wrong else 0


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    common.add_shape_arguments(parser, seqlen="1024,4096,16384", batch=4, heads=32)
    parser.add_argument("--rounds", type=int, default=7, help="of each row (default: %(default)s)")
    parser.add_argument("--graph", action="store_true", help="also the GPU's time alone, by replaying CUDA graphs")
    arguments = parser.parse_args(argv)
    if any(seqlen % 128 for seqlen in arguments.seqlen):  # SageAttention2's attention alone pads nothing
        parser.error(f"--seqlen: expected multiples of 128, got {arguments.seqlen}")
    if not set(arguments.headdim) <= {64, 128}:
        parser.error(f"--headdim: expected 64, 128 or both, which all libraries take, got {arguments.headdim}")
    return arguments


def versions() -> dict[str, str]:
    """The libraries' versions, and cuDNN's, for the header."""
    return {library.name: library.version for library in LIBRARIES} | {
        "cuDNN": str(torch.backends.cudnn.version() or "not installed")}


def installed(contestants: Iterable[Contestant]) -> list[Contestant]:
    return [contestant for contestant in contestants
            if contestant.library is None or contestant.library.version != "not installed"]


def shapes(arguments: argparse.Namespace) -> list[Shape]:
    return [Shape(*values, arguments.batch, arguments.heads, arguments.heads)
            for values in itertools.product(arguments.headdim, arguments.mask, arguments.seqlen)]


def timed(works: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, Timing]:
    """Works interleaved, after a moment of work for the clock to settle."""
    for work in itertools.islice(works.values(), 1):
        warm_up(work)
    return time_interleaved(works, rounds)


def table(sweep: Sweep, shapes: list[Shape], device: str = "cuda") -> list[dict[str, object]]:
    """Print the table shape by shape, and return it for the JSON file."""
    print(common.table_head(COLUMNS))
    results = []
    for shape in shapes:
        generator = torch.Generator(device).manual_seed(0)
        qkv = [torch.randn(shape.batch, shape.heads, shape.seqlen, shape.headdim, device=device, dtype=torch.bfloat16,
                           generator=generator) for _ in range(3)]
        rows = sweep.rows(shape, qkv)
        cudnn = next((row for row in rows if row.row == CUDNN), None)
        for row in rows:
            print(common.table_row(row.cells(cudnn)), flush=True)
            results.append(row.to_json(cudnn))
        del qkv, rows
        gc.collect()  # graphs, whose memory the next shape needs
    return results


if __name__ == "__main__":
    common.run(main)
