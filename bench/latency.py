"""Host time of a call until it returns, of its parts, of the first call of a process, and of the import.

    python bench/latency.py --json latency.json
    python bench/latency.py --also ../another-tree

Tensors are tiny, so that a call returns as soon as its launches are queued. Calls are timed in batches, with a
synchronization between batches: the queue of a stream holds about a thousand launches, and a call that finds the queue
full waits for the GPU. Every figure comes from processes of its own, one per loader, in which the rows run alternately.
Fresh processes find bytecode, as those of an installed package do: pip writes it. `--also` measures the package of
another source tree as well, with that tree's kernels, alternately with this package.
"""

from __future__ import annotations

import argparse
import atexit
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F

BATCH, BATCHES, WARM_UP_CALLS, PROCESSES = 60, 60, 200, 3
SHAPE = (1, 2, 64, 128)  # batch, heads, tokens, channels
SDPA = "scaled_dot_product_attention"
TREE = Path(__file__).parents[1]
LOADERS = ("cupy", "cuda-bindings", "ctypes")

Works = dict[str, Callable[[], object]]

FIRST_CALL = """
import time, torch
from sage_aot import attn
try:
    import cupy
    cupy.cuda.runtime.driverGetVersion()  # what loads kernels is imported, and nothing of this package's is read
except ImportError:
    from cuda.bindings import driver
q, k, v = torch.randn(3, 1, 2, 64, 128, device="cuda").bfloat16()
torch.cuda.synchronize()
begin = time.perf_counter()
attn(q, k, v)
torch.cuda.synchronize()
print(1e3 * (time.perf_counter() - begin))
"""

IMPORT = """
import time, torch
begin = time.perf_counter()
from sage_aot import attn
print(1e3 * (time.perf_counter() - begin))
"""


def main() -> int:
    import common  # not at the top: a worker's tree may have another package, which common does not fit

    arguments = parse()
    common.require_cuda()
    header = common.header(common.default_library()) | {
        "inputs": f"N(0, 1) bf16 {list(SHAPE)}; {BATCHES} batches of {BATCH} calls: minimum (median)"}
    common.print_header(header)
    results = measured([TREE, *arguments.also])
    common.write_json(arguments.json, {"header": header, **results})
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--also", type=Path, nargs="*", default=[], metavar="TREE", help="other source trees")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write everything here")
    return parser.parse_args()


def measured(trees: list[Path]) -> dict[str, Any]:
    """Print and return everything, per tree and loader."""
    results: dict[str, Any] = {}
    for turn in range(2):  # twice: a host's speed drifts
        for loader in LOADERS:
            for tree in trees:
                name = f"{tree.name if tree != TREE else 'this tree'}, {loader}, turn {turn + 1}"
                results[name] = calls = in_process(tree, loader, "calls")
                show_calls(f"host cost of a call, µs: {name}", calls)
    for loader in LOADERS:
        results[f"parts, {loader}"] = parts = in_process(TREE, loader, "parts")
        show(f"where the time goes, µs: {loader}", parts)
        for tree in trees:
            name = f"{tree.name if tree != TREE else 'this tree'}, {loader}"
            results[f"new lengths, {name}"] = lengths = in_process(tree, loader, "new_lengths")
            show(f"calls of a kind not seen before, µs: {name}", lengths)
    for tree in trees:
        name = tree.name if tree != TREE else "this tree"
        in_process(tree, "", "-c", FIRST_CALL)  # writes the bytecode
        results[f"fresh processes, {name}"] = fresh = {
            "first call, with synchronize": [in_process(tree, "", "-c", FIRST_CALL) for _ in range(PROCESSES)],
            "import after torch": [in_process(tree, "", "-c", IMPORT) for _ in range(PROCESSES)]}
        show(f"fresh processes, ms: {name}", fresh)
    return results


def in_process(tree: Path, loader: str, *command: str) -> Any:
    """The JSON that a worker of this program, or another program, prints with the package of a tree."""
    program = command if command[0] == "-c" else (__file__, "--worker", *command)
    environment = {**os.environ, "PYTHONPATH": str(tree), "SAGE_AOT_LOADER": loader, "PYTHONDONTWRITEBYTECODE": "",
                   "PYTHONPYCACHEPREFIX": bytecode()}
    done = subprocess.run([sys.executable, *program], stdout=subprocess.PIPE, text=True, check=True, env=environment)
    return json.loads(done.stdout)


@cache
def bytecode() -> str:
    """The folder of this run's bytecode, removed at the end."""
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder)
    return folder


def show_calls(title: str, figures: dict[str, tuple[float, float]]) -> None:
    """Print each row with its ratio to SDPA's minimum in the same process."""
    print(f"{title}:")
    for name, (least, middle) in figures.items():
        print(f"- {name}: {least:.1f} ({middle:.1f}), {least / figures[SDPA][0]:.2f} x SDPA", flush=True)


def show(title: str, figures: dict[str, Any]) -> None:
    print(f"{title}:")
    for name, value in figures.items():
        values = value if isinstance(value, list) else [value]
        print(f"- {name}: {', '.join(f'{v:.1f}' for v in values)}", flush=True)


