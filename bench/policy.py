"""Host time of the policy in front of calls that it leaves to torch.

    python bench/policy.py --json policy.json     # on a GPU: µs of a call among calls that are queued
    python bench/policy.py --device cpu           # anywhere: µs of the policy's own Python

On a GPU, for the calls of `sage-aot bench` whose launch takes the host longest compared with their work: torch's
function, the same with each backend chosen around it, a backend's operator called directly, and the policy. `gpu` is
the GPU's time alone. On the CPU torch's function is replaced by one that returns at once, and tensors say that they are
CUDA tensors of an H200. `hot` is the least time in a loop, `cold` the median where each call comes after 2 MB of memory
were written, as the caches are after a launch.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch
import torch.nn.functional as F

import common
from sage_aot._cli.bench import BACKENDS, THOROUGH, USES, Shape, Way, timed, ways_of
from sage_aot.integrations import Policy, _calibration, use
from sage_aot.integrations import torch as integration
from sage_aot.integrations._gain import built_in

SHAPES = [shape for shape in USES if shape.name in (
    "encoder: MiniLM, 128", "cross: SDXL 1024²", "decode: Llama 3 8B, 1 × 8192", "decode: Llama 3 8B, 16 drafts",
    "image: SDXL 1024², inner", "encoder: ViT, 197")]

CALLS, ROUNDS, COLD_CALLS = 2000, 100, 3000


# --- on a GPU ---------------------------------------------------------------------------------------------------------


def on_gpu(shape: Shape) -> dict[str, object]:
    ways = {name: way for name, way in ways_of(shape).items() if name != "attn"}
    q, k, v = (torch.randn(shape.batch, heads, rows, shape.headdim, device="cuda", dtype=torch.bfloat16)
               for heads, rows in ((shape.heads, shape.queries), *[(shape.kv_heads, shape.keys)] * 2))
    operators: dict[str, Callable[[], torch.Tensor]] = {
        "flash": lambda: torch._scaled_dot_product_flash_attention(q, k, v)[0],
        "cudnn": lambda: torch._scaled_dot_product_cudnn_attention(q, k, v, None, False)[0]}
    for name, work in operators.items():
        if name in ways:
            ways[f"{name} operator"] = Way(work)
    times = timed(ways, THOROUGH)
    best = min((name for name in times if name in BACKENDS), key=lambda name: times[name].wall)
    return {"shape": shape.name, "best": best,
            **{name: {"gpu": round(way.gpu, 1), "wall": round(way.wall, 1)} for name, way in times.items()},
            "policy / best, gpu": round(min(times[name].gpu for name in times if name in BACKENDS)
                                        / times["policy"].gpu, 3),
            "policy / best, wall": round(times[best].wall / times["policy"].wall, 3)}


# --- on a CPU ---------------------------------------------------------------------------------------------------------


def on_cpu(shape: Shape) -> dict[str, object]:
    q, k, v = (torch.empty(shape.batch, heads, rows, shape.headdim, dtype=torch.bfloat16)
               for heads, rows in ((shape.heads, shape.queries), *[(shape.kv_heads, shape.keys)] * 2))
    grouped = shape.heads != shape.kv_heads

    def nothing(*args: object, **options: object) -> tuple[None]:
        return (None,)

    def by(function: Callable[..., object]) -> Callable[[], object]:
        return lambda: function(q, k, v, None, is_causal=False, enable_gqa=grouped)

    with (mock.patch.object(integration, "_TORCHS", nothing), mock.patch.object(torch.Tensor, "is_cuda", True),
          mock.patch.object(torch, "_scaled_dot_product_flash_attention", nothing),
          mock.patch.dict(_calibration._chosen, {-1: _calibration.Chosen(*built_in((9, 0)))})):
        ways = {"policy": by(integration.sdpa), "nothing": by(nothing)}
        hot = {name: _hot(work) for name, work in ways.items()}
        cold = _cold(ways)
    return {"shape": shape.name, "hot": round(hot["policy"] - hot["nothing"], 2),
            "cold": round(cold["policy"] - cold["nothing"], 2)}


def _hot(work: Callable[[], object]) -> float:
    def once() -> float:
        began = time.perf_counter()
        for _ in range(CALLS):
            work()
        return 1e6 * (time.perf_counter() - began) / CALLS

    return min(once() for _ in range(ROUNDS))


def _cold(ways: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Time calls in turns. A small attention call comes first: torch's own code is then where it is between calls."""
    memory, lines = bytearray(2 << 20), bytes((2 << 20) // 64)
    small = torch.randn(1, 1, 8, 16)
    took: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(COLD_CALLS):
        for name, work in ways.items():
            F.scaled_dot_product_attention(small, small, small)
            memory[::64] = lines
            began = time.perf_counter()
            work()
            took[name].append(1e6 * (time.perf_counter() - began))
    return {name: statistics.median(values) for name, values in took.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="(default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write everything here")
    arguments = parser.parse_args()
    if arguments.device == "cuda":
        common.require_cuda()
    rows = []
    with torch.inference_mode(), use(Policy()):
        for shape in SHAPES:
            rows.append(on_gpu(shape) if arguments.device == "cuda" else on_cpu(shape))
            print(", ".join(f"{name}: {value}" for name, value in rows[-1].items()), flush=True)
    common.write_json(arguments.json, {"rows": rows})
    return 0


if __name__ == "__main__":
    common.run(main)
