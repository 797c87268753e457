"""Speed of attn_varlen, compared with FlashAttention-2's varlen kernel on the same tensors and with attn.

    python bench/varlen.py
    python bench/varlen.py --headdim 128 --causal

Each shape is a number of sequences and of tokens; lengths are mixed, the longest some 16 times the shortest. `flash` is
torch's FlashAttention-2 through aten._flash_attention_forward; `call` is sage_aot.attn_varlen; `attn`, where there is
one sequence, is sage_aot.attn on the same tokens as [1, tokens, heads, headdim]. A row's time is the GPU's alone, by
replaying CUDA graphs, quantization included. Every output is checked against flash before it is timed.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Iterator

import torch

import common
import sage_aot
from speed import time_by_graph

COLUMNS = ("row", "mask", "heads", "headdim", "tokens", "sequences", "µs", "p10–p90", "× flash", "cosine")


def main() -> int:
    arguments = parse()
    common.require_cuda()
    library = common.use_kernels(arguments.kernels)
    common.print_header(common.header(library) | {"inputs": f"N(0, 1) bf16; median of {arguments.repeat}"})
    print(common.table_head(COLUMNS))
    for headdim in arguments.headdim:
        for shape in arguments.shapes.split(","):
            for row in rows(arguments, headdim, mixed(*map(int, shape.split("x")))):
                print(common.table_row(row), flush=True)
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--headdim", type=common.integers, default="64,128", help="(default: %(default)s)")
    parser.add_argument("--shapes", default="1x16384,64x16384,64x65536", metavar="SxT,...",
                        help="S sequences of T tokens of q, and as many of k and v (default: %(default)s)")
    parser.add_argument("--heads", type=int, default=24, help="of q, k and v (default: %(default)s)")
    parser.add_argument("--causal", action="store_true", help="causal attention (default: full)")
    parser.add_argument("--kernels", metavar="FOLDER", help="built kernels (default: those of the package)")
    parser.add_argument("--repeat", type=int, default=10, help="timed repeats of a row (default: %(default)s)")
    return parser.parse_args()


def mixed(sequences: int, tokens: int) -> list[int]:
    """Lengths of sequences that add up to `tokens`."""
    rng = random.Random(0)
    weights = [2 ** rng.uniform(0, 4) for _ in range(sequences)]
    lengths = [int(tokens * weight / sum(weights)) for weight in weights]
    return [*lengths[:-1], tokens - sum(lengths[:-1])]


def rows(arguments: argparse.Namespace, headdim: int, lengths: list[int]) -> Iterator[list[object]]:
    q, k, v = torch.randn(3, sum(lengths), arguments.heads, headdim, device="cuda", dtype=torch.bfloat16,
                          generator=torch.Generator("cuda").manual_seed(0))
    begins = torch.nn.functional.pad(torch.tensor(lengths).cumsum(0), (1, 0)).int().cuda()
    longest, causal = max(lengths), arguments.causal

    def flash() -> torch.Tensor:
        return torch.ops.aten._flash_attention_forward(q, k, v, begins, begins, longest, longest, 0.0, causal, False)[0]

    def call() -> torch.Tensor:
        return sage_aot.attn_varlen(q, k, v, begins, begins, longest, longest, is_causal=causal)

    def attn() -> torch.Tensor:
        return sage_aot.attn(q[None], k[None], v[None], is_causal=causal, layout="NHD")[0]

    expected, theirs = flash(), None
    work: dict[str, Callable[[], torch.Tensor]] = {"flash": flash, "call": call}
    if len(lengths) == 1:
        work["attn"] = attn
    for name, run in work.items():
        cosine = None if name == "flash" else common.check_output(name, run(), expected)
        timing = time_by_graph(run, arguments.repeat)
        theirs = theirs or timing
        yield [name, "causal" if causal else "full", arguments.heads, headdim, sum(lengths), len(lengths),
               f"{timing.median_us:.1f}", f"{timing.p10_us:.1f}–{timing.p90_us:.1f}",
               f"{theirs.median_us / timing.median_us:.2f}", cosine and f"{cosine:.6f}"]


if __name__ == "__main__":
    common.run(main)
