"""Speed of calls with k and v that were quantized before, beside direct calls and torch's attention.

    python bench/quantized_kv.py
    python bench/quantized_kv.py --shape 16,32,8,1,8192 --headdim 128

A shape is batch, heads of q, heads of k and v, queries, keys. `sdpa` is scaled_dot_product_attention by the kernel that
torch chooses; `call` is sage_aot.attn(q, k, v), `call, kv` sage_aot.attn(q, kv), whose k and v were quantized before,
`quantize` sage_aot.quantize_kv(k, v). A row's time is the GPU's alone, by replaying CUDA graphs. The outputs of both
calls have equal bits, and are checked against sdpa.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Iterator

import torch

import common
import sage_aot
from speed import time_by_graph

COLUMNS = ("row", "batch × heads", "queries", "keys", "headdim", "µs", "× sdpa", "cosine")

SHAPES = ["16,32,8,1,8192", "1,32,8,1,32768", "1,32,8,512,8192", "2,24,24,4096,512"]
"""Decoding of a batch and of one long sequence, a chunk of a prompt, an image's cross-attention."""


def main() -> int:
    arguments = parse()
    common.require_cuda()
    library = common.use_kernels(arguments.kernels)
    common.print_header(common.header(library) | {"inputs": f"N(0, 1) bf16, full; median of {arguments.repeat}"})
    print(common.table_head(COLUMNS))
    for shape in arguments.shape or map(common.integers, SHAPES):
        for row in rows(shape, arguments.headdim, functools.partial(time_by_graph, repeat=arguments.repeat)):
            print(common.table_row(row), flush=True)
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", type=common.integers, action="append", help="may be repeated (default: SHAPES)")
    parser.add_argument("--headdim", type=int, default=128, help="(default: %(default)s)")
    parser.add_argument("--kernels", metavar="FOLDER", help="built kernels (default: those of the package)")
    parser.add_argument("--repeat", type=int, default=10, help="timed repeats of a row (default: %(default)s)")
    return parser.parse_args()


def rows(shape: list[int], headdim: int, timed: functools.partial) -> Iterator[list[object]]:
    batch, heads, kv_heads, queries, keys = shape
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v = (torch.randn(batch, own, rows, headdim, device="cuda", dtype=torch.bfloat16, generator=generator)
               for own, rows in ((heads, queries), (kv_heads, keys), (kv_heads, keys)))
    kv = sage_aot.quantize_kv(k, v)
    sdpa = functools.partial(torch.nn.functional.scaled_dot_product_attention, q, k, v, enable_gqa=heads != kv_heads)
    out = sage_aot.attn(q, kv, out=common.poisoned(q))
    if not torch.equal(out, sage_aot.attn(q, k, v)):
        raise SystemExit(f"{shape}: the call with quantized k and v differs from the direct one")
    cosine = common.check_output("call, kv", out, sdpa())
    theirs = timed(sdpa).median_us
    for name, call in {"sdpa": sdpa, "call": lambda: sage_aot.attn(q, k, v), "call, kv": lambda: sage_aot.attn(q, kv),
                       "quantize": lambda: sage_aot.quantize_kv(k, v)}.items():
        own = theirs if name == "sdpa" else timed(call).median_us
        heads_cell = f"{batch}×{heads}" + (f"/{kv_heads}" if kv_heads != heads else "")
        yield [name, heads_cell, queries, keys, headdim, f"{own:.1f}", f"{theirs / own:.2f}",
               f"{cosine:.6f}" if name.startswith("call") else None]


if __name__ == "__main__":
    common.run(main)
