"""Shapes at which torch's attention is faster: calls of sage_aot and of scaled_dot_product_attention over a grid.

    python bench/crossover.py --json crossover.json

`sdpa` is scaled_dot_product_attention by the backend that torch chooses, `best` the fastest of its backends for the
shape. `gpu` is the GPU's time alone, by replaying CUDA graphs; `wall` the time of a call among calls that are queued
back to back, whose host part counts where it is longer. µs. A `padded` call has a key mask, which hides the last keys
of every second batch entry; for SDPA it is a mask of shape [batch, 1, 1, keys]. The policy of sage_aot.integrations
takes its thresholds from these figures. sage_aot/_cli/bench.py measures.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import common
from sage_aot._cli.bench import BACKENDS, Row, Shape, measured

COLUMNS = ("kind", "batch × heads", "headdim", "queries", "keys", "sdpa gpu", "best gpu", "ours gpu", "sdpa wall",
           "best wall", "ours wall", "backend", "× best gpu", "× best wall")
HEADS = ((1, 24, 24), (2, 24, 24), (1, 32, 8), (8, 32, 8))
"""Batch, heads of q, heads of k and v."""

MOST_PAIRS = 2e12
"""Most pairs of a query and a key, times batch, heads and headdim. Larger shapes are left out: no doubt about them."""


def grid() -> Iterator[Shape]:
    """All shapes: self-attention, decoding and chunks of a prompt, cross-attention."""
    def shape(kind: str, heads: tuple[int, int, int], headdim: int, queries: int, keys: int) -> Shape:
        return Shape("", *heads, queries, keys, headdim, kind)

    for headdim in (64, 128, 256):
        for heads in HEADS if headdim == 128 else HEADS[::2]:
            for keys in (128, 256, 512, 1024, 2048, 4096, 8192):
                yield shape("full", heads, headdim, keys, keys)
                yield shape("causal", heads, headdim, keys, keys)
                if heads[0] > 1 and keys <= 4096:
                    yield shape("padded", heads, headdim, keys, keys)
            for queries in (1, 16, 128, 512):
                for keys in (512, 2048, 8192, 32768):
                    if queries != keys:
                        yield shape("full", heads, headdim, queries, keys)
            for keys in (77, 256, 512, 1024):
                yield shape("full", heads, headdim, 4096, keys)
                yield shape("full", heads, headdim, 16384, keys)


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
        pairs = shape.batch * shape.heads * shape.queries * shape.keys * shape.headdim
        if shape.headdim in arguments.headdim and pairs <= MOST_PAIRS:
            row = measured(shape)
            results.append(row.to_json())
            print(common.table_row(cells(row)), flush=True)
    common.write_json(arguments.json, {"header": header, "rows": results})
    return 0


def cells(row: Row) -> list[object]:
    shape, ways, best, ratio = row.shape, row.ways, row.best(), row.ratio("attn")
    heads = f"{shape.batch} × {shape.heads}" + (f"/{shape.kv_heads}" if shape.kv_heads != shape.heads else "")
    fastest = min((name for name in ways if name in BACKENDS), key=lambda name: ways[name].gpu)
    times = ways["sdpa"].gpu, best.gpu, ways["attn"].gpu, ways["sdpa"].wall, best.wall, ways["attn"].wall
    return [shape.kind, heads, shape.headdim, shape.queries, shape.keys, *(f"{value:.1f}" for value in times), fastest,
            f"{ratio.gpu:.2f}", f"{ratio.wall:.2f}"]


if __name__ == "__main__":
    common.run(main)
