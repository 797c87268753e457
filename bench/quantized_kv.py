"""Speed of calls with k and v that were quantized before, compared with direct calls and torch's attention.

    python bench/quantized_kv.py
    python bench/quantized_kv.py --shape 16,32,8,1,8192 --headdim 128 --splits 1,4,16

A shape is batch, heads of q, heads of k and v, queries, keys. `sdpa` is scaled_dot_product_attention by the kernel that
torch chooses; `call` is sage_aot.attn(q, k, v), `call, kv` sage_aot.attn(q, kv), whose k and v were quantized before,
`quantize` sage_aot.quantize_kv(k, v). `splits` is how many blocks share the keys of a query tile; --splits adds rows
that set it. A row's time is the GPU's alone, by replaying CUDA graphs. The outputs of both calls have equal bits, and
all outputs are checked against sdpa.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Iterator

import torch

import common
import sage_aot
from sage_aot._backends.cuda.backend import CudaBackend
from sage_aot._backends.loader import Library
from sage_aot._call.backends import handing
from speed import time_by_graph

COLUMNS = ("row", "batch × heads", "queries", "keys", "headdim", "splits", "µs", "× sdpa",
           "cosine")

SHAPES = ["16,32,8,1,8192", "8,32,8,1,8192", "4,32,8,1,8192", "1,32,8,1,8192", "1,32,8,1,32768", "1,32,8,16,8192",
          "1,32,8,128,8192", "1,32,8,512,8192", "2,24,24,4096,512"]
"""Decoding of a batch and of one sequence, chunks of a prompt, an image's cross-attention."""


def main() -> int:
    arguments = parse()
    common.require_cuda()
    library = common.use_kernels(arguments.kernels)
    common.print_header(common.header(library) | {"inputs": f"N(0, 1) bf16, full; median of {arguments.repeat}"})
    print(common.table_head(COLUMNS))
    timed = functools.partial(time_by_graph, repeat=arguments.repeat)
    for shape in arguments.shape or map(common.integers, SHAPES):
        for row in rows(shape, arguments.headdim, library, arguments.splits, timed):
            print(common.table_row(row), flush=True)
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", type=common.integers, action="append", help="may be repeated (default: SHAPES)")
    parser.add_argument("--headdim", type=int, default=128, help="(default: %(default)s)")
    parser.add_argument("--splits", type=common.integers, default=[], help="rows with so many splits, such as 1,4,16")
    parser.add_argument("--kernels", metavar="FOLDER", help="built kernels (default: those of the package)")
    parser.add_argument("--repeat", type=int, default=10, help="timed repeats of a row (default: %(default)s)")
    return parser.parse_args()


def rows(shape: list[int], headdim: int, library: Library, splits: list[int],
         timed: functools.partial) -> Iterator[list[object]]:
    batch, heads, kv_heads, queries, keys = shape
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v = (torch.randn(batch, own, rows, headdim, device="cuda", dtype=torch.bfloat16, generator=generator)
               for own, rows in ((heads, queries), (kv_heads, keys), (kv_heads, keys)))
    kv = sage_aot.quantize_kv(k, v)
    sdpa = functools.partial(torch.nn.functional.scaled_dot_product_attention, q, k, v, enable_gqa=heads != kv_heads)
    expected, theirs = sdpa(), timed(sdpa).median_us
    heads_cell = f"{batch}×{heads}" + (f"/{kv_heads}" if kv_heads != heads else "")

    def row(name: str, own: float, split: int | None = None, cosine: float | None = None) -> list[object]:
        return [name, heads_cell, queries, keys, headdim, split, f"{own:.1f}", f"{theirs / own:.2f}",
                None if cosine is None else f"{cosine:.6f}"]

    def checked() -> float:
        return common.check_output("call, kv", sage_aot.attn(q, kv, out=common.poisoned(q)), expected)

    if not torch.equal(sage_aot.attn(q, kv), sage_aot.attn(q, k, v)):
        raise SystemExit(f"{shape}: the call with quantized k and v differs from the direct one")
    chosen = sage_aot.explain(q, kv).splits
    yield row("sdpa", theirs)
    yield row("call", timed(lambda: sage_aot.attn(q, k, v)).median_us, chosen, checked())
    yield row("call, kv", timed(lambda: sage_aot.attn(q, kv)).median_us, chosen, checked())
    yield row("quantize", timed(lambda: sage_aot.quantize_kv(k, v)).median_us)
    for split in splits:
        with handing(CudaBackend(library, splits=split)):
            yield row("call, kv", timed(lambda: sage_aot.attn(q, kv)).median_us, split, checked())


if __name__ == "__main__":
    common.run(main)
