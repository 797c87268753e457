"""Speed of calls with a key mask, compared with the call without one and torch's attention with the same mask.

    python bench/masks.py --seqlen 4096,16384
    python bench/masks.py --causal --pad left

Each batch entry is padded to the same share of keys. `sdpa` is scaled_dot_product_attention with the whole mask as a
bool tensor, by the kernel that torch chooses; `call` is sage_aot.attn. A row's time is the GPU's alone, by replaying
CUDA graphs, quantization and the mask's own kernel included. Every output is checked against sdpa before it is timed;
that of full attention must also have the bits of the call on the keys that are left.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Iterator

import torch

import common
import sage_aot
from speed import Timing, time_by_graph

COLUMNS = ("row", "mask", "heads", "headdim", "keys", "seen", "µs", "p10–p90", "× sdpa", "cosine")


def main() -> int:
    arguments = parse()
    common.require_cuda()
    library = common.use_kernels(arguments.kernels)
    common.print_header(common.header(library) | {"inputs": f"N(0, 1) bf16; median of {arguments.repeat}"})
    print(common.table_head(COLUMNS))
    for headdim in arguments.headdim:
        for seqlen in arguments.seqlen:
            for row in rows(arguments, seqlen, headdim):
                print(common.table_row(row), flush=True)
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    common.add_size_arguments(parser, headdim="64,128", seqlen="1024,4096,16384", batch=4, heads=24)
    parser.add_argument("--causal", action="store_true", help="causal attention (default: full)")
    parser.add_argument("--pad", choices=("left", "right"), default="right", help="(default: %(default)s)")
    parser.add_argument("--repeat", type=int, default=10, help="timed repeats of a row (default: %(default)s)")
    return parser.parse_args()


def rows(arguments: argparse.Namespace, seqlen: int, headdim: int) -> Iterator[list[object]]:
    shape, causal = (arguments.batch, arguments.heads, seqlen, headdim), arguments.causal
    q, k, v = torch.randn(3, *shape, device="cuda", dtype=torch.bfloat16,
                          generator=torch.Generator("cuda").manual_seed(0))
    timed = functools.partial(time_by_graph, repeat=arguments.repeat)

    def cells(row: str, seen: str, timing: Timing, sdpa: Timing | None, cosine: float | None) -> list[object]:
        return [row, "causal" if causal else "full", f"{arguments.batch}×{arguments.heads}", headdim, seqlen, seen,
                f"{timing.median_us:.1f}", f"{timing.p10_us:.1f}–{timing.p90_us:.1f}",
                sdpa and f"{sdpa.median_us / timing.median_us:.2f}", cosine and f"{cosine:.6f}"]

    yield cells("call, no mask", "100%", timed(lambda: sage_aot.attn(q, k, v, is_causal=causal)), None, None)
    keys = torch.arange(seqlen, device="cuda")
    for share in (1.0, 0.75, 0.5, 0.25):
        left = round(share * seqlen)
        seen = keys < left if arguments.pad == "right" else keys >= seqlen - left
        mask = seen.expand(arguments.batch, -1).contiguous()
        whole = mask[:, None, None, :].expand(-1, 1, seqlen, -1)
        whole = whole & (keys <= keys[:, None]) if causal else whole

        def sdpa(whole: torch.Tensor = whole) -> torch.Tensor:
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=whole)

        def call(mask: torch.Tensor = mask) -> torch.Tensor:
            return sage_aot.attn(q, k, v, key_mask=mask, is_causal=causal)

        out = sage_aot.attn(q, k, v, key_mask=mask, is_causal=causal, out=common.poisoned(q))
        if not causal and not torch.equal(out, sage_aot.attn(q, k[:, :, seen], v[:, :, seen])):
            raise SystemExit(f"{left} of {seqlen} keys: the masked call differs from that on the keys that are left")
        blind = ~whole.any(-1, keepdim=True)  # rows that see no key: zeros here, of sdpa anything
        cosine = common.check_output("call", out, sdpa().masked_fill(blind, 0.0))
        theirs, ours = timed(sdpa), timed(call)
        yield cells("sdpa", f"{share:.0%}", theirs, theirs, None)
        yield cells("call", f"{share:.0%}", ours, theirs, cosine)


if __name__ == "__main__":
    common.run(main)
