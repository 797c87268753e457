"""Masks of blocks that follow from the places of tokens alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from sage_aot._call.masks import BlockMask, block_mask
from sage_aot._call.selection import is_finite
from sage_aot._problem.arguments import block_sizes_of
from sage_aot._problem.options import integer_of
from sage_aot._problem.tensors import MASK_BLOCK
from sage_aot.errors import ArgumentError


def near_and_first(queries: int, keys: int, *, near: int, first: int = 1, block_size: int | tuple[int, int] = 128,
                   device: torch.device | str | None = None) -> BlockMask:
    """A mask in which each block of queries sees the blocks of keys at its own place, `near` - 1 more on both sides,
    and the `first` blocks of keys (StreamingLLM's sinks).

    Args:
        queries, keys: of a call. Places are aligned at the ends, as a causal mask is.
        near, first: blocks.
        block_size: queries and keys of a block, multiples of 64, or one number for both.
        device: of the mask; None: the default.

    Raises:
        ArgumentError: a size is no positive integer, or the size of a block no multiple of 64.
    """
    queries, keys, near = _positive(queries=queries, keys=keys, near=near)
    if (number := integer_of(first)) is None or number < 0:
        raise ArgumentError(f"first: expected a number of blocks, 0 or more, got {first!r}")
    block_q, block_k = block_sizes_of(block_size)
    begins = torch.arange(0, queries, block_q, device=device) + keys - queries
    ends = (begins + block_q).clamp(max=keys) - 1
    column = torch.arange(-(-keys // block_k), device=device)
    low, high = begins.clamp(min=0) // block_k - (near - 1), ends // block_k + near
    seen = (column >= low[:, None]) & (column < high[:, None]) & (ends >= 0)[:, None]
    return block_mask(seen | (column < first), (block_q, block_k))


def tile_order(size: Sequence[int], tile: Sequence[int], *,
               device: torch.device | str | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """The order in which the tokens of a tile are neighbours, and its inverse.

    Args:
        size: (frames, height, width) of the tokens, which come frame by frame, row by row.
        tile: (frames, height, width) of a tile; each divides that of `size`.
        device: of the result.

    Returns:
        Two index tensors: ``x[:, :, order]`` has the tokens tile by tile, ``y[:, :, inverse]`` puts them back.

    Raises:
        ArgumentError: a tile does not divide the size.
    """
    tiles = _tiles(size, tile)
    places = torch.arange(math.prod(size), device=device)
    split = [number for count, edge in zip(tiles, tile) for number in (count, edge)]
    order = places.view(split).permute(0, 2, 4, 1, 3, 5).reshape(-1)
    return order, torch.empty_like(order).scatter_(0, order, places)


def sliding_tiles(size: Sequence[int], tile: Sequence[int], window: Sequence[int], *,
                  device: torch.device | str | None = None) -> BlockMask:
    """A mask in which each tile of tokens sees the tiles around it: a window of whole tiles, which stays within the
    tokens at their edges (Sliding Tile Attention). The tokens must lie tile by tile: :func:`tile_order`.

    Args:
        size: (frames, height, width) of the tokens.
        tile: likewise of a tile, whose tokens are a block: their number is a multiple of 64.
        window: likewise, in tiles.
        device: of the mask.

    Raises:
        ArgumentError: a tile does not divide the size, has no multiple of 64 tokens, or a window has no tile.

    Source: Sliding Tile Attention (arXiv:2502.04507).
    """
    tiles = _tiles(size, tile)
    if math.prod(tile) % MASK_BLOCK:
        raise ArgumentError(f"tile: expected one whose tokens are a multiple of {MASK_BLOCK}, got {tuple(tile)}, "
                            f"{math.prod(tile)} tokens")
    window = _three("window", window)
    seen = torch.ones(1, 1, dtype=torch.bool, device=device)
    for count, width in zip(tiles, window):
        place = torch.arange(count, device=device)
        centre = place.clamp(width // 2, max(count - 1 - (width - 1) // 2, width // 2))
        offset = place - centre[:, None]
        near = (offset >= -(width // 2)) & (offset <= (width - 1) // 2)
        seen = (seen[:, None, :, None] & near[:, None, :]).flatten(2).flatten(0, 1)
    return block_mask(seen, math.prod(tile))


def radial_bands(frames: int, tokens: int, *, width: float = 1.0, first: bool = True,
                 block_size: int | tuple[int, int] = 128, device: torch.device | str | None = None) -> BlockMask:
    """A mask in which a token sees fewer tokens of a frame the farther that frame lies: within a frame, and of those
    next to it, all; of frames at a distance of 2^i to 2^(i+1), 1 / 2^i of a frame on both sides of its own place
    (radial attention).

    Args:
        frames: of the video.
        tokens: of a frame. Tokens come frame by frame.
        width: factor on the width of all bands.
        first: the first frame is seen by all.
        block_size, device: as :func:`near_and_first`. A block sees another where any of its tokens sees any of its.

    Raises:
        ArgumentError: a size is no positive integer, `first` is no bool, or the size of a block no multiple of 64.

    Source: Radial Attention (arXiv:2506.19852).
    """
    frames, tokens = _positive(frames=frames, tokens=tokens)
    if not is_finite(width) or width <= 0:
        raise ArgumentError(f"width: expected a number above 0, got {width!r}")
    if not isinstance(first, bool):
        raise ArgumentError(f"first: expected True or False, got {first!r}")
    block_q, block_k = block_sizes_of(block_size)
    q_runs, k_runs = (_runs(frames, tokens, block, device) for block in (block_q, block_k))
    seen = torch.zeros(len(q_runs[0].frame), len(k_runs[0].frame), dtype=torch.bool, device=device)
    for q in q_runs:
        for k in k_runs:
            seen |= _in_bands(q, k, tokens, width, first)
    return block_mask(seen, (block_q, block_k))


class _Run(NamedTuple):
    """The tokens of each block in one frame."""

    frame: torch.Tensor  # [blocks]
    begin: torch.Tensor  # likewise: places within the frame
    end: torch.Tensor  # less than begin where the block has no token in that frame


def _runs(frames: int, tokens: int, block: int, device: torch.device | str | None) -> list[_Run]:
    """The runs of blocks: the first that each has, the second, ..."""
    begins = torch.arange(0, frames * tokens, block, device=device)
    ends = (begins + block).clamp(max=frames * tokens)
    runs = []
    for i in range((block - 2) // tokens + 2):
        frame = begins // tokens + i
        runs.append(_Run(frame, (begins - frame * tokens).clamp(min=0), (ends - frame * tokens).clamp(max=tokens)))
    return runs


def _in_bands(q: _Run, k: _Run, tokens: int, width: float, first: bool) -> torch.Tensor:
    """[query blocks, key blocks]: whether a token of a run of queries sees one of a run of keys."""
    exist = (q.begin < q.end)[:, None] & (k.begin < k.end)
    apart = (k.begin - q.end[:, None] + 1).maximum(q.begin[:, None] - k.end + 1).clamp(min=0)  # of their nearest
    distance = (k.frame - q.frame[:, None]).abs().clamp(min=1)
    exponent = torch.frexp(distance.float())[1] - 1  # of the power of two at or below it
    seen = (distance == 1) | (apart < width * tokens / 2.0**exponent)
    return exist & (seen | (first & (k.frame == 0)))


def _tiles(size: Any, tile: Any) -> list[int]:
    """Tiles along each of three edges."""
    of_size, of_tile = _three("size", size), _three("tile", tile)
    if any(edge % part for edge, part in zip(of_size, of_tile)):
        raise ArgumentError(f"tile: expected (frames, height, width) that divide those of size, {tuple(size)}, got "
                            f"{tuple(tile)}; pad the tokens, or choose another tile")
    return [edge // part for edge, part in zip(of_size, of_tile)]


def _three(name: str, edges: Any) -> list[int]:
    """Three positive integers; ArgumentError for anything else."""
    if not isinstance(edges, Sequence) or len(edges) != 3:
        raise ArgumentError(f"{name}: expected (frames, height, width), three positive integers, got {edges!r}")
    return _positive(**{f"{name}[{i}]": edge for i, edge in enumerate(edges)})


def _positive(**sizes: Any) -> list[int]:
    found = []
    for name, size in sizes.items():
        number = integer_of(size)
        if number is None or number < 1:
            raise ArgumentError(f"{name}: expected a positive integer, got {size!r}")
        found.append(number)
    return found
