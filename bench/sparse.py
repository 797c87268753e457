"""Attention alone under sparse masks, compared with the dense call of the same inputs, interleaved in one process.

    python bench/sparse.py --headdim 64,128 --rounds 7
    python bench/sparse.py --shapes 4x32x16384,1x24x118800
    python bench/sparse.py --peers --shapes 4x32x16384

Each round times every way once, between events around so many launches that they take some milliseconds; a row has the
medians over the rounds. `speedup` is the dense call's attention over the row's, `ideal` that of the KV tiles that the
row does not visit. `lists` is the kernel that lists them. Blocks are of 128 x 128, drawn alike for all heads. A window
is compared with the causal call. The output of each row is checked in float64 on rows drawn from the first head; that
of a list of all blocks must have the bits of the dense call. `--peers` times whole calls instead, with torch's
FlexAttention and SDPA with the same mask, and FlashAttention-2 with a window.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import common
import sage_aot
from linear_p import measure
from sage_aot._backends.cuda.backend import CudaBackend
from sage_aot._backends.cuda.call import CudaCall
from sage_aot._call import pipeline
from sage_aot._call.masks import masks_of_call
from sage_aot._problem.given import Given
from sage_aot._problem.options import Options
from speed import Pieces

COLUMNS = ("batch×heads", "headdim", "N", "mask", "dense, µs", "µs", "speedup", "ideal", "lists, µs", "cosine")
PEERS = ("FlexAttention", "SDPA", "FlashAttention-2")
PEER_COLUMNS = ("batch×heads", "headdim", "N", "mask", "sage_aot.attn, µs", *(f"{name} ×" for name in PEERS))
BLOCK, LARGEST_WINDOW, DRAWN_ROWS = 128, 4096, 64
_FLEX = torch.compile(flex_attention, dynamic=False)


class Mask(NamedTuple):
    """A row's mask."""

    name: str
    seen: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # of queries [n, 1] and keys: bool [n, keys]
    visited: float  # share of the dense call's KV tiles
    blocks: torch.Tensor | None = None
    attn_mask: torch.Tensor | None = None
    options: dict[str, Any] = {}


