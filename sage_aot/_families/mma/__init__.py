"""mma.sync with cp.async, on every GPU from sm80 on: templates/include/sage/attn/mma."""

from __future__ import annotations

from sage_aot._families.base import Family
from sage_aot._kernels.tile import Tile


def _rules(tile: Tile) -> list[str]:
    if tile.warp_m not in (16, 32):
        return [f"warp_m must be 16 or 32 (one or two m16 fragments), got {tile.warp_m}"]
    if tile.block_m % tile.warp_m:
        return [f"block_m must be a multiple of warp_m = {tile.warp_m}, got {tile.block_m}"]
    if tile.block_m // tile.warp_m > 32:
        return [f"block_m / warp_m must be 1 to 32 warps, got {tile.block_m // tile.warp_m}"]
    if tile.v_stages not in (None, 1) or tile.v_stages and tile.stages != 2:
        return [f"v_stages may be 1 with stages 2 (V arrives under the scores of its tile), got {tile.v_stages} and "
                f"{tile.stages}"]
    return []


MMA = Family("mma", _rules, persistent=False, reads_key_norms=False, trains_in_halves=False,
             promotes_under_products=False)
