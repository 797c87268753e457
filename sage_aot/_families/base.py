"""Properties of an instruction family, for code generation and the launch plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from sage_aot._kernels.tile import Tile, is_size


class Family(NamedTuple):
    """An instruction family."""

    name: str  # as the matrix and the manifest spell it
    own_rules: Callable[[Tile], list[str]]  # what the family's tiles break of its rules, as sentences
    persistent: bool  # blocks take several query tiles, so a grid has no more blocks than the GPU holds at once
    reads_key_norms: bool  # attention kernels bound scores by norms of keys, which the quantizer leaves
    trains_in_halves: bool  # backward kernels multiply P and dS in 16 bits, not as integers of 8
    promotes_under_products: bool  # the build checks that the compiler leaves promotion under products in flight

    def broken_rules(self, tile: Tile) -> list[str]:
        """Every rule that these sizes break, as sentences; empty where they are valid."""
        sizes = {size: value for size, value in tile._asdict().items()
                 if value is not None or size not in Tile._field_defaults}
        wrong = [f"{size} must be a positive integer, got {value!r}"
                 for size, value in sizes.items() if not is_size(value)]
        return wrong or [*self.own_rules(tile), *_common_rules(tile)]


def _common_rules(tile: Tile) -> list[str]:
    problems = []
    if tile.block_n not in (32, 64, 128):
        problems.append(f"block_n must be 32, 64 or 128, got {tile.block_n}")
    if tile.stages < 2:
        problems.append(f"stages must be at least 2 (loads run one tile ahead), got {tile.stages}")
    return problems
