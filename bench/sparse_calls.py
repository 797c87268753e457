"""Whole calls that choose their blocks of keys, with the dense call and torch's attention in bf16, interleaved.

    python bench/sparse_calls.py
    python bench/sparse_calls.py --shapes 1x24x118800 --densities 0.25,0.125

A row is ``attn(q, k, v, sparse=Sparse(keep=...))``: selection, quantization and attention. With `keep 1` all blocks
are chosen: it takes as much longer than the dense call as choosing costs. `× dense` is the dense call's time over the
row's, `× cuDNN` that of cuDNN's bf16. `select` is the selection alone, of which `pool` is the two launches that read q
and k, and `of its bytes` the time that the GPU's memory needs for those at the rate that a copy was measured to have;
`torch` is a like selection in plain torch, which copies neither q nor k. Each round times every way once, between
events around so many calls that they take some milliseconds; a row has the medians over the rounds. The output of a
call is that of the call with the mask that it chose, bit for bit.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

import common
import sage_aot
from linear_p import measure
from sage_aot.sparse import Sparse, pool_blocks, select_blocks

COLUMNS = ("batch×heads", "N", "call", "ms", "× dense", "× cuDNN", "select, ms", "pool, ms", "of its bytes, ms",
           "torch, ms")
BLOCK = 128


def main() -> int:
    arguments = parse()
    common.require_cuda()
    library = common.use_kernels(arguments.kernels)
    head = common.header(library) | {"inputs": f"N(0, 1) bf16, full, head dim {arguments.headdim}; medians of "
                                               f"{arguments.rounds} rounds"}
    common.print_header(head)
    print(common.table_head(COLUMNS))
    made = []
    for shape in arguments.shapes:
        batch, heads, tokens = map(int, shape.split("x"))
        for row in rows(arguments, (batch, heads, tokens, arguments.headdim)):
            print(common.table_row(row), flush=True)
            made.append(row)
    common.write_json(arguments.json, {"header": head, "columns": COLUMNS, "rows": made})
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", type=common.words, default=["1x40x32760", "1x24x118800"],
                        help="batch x heads x tokens (default: %(default)s)")
    parser.add_argument("--headdim", type=int, default=128, help="(default: %(default)s)")
    parser.add_argument("--densities", type=lambda text: [float(word) for word in text.split(",")],
                        default=[0.5, 0.25, 0.125, 0.0625], help="(default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=7, help="of each row (default: %(default)s)")
    parser.add_argument("--kernels", metavar="FOLDER", help="built kernels (default: those of the package)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write everything here")
    return parser.parse_args()


def rows(arguments: argparse.Namespace, shape: tuple[int, ...]) -> Iterator[list[object]]:
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v = (torch.randn(shape, device="cuda", generator=generator).bfloat16() for _ in range(3))
    ways = calls(q, k, v, arguments.densities)
    batch, heads, tokens, _ = shape
    times = measure(ways, arguments.rounds, 1)
    parts = measure(parts_of_selection(q, k, arguments.densities[0]), arguments.rounds, 10)
    of_bytes = (q.nbytes + k.nbytes) / rate_of_copies(q)
    selection = [f"{parts[name] / 1e3:.3f}" for name in ("select", "pool")] + [f"{of_bytes:.3f}"]
    selection += [f"{parts['torch'] / 1e3:.3f}"]
    for name, time in times.items():
        own = selection if name == name_of(Sparse(keep=arguments.densities[0])) else [""] * len(selection)
        yield [f"{batch}×{heads}", tokens, name, f"{time / 1e3:.2f}", f"{times['dense'] / time:.2f}",
               f"{times['cuDNN'] / time:.2f}", *own]


def calls(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, densities: list[float]) -> dict[str, Callable[[], object]]:
    """The dense calls, that which chooses all blocks, and those of each density, by the names of their rows."""
    ways: dict[str, Callable[[], object]] = {"dense": lambda: sage_aot.attn(q, k, v),
                                             "cuDNN": lambda: common.sdpa("sdpa_cudnn_bf16", q, k, v, False)}
    for sparse in (Sparse(keep=1.0), *(Sparse(keep=keep, tail=tail) for keep in densities for tail in (False, True))):
        if not sparse.tail:
            check_call(sparse, q, k, v)
        ways[name_of(sparse)] = lambda sparse=sparse: sage_aot.attn(q, k, v, sparse=sparse)
    return ways


def name_of(sparse: Sparse) -> str:
    return f"keep {sparse.keep:g}{', tail' if sparse.tail else ''}"


def check_call(sparse: Sparse, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    own, other = (sage_aot.attn(q, k, v, sparse=sparse), sage_aot.attn(q, k, v, block_mask=sparse.select(q, k)))
    if not torch.equal(own, other):
        sys.exit(f"{name_of(sparse)}: expected the bits of the call with the blocks that it chose, got others")


def parts_of_selection(q: torch.Tensor, k: torch.Tensor, density: float) -> dict[str, Callable[[], object]]:
    return {"select": lambda: select_blocks(q, k, keep=density),
            "pool": lambda: (pool_blocks(q), pool_blocks(k, centre=True)), "torch": lambda: in_torch(q, k, density)}


def in_torch(q: torch.Tensor, k: torch.Tensor, density: float) -> torch.Tensor:
    """Choose the best blocks of each row by the products of means, in plain torch and bf16, without first and near
    blocks."""
    scores = means_in_torch(q) @ means_in_torch(k).mT
    best = scores.topk(max(1, int(density * scores.shape[-1])), -1).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, best, True)


def means_in_torch(x: torch.Tensor) -> torch.Tensor:
    """The mean of each block of rows, of views of x alone: the last block may have fewer rows."""
    whole = x.shape[2] // BLOCK * BLOCK
    means = x[:, :, :whole].unflatten(2, (-1, BLOCK)).mean(3)
    return means if whole == x.shape[2] else torch.cat((means, x[:, :, whole:].mean(2, keepdim=True)), 2)


def rate_of_copies(x: torch.Tensor) -> float:
    """Bytes read and written a millisecond, of a copy of x."""
    to = torch.empty_like(x)
    return 2 * x.nbytes / (measure({"copy": lambda: to.copy_(x)}, 5, 5)["copy"] / 1e3)


if __name__ == "__main__":
    common.run(main)