def main() -> int:
    arguments = parse()
    common.require_cuda()
    library = common.use_kernels(arguments.kernels)
    common.print_header(common.header(library) | {"inputs": f"N(0, 1) bf16; medians of {arguments.rounds} rounds"})
    print(common.table_head(PEER_COLUMNS if arguments.peers else COLUMNS))
    backend = CudaBackend(library, arguments.arch)
    for headdim in arguments.headdim:
        for shape in arguments.shapes:
            batch, heads, tokens = map(int, shape.split("x"))
            sizes = (batch, heads, tokens, headdim)
            for row in peer_rows(arguments, sizes) if arguments.peers else rows(arguments, backend, sizes):
                print(common.table_row(row), flush=True)
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--headdim", type=lambda text: [int(part) for part in text.split(",")], default=[64, 128])
    parser.add_argument("--shapes", type=common.words, default=["4x32x16384", "1x40x32768"],
                        help="batch x heads x tokens (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=7, help="of each row (default: %(default)s)")
    parser.add_argument("--peers", action="store_true", help="whole calls, compared with torch's")
    parser.add_argument("--kernels", help="folder of kernels (default: the package's)")
    parser.add_argument("--arch", help="of a folder of kernels that were built for this GPU (default: the GPU's own)")
    return parser.parse_args()


def masks(tokens: int, generator: torch.Generator) -> list[Mask]:
    count = -(-tokens // BLOCK)
    found = []
    for density in (1.0, 0.5, 0.25, 0.125):
        blocks = torch.rand(1, 1, count, count, device="cuda", generator=generator) < density
        if density == 1.0:
            blocks[:] = True
        found.append(Mask(f"blocks {density:g}", lambda i, j, of=blocks[0, 0]: of[i // BLOCK, j // BLOCK],
                          blocks.float().mean().item(), blocks=blocks))
    if tokens <= 32768:  # a byte a query and key
        i, j = torch.arange(tokens, device="cuda")[:, None], torch.arange(tokens, device="cuda")
        found.append(Mask("documents of 2,000", lambda i, j: i // 2000 == j // 2000, (2000 + BLOCK) / tokens,
                          attn_mask=i // 2000 == j // 2000))
        dense_looking = (i * 7919 + j * 104729) % 1000 != 0
        found.append(Mask("one key in 1,000 hidden", lambda i, j: (i * 7919 + j * 104729) % 1000 != 0, 1.0,
                          attn_mask=dense_looking))
    window = min(LARGEST_WINDOW, tokens // 4)
    found.append(Mask(f"window of {window}, causal", lambda i, j: (j <= i) & (j >= i - window),
                      2 * (window + BLOCK) / tokens, options={"window": (window, 0)}))
    return found


def rows(arguments: argparse.Namespace, backend: CudaBackend, shape: tuple[int, ...]) -> list[list[object]]:
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v = torch.randn(3, *shape, device="cuda", generator=generator).bfloat16()
    batch, heads, tokens, headdim = shape
    operations = 4 * batch * heads * tokens * tokens * headdim
    launches = max(2, int(4e12 / operations))
    dense = {causal: pieces(backend, q, k, v, {"is_causal": causal}) for causal in (False, True)}
    made = []
    for mask in masks(tokens, generator):
        own = pieces(backend, q, k, v, mask.options, mask.blocks, mask.attn_mask)
        baseline = dense["window" in mask.options]
        out = own.checked_output()
        cosine = check_rows(mask, q, k, v, out, generator)
        if mask.name == "blocks 1" and not torch.equal(out, baseline.checked_output()):
            sys.exit("a list of all blocks: expected the bits of the dense call, got others; nothing was timed")
        baseline.checked_output()
        times = measure({"dense": baseline.attend, "own": own.attend, "lists": own.list_tiles}, arguments.rounds,
                        launches)
        lists = f"{times['lists']:.1f}" if mask.blocks is not None or mask.attn_mask is not None else ""
        made.append([f"{batch}×{heads}", headdim, tokens, mask.name, f"{times['dense']:.1f}", f"{times['own']:.1f}",
                     f"{times['dense'] / times['own']:.2f}", f"{1 / mask.visited:.2f}", lists, f"{cosine:.5f}"])
    return made


def peer_rows(arguments: argparse.Namespace, shape: tuple[int, ...]) -> Iterator[list[object]]:
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v = torch.randn(3, *shape, device="cuda", generator=generator).bfloat16()
    batch, heads, tokens, headdim = shape
    for mask in masks(tokens, generator):
        blocks = None if mask.blocks is None else sage_aot.block_mask(mask.blocks, BLOCK)

        def own(mask: Mask = mask, blocks: Any = blocks) -> torch.Tensor:
            return sage_aot.attn(q, k, v, attn_mask=mask.attn_mask, block_mask=blocks, is_causal=bool(mask.options),
                                 **mask.options)

        check_rows(mask, q, k, v, own(), generator)
        times = measure({"own": own, **peers(mask, q, k, v)}, arguments.rounds, 1)
        found = [f"{times[name] / times['own']:.2f}" if name in times else "" for name in PEERS]
        yield [f"{batch}×{heads}", headdim, tokens, mask.name, f"{times['own']:.0f}", *found]


def peers(mask: Mask, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> dict[str, Callable[[], object]]:
    """Calls of others that compute the same. What they prepare of a mask is not timed."""
    tokens = q.shape[2]
    every = torch.arange(tokens, device="cuda")
    of_blocks = create_block_mask(lambda b, h, i, j: mask.seen(i, j), None, None, tokens, tokens)
    ways: dict[str, Callable[[], object]] = {"FlexAttention": lambda: _FLEX(q, k, v, block_mask=of_blocks)}
    if mask.options:
        rows = [x.transpose(1, 2) for x in (q, k, v)]
        left, right = mask.options["window"]
        ways["FlashAttention-2"] = lambda: torch.ops.aten._flash_attention_forward(
            *rows, None, None, tokens, tokens, 0.0, False, False, window_size_left=left, window_size_right=right)
    elements = mask.seen(every[:, None], every)
    ways["SDPA"] = lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=elements)
    return ways


class SparsePieces(Pieces):
    """Pieces whose lists can be timed apart."""

    def __init__(self, call: CudaCall, given: Given) -> None:
        super().__init__(call, given)
        self._lists = call.queue_of([launch for launch in call.launches() if launch.record.spec.kind == "lists"])

    def list_tiles(self) -> None:
        self._lists(self._stream(), *self._addresses)


def pieces(backend: CudaBackend, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: dict[str, Any],
           blocks: torch.Tensor | None = None, attn_mask: torch.Tensor | None = None) -> SparsePieces:
    of_blocks = None if blocks is None else sage_aot.block_mask(blocks, BLOCK)
    _, elements, expanded = masks_of_call(q, k, "HND", None, attn_mask, of_blocks)
    given = Given("dense", q, k, v, attn_mask=elements, block_mask=expanded)
    return SparsePieces(cast(CudaCall, pipeline.prepare(backend, given, Options(**options)).run), given)


def check_rows(mask: Mask, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
               generator: torch.Generator) -> float:
    """The cosine of some rows of the first head with float64; exits where it is too low."""
    tokens = q.shape[2]
    drawn = torch.randint(tokens, (DRAWN_ROWS,), device="cuda", generator=generator)
    scores = q[0, 0, drawn].double() @ k[0, 0].double().T / q.shape[3] ** 0.5
    seen = mask.seen(drawn[:, None], torch.arange(tokens, device="cuda"))
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1).nan_to_num(0.0)
    return common.check_output(mask.name, out[:1, :1, drawn], (weights @ v[0, 0].double())[None, None].to(out.dtype))


if __name__ == "__main__":
    common.run(main)
