"""Where torch's attention is faster: calls of sage_aot beside scaled_dot_product_attention over a grid of shapes.

    python bench/crossover.py --json crossover.json

`sdpa` is scaled_dot_product_attention by the backend that torch chooses, `best` the fastest of its backends for the
shape. `gpu` is the GPU's time alone, by replaying CUDA graphs; `wall` the time of a call among calls that are queued
back to back, whose host part counts where it is longer. µs. A `padded` call has a key mask, which half of the batch
entries fill to 3/4; for SDPA it is a mask of shape [batch, 1, 1, keys]. The policy of sage_aot.integrations takes its
thresholds from these figures.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import common
import sage_aot

COLUMNS = ("kind", "batch × heads", "headdim", "queries", "keys", "sdpa gpu", "best gpu", "ours gpu", "sdpa wall",
           "best wall", "ours wall", "backend", "× best gpu", "× best wall")
BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION,
            "efficient": SDPBackend.EFFICIENT_ATTENTION}
HEADS = ((1, 24, 24), (2, 24, 24), (1, 32, 8), (8, 32, 8))
"""Batch, heads of q, heads of k and v."""

CALLS = 10
"""Calls of a graph, and of one measurement of wall time."""

MOST_OPERATIONS = 8e12
"""Larger shapes are left out: there is no doubt about them."""


@dataclass(frozen=True)
class Shape:
    """One call."""

    kind: str  # full, causal or padded
    batch: int
    heads: int
    kv_heads: int
    headdim: int
    queries: int
    keys: int

    @property
    def operations(self) -> float:
        return 4.0 * self.batch * self.heads * self.queries * self.keys * self.headdim


def grid() -> Iterator[Shape]:
    """All shapes: self-attention, decoding and chunks of a prompt, cross-attention."""
    for headdim in (64, 128, 256):
        for heads in HEADS if headdim == 128 else HEADS[::2]:
            for keys in (128, 256, 512, 1024, 2048, 4096, 8192):
                yield Shape("full", *heads, headdim, keys, keys)
                yield Shape("causal", *heads, headdim, keys, keys)
                if heads[0] > 1 and keys <= 4096:
                    yield Shape("padded", *heads, headdim, keys, keys)
            for queries in (1, 16, 128, 512):
                for keys in (512, 2048, 8192, 32768):
                    if queries != keys:
                        yield Shape("full", *heads, headdim, queries, keys)
            for keys in (77, 256, 512, 1024):
                yield Shape("full", *heads, headdim, 4096, keys)
                yield Shape("full", *heads, headdim, 16384, keys)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", metavar="FOLDER", help="built kernels (default: those of the package)")
    parser.add_argument("--headdim", type=common.integers, default="64,128,256", help="(default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write everything here")
    arguments = parser.parse_args()
    common.require_cuda()
    header = common.header(common.use_kernels(arguments.kernels))
    common.print_header(header)
    print(common.table_head(COLUMNS))
    results = []
    for shape in grid():
        if shape.headdim in arguments.headdim and shape.operations <= MOST_OPERATIONS:
            results.append(vars(shape) | measure(shape))
            print(common.table_row(cells(shape, results[-1])), flush=True)
    common.write_json(arguments.json, {"header": header, "rows": results})
    return 0


def measure(shape: Shape) -> dict[str, dict[str, float] | None]:
    """GPU time and wall time of each way to compute a shape, in µs; None where a backend does not take it."""
    q, k, v = (torch.randn(shape.batch, heads, rows, shape.headdim, device="cuda", dtype=torch.bfloat16)
               for heads, rows in ((shape.heads, shape.queries), *[(shape.kv_heads, shape.keys)] * 2))
    is_causal = shape.kind == "causal"
    key_mask = mask = None
    if shape.kind == "padded":
        key_mask = torch.ones(shape.batch, shape.keys, dtype=torch.bool, device="cuda")
        key_mask[::2, 3 * shape.keys // 4:] = False
        mask = key_mask[:, None, None, :]

    def sdpa() -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, mask, is_causal=is_causal,
                                              enable_gqa=shape.heads != shape.kv_heads)

    def ours() -> torch.Tensor:
        return sage_aot.attn(q, k, v, key_mask=key_mask, is_causal=is_causal)

    common.check_output("ours", ours(), sdpa())
    results: dict[str, dict[str, float] | None] = {"ours": timed(ours), "sdpa": timed(sdpa)}
    for name, backend in BACKENDS.items():
        try:
            with sdpa_kernel(backend):
                sdpa()
                results[name] = timed(sdpa)
        except RuntimeError:  # the backend does not take it
            results[name] = None
    return results


def timed(work: Callable[[], object]) -> dict[str, float]:
    graph = torch.cuda.CUDAGraph()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        work()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            work()
    graph.replay()
    return {"gpu": least(graph.replay), "wall": least(lambda: [work() for _ in range(CALLS)])}


def least(work: Callable[[], object], repeat: int = 5) -> float:
    """The least of some wall times of CALLS calls, in µs of one call: from an idle GPU to an idle GPU."""
    times = []
    for _ in range(repeat):
        torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        torch.cuda.synchronize()
        times.append(1e6 * (time.perf_counter() - began) / CALLS)
    return min(times)


def cells(shape: Shape, result: dict[str, object]) -> list[object]:
    ways = {name: result[name] for name in ("sdpa", *BACKENDS) if result[name]}
    best = {clock: min(way[clock] for way in ways.values()) for clock in ("gpu", "wall")}
    fastest = min(ways, key=lambda name: ways[name]["gpu"])
    ours, sdpa = result["ours"], result["sdpa"]
    heads = f"{shape.batch} × {shape.heads}" + (f"/{shape.kv_heads}" if shape.kv_heads != shape.heads else "")
    return [shape.kind, heads, shape.headdim, shape.queries, shape.keys,
            *(f"{value:.1f}" for value in (sdpa["gpu"], best["gpu"], ours["gpu"], sdpa["wall"], best["wall"],
                                            ours["wall"])),
            fastest, *(f"{best[clock] / ours[clock]:.2f}" for clock in ("gpu", "wall"))]


if __name__ == "__main__":
    common.run(main)
