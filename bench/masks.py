"""Speed of calls with a key mask, beside the call without one and torch's attention with the same mask.

    python bench/masks.py --seqlen 4096,16384

Each batch entry is padded on the right to the same share of keys. `sdpa` is scaled_dot_product_attention with a bool
mask [batch, 1, 1, keys], by the kernel that torch chooses; `call` is sage_aot.attn. A row's time is the GPU's alone, by
replaying CUDA graphs, quantization and the mask's own kernel included. Every output is checked before it is timed: the
masked call against the call on the keys that are left, and that against sdpa.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Iterator

import torch

import common
import sage_aot
from speed import Timing, time_by_graph

COLUMNS = ("row", "heads", "headdim", "keys", "seen", "µs", "p10–p90", "× sdpa", "cosine")


def main() -> int:
    arguments = parse()
    common.require_cuda()
    library = common.use_kernels(arguments.kernels)
    common.print_header(common.header(library) | {"inputs": f"N(0, 1) bf16; median of {arguments.repeat}"})
    print(common.table_head(COLUMNS))
    for headdim in arguments.headdim:
        for seqlen in arguments.seqlen:
            for row in rows(arguments.batch, arguments.heads, seqlen, headdim, arguments.repeat):
                print(common.table_row(row), flush=True)
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--headdim", type=common.integers, default="64,128", help="(default: %(default)s)")
    parser.add_argument("--seqlen", type=common.integers, default="1024,4096,16384",
                        help="queries and keys (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=4, help="(default: %(default)s)")
    parser.add_argument("--heads", type=int, default=24, help="of q, k and v (default: %(default)s)")
    parser.add_argument("--kernels", metavar="FOLDER", help="built kernels (default: those of the package)")
    parser.add_argument("--repeat", type=int, default=10, help="timed repeats of a row (default: %(default)s)")
    return parser.parse_args()


def rows(batch: int, heads: int, seqlen: int, headdim: int, repeat: int) -> Iterator[list[object]]:
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v = torch.randn(3, batch, heads, seqlen, headdim, device="cuda", dtype=torch.bfloat16, generator=generator)
    timed = functools.partial(time_by_graph, repeat=repeat)
    plain = timed(lambda: sage_aot.attn(q, k, v))
    yield cells("call, no mask", batch, heads, headdim, seqlen, 1.0, plain, None, None)
    for share in (1.0, 0.75, 0.5, 0.25):
        left = round(share * seqlen)
        mask = (torch.arange(seqlen, device="cuda") < left).expand(batch, -1).contiguous()
        of_sdpa = mask[:, None, None, :].expand(-1, 1, seqlen, -1)

        def sdpa(of_sdpa: torch.Tensor = of_sdpa) -> torch.Tensor:
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=of_sdpa)

        def call(mask: torch.Tensor = mask) -> torch.Tensor:
            return sage_aot.attn(q, k, v, key_mask=mask)

        alone = sage_aot.attn(q, k[:, :, :left], v[:, :, :left])
        if not torch.equal(sage_aot.attn(q, k, v, key_mask=mask, out=common.poisoned(q)), alone):
            raise SystemExit(f"{left} of {seqlen} keys: the masked call differs from that on the keys that are left")
        cosine = common.check_output("call", alone, sdpa())
        theirs, ours = timed(sdpa), timed(call)
        yield cells("sdpa", batch, heads, headdim, seqlen, share, theirs, theirs, None)
        yield cells("call", batch, heads, headdim, seqlen, share, ours, theirs, cosine)


def cells(row: str, batch: int, heads: int, headdim: int, seqlen: int, share: float, timing: Timing,
          sdpa: Timing | None, cosine: float | None) -> list[object]:
    return [row, f"{batch}×{heads}", headdim, seqlen, f"{share:.0%}", f"{timing.median_us:.1f}",
            f"{timing.p10_us:.1f}–{timing.p90_us:.1f}", sdpa and f"{sdpa.median_us / timing.median_us:.2f}",
            cosine and f"{cosine:.6f}"]


if __name__ == "__main__":
    common.run(main)
