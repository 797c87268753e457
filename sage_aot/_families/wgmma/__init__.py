"""wgmma with TMA bulk copies, on Hopper alone: templates/include/sage/attn/wgmma.

A producer warpgroup loads; each consumer warpgroup multiplies 64 query rows.
"""

from __future__ import annotations

from sage_aot._families.base import Family
from sage_aot._kernels.tile import Tile


def _rules(tile: Tile) -> list[str]:
    if tile.warp_m != 16 or tile.block_m not in (128, 192) or tile.block_n not in (64, 128):
        return [f"two or three consumer warpgroups of the wgmma family multiply 64 rows each by 64 or 128 keys: warp_m "
                f"must be 16, block_m 128 or 192 and block_n 64 or 128, got {tile.warp_m}, {tile.block_m} and "
                f"{tile.block_n}"]
    if tile.v_stages is not None:
        return [f"v_stages is of the mma family, got {tile.v_stages}"]
    return []


WGMMA = Family("wgmma", _rules, persistent=True, reads_key_norms=True, trains_in_halves=True,
               promotes_under_products=True)