# --- workers ----------------------------------------------------------------------------------------------------------


def inputs(tokens: int = SHAPE[2]) -> list[torch.Tensor]:
    return [torch.randn(SHAPE[0], SHAPE[1], tokens, SHAPE[3], device="cuda").bfloat16() for _ in range(3)]


def calls() -> dict[str, tuple[float, float]]:
    """Per kind of call, the minimum and the median of its microseconds over the batches."""
    import sage_aot

    q, k, v = inputs()
    nhd = [tensor.transpose(1, 2).contiguous() for tensor in (q, k, v)]
    out = torch.empty_like(q)
    return timed({
        SDPA: lambda: F.scaled_dot_product_attention(q, k, v),
        "attn": lambda: sage_aot.attn(q, k, v),
        "attn, causal": lambda: sage_aot.attn(q, k, v, is_causal=True),
        "attn, out=": lambda: sage_aot.attn(q, k, v, out=out),
        "attn, return_lse": lambda: sage_aot.attn(q, k, v, return_lse=True),
        "attn, NHD": lambda: sage_aot.attn(*nhd, layout="NHD"),
        "attn, smooth_q (three launches)": lambda: sage_aot.attn(q, k, v, smooth_q=True),
    })


def parts() -> dict[str, float]:
    """Per part of a call, the minimum of its microseconds. The dispatcher's time is the operator's less all other
    parts."""
    import sage_aot
    from sage_aot._backends.cuda.call import addresses_of
    from sage_aot._call import ops, pipeline
    from sage_aot._problem.given import Given
    from sage_aot._problem.options import OPTIONS, for_schema
    from sage_aot._problem.tensors import TENSORS

    q, k, v = inputs()
    options = [option.default for option in OPTIONS.values()]
    sage_aot.attn(q, k, v)
    given, out = Given("dense", q, k, v), torch.empty_like(q)
    call: Any = pipeline.prepared(given, None, ()).run
    workspace = q.new_empty(call.plan.workspace_bytes, dtype=torch.uint8)
    stream = torch.cuda.current_stream().cuda_stream
    addresses = addresses_of(given, out, None, workspace)
    queue, size = call.queue_of(call.launches()), call.plan.workspace_bytes
    queue.launch(stream, *addresses)
    launchers = queue._free[0].launchers

    def launch() -> None:
        for launcher in launchers:
            launcher(stream)

    def allocate() -> None:
        torch._C._cuda_cudaCachingAllocator_raw_delete(torch._C._cuda_cudaCachingAllocator_raw_alloc(size, stream))

    found = {name: least for name, (least, _) in timed({
        "options, checked": lambda: for_schema(*options),
        "look-up of the prepared call": lambda: pipeline.prepared(given, None, ()),
        "output": lambda: torch.empty_like(q, memory_format=torch.contiguous_format),
        "prepared call": lambda: call(given, out, None),
        "of it the workspace": allocate,
        "of it structs and launches": lambda: queue.launch(stream, *addresses),
        "of these the launches": launch,
        "operator": lambda: ops.attn.plain(q, k, v, *[None] * len(TENSORS)),
        "call": lambda: sage_aot.attn(q, k, v),
        "outside the call: supports": lambda: sage_aot.supports(q, k, v),
    }).items()}
    inside = ("look-up of the prepared call", "output", "prepared call")
    return found | {"torch's dispatcher, and freeing the output":
                    found["operator"] - sum(found[name] for name in inside)}


def new_lengths() -> dict[str, float]:
    """Calls of BATCH lengths, each length for the first time, after one call of another length."""
    import sage_aot

    tensors = [inputs(tokens) for tokens in range(65, 65 + BATCH)]
    sage_aot.attn(*inputs())
    torch.cuda.synchronize()
    samples = []
    for qkv in tensors:
        begin = time.perf_counter_ns()
        sage_aot.attn(*qkv)
        samples.append((time.perf_counter_ns() - begin) / 1e3)
    torch.cuda.synchronize()
    return {"minimum": min(samples), "median": median(samples)}


WORKERS: dict[str, Callable[[], Any]] = {"calls": calls, "parts": parts, "new_lengths": new_lengths}


def timed(works: Works) -> dict[str, tuple[float, float]]:
    """Per work, microseconds of one repeat: minimum and median over the batches. The works run alternately."""
    samples: dict[str, list[float]] = {name: [] for name in works}
    for work in works.values():
        batch_us(work, WARM_UP_CALLS)
    for _ in range(BATCHES):
        for name, work in works.items():
            samples[name].append(batch_us(work, BATCH))
    return {name: (min(found), median(found)) for name, found in samples.items()}


def batch_us(work: Callable[[], object], count: int) -> float:
    torch.cuda.synchronize()
    begin = time.perf_counter_ns()
    for _ in range(count):
        work()
    taken = (time.perf_counter_ns() - begin) / 1e3 / count
    torch.cuda.synchronize()
    return taken


def work(name: str) -> int:
    print(json.dumps(WORKERS[name]()))
    return 0


if __name__ == "__main__":
    sys.exit(work(sys.argv[2]) if sys.argv[1:2] == ["--worker"] else main())
