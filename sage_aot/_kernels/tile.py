"""Tile sizes of an attention kernel; they stand in the build matrix and travel in the manifest."""

from __future__ import annotations

from typing import NamedTuple


class Tile(NamedTuple):
    """Tile sizes of one attention kernel and of the quantizers that feed it. A family says which sizes it takes."""

    block_m: int  # query rows of a thread block
    block_n: int  # keys of a KV tile
    warp_m: int  # query rows of a warp; at 8 bits warp_m / 8 of them share a scale of Q
    stages: int  # KV tiles in shared memory
    min_blocks: int  # resident blocks an SM that the registers must allow
    v_stages: int | None = None  # KV tiles whose V is in shared memory; None: as many as stages

    @property
    def quantized(self) -> tuple[int, int, int]:
        """The sizes on which the layout of the quantized tensors depends."""
        return self.block_m, self.block_n, self.warp_m


def is_size(value: object) -> bool:
    """True for a value that can be a size: a positive integer."""
    return type(value) is int and value > 0
