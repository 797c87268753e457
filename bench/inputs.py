"""Time of a call by dtype and alignment of its inputs, with options that cost time, compared with torch's attention.

    python bench/inputs.py --headdim 128,256 --seqlen 1024,4096

`sdpa` is scaled_dot_product_attention by the kernel that torch chooses for that dtype, of contiguous tensors; `call` is
sage_aot.attn. `unaligned`: rows that do not start at multiples of 16 bytes. A row's time is the GPU's alone, by
replaying CUDA graphs, quantization included. Every output is checked against sdpa before it is timed.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Iterator

import torch

import common
import sage_aot
from speed import time_by_graph

COLUMNS = ("inputs", "heads", "headdim", "N", "sdpa, µs", "call, µs", "× sdpa", "× call, bf16", "cosine")

KINDS: dict[str, tuple[torch.dtype, int, dict[str, bool]]] = {
    "bf16": (torch.bfloat16, 0, {}),
    "bf16, unaligned": (torch.bfloat16, 1, {}),
    "f32": (torch.float32, 0, {}),
    "f32, unaligned": (torch.float32, 1, {}),
    "bf16, rotate": (torch.bfloat16, 0, {"rotate": True}),
    "bf16, return_lse": (torch.bfloat16, 0, {"return_lse": True}),
}
"""Dtype, the elements by which rows miss the alignment, options."""


def main() -> int:
    arguments = parse()
    common.require_cuda()
    library = common.use_kernels(arguments.kernels)
    common.print_header(common.header(library) | {"inputs": f"N(0, 1), full; median of {arguments.repeat}"})
    print(common.table_head(COLUMNS))
    for headdim in arguments.headdim:
        for seqlen in arguments.seqlen:
            for row in rows(arguments, seqlen, headdim):
                print(common.table_row(row), flush=True)
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    common.add_size_arguments(parser, headdim="64,128,256", seqlen="1024,4096", batch=2, heads=16)
    parser.add_argument("--repeat", type=int, default=10, help="timed repeats of a row (default: %(default)s)")
    return parser.parse_args()


def rows(arguments: argparse.Namespace, seqlen: int, headdim: int) -> Iterator[list[object]]:
    shape = (3, arguments.batch, arguments.heads, seqlen, headdim)
    values = torch.randn(shape, device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    timed = functools.partial(time_by_graph, repeat=arguments.repeat)
    of_bf16 = None
    for kind, (dtype, missed, options) in KINDS.items():
        contiguous = values.to(dtype)
        sdpa = functools.partial(torch.nn.functional.scaled_dot_product_attention, *contiguous)
        q, k, v = torch.nn.functional.pad(contiguous, (missed, missed))[..., missed:missed + headdim]
        call = functools.partial(sage_aot.attn, q, k, v, **options)
        out = common.poisoned(q)
        call(out=out)
        cosine = common.check_output("call", out, sdpa())
        theirs, ours = timed(sdpa).median_us, timed(call).median_us
        of_bf16 = of_bf16 or ours
        yield [kind, f"{arguments.batch}×{arguments.heads}", headdim, seqlen, f"{theirs:.1f}", f"{ours:.1f}",
               f"{theirs / ours:.2f}", f"{ours / of_bf16:.2f}", f"{cosine:.6f}"]


if __name__ == "__main__":
    common.run(main)
