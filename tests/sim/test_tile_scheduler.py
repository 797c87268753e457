"""The tile scheduler (kernels/tile_scheduler.cu): each work tile is drawn once, in which order, and what the counter
holds afterwards."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
import simbuild
import torch
from simbuild import PROJECT, Build, Source
from simulator import Simulator, views

KERNEL = Path(__file__).parent / "kernels" / "tile_scheduler.cu"
CACHED_TILES = 512  # KV tiles of 128 keys and 128 channels in 16 MB
SHAPES = [(heads, q_tiles, kv_tiles, splits) for heads in (1, 2, 6) for q_tiles in (1, 2, 5)
          for kv_tiles in (0, 1, 100, CACHED_TILES // 2, CACHED_TILES, 10 * CACHED_TILES)
          for splits in (1, 3)]


@pytest.fixture(scope="module")
def build() -> Build:
    return simbuild.build([Source("tile_scheduler", KERNEL)], PROJECT.build / "tile_scheduler")


def drawn(build: Build, heads: int, q_tiles: int, kv_tiles: int, splits: int = 1, *, blocks: int, causal: bool,
          q_per_kv: int = 1, seed: int = 0) -> list[list[int]]:
    """Work tiles that each block draws, as (head * q_tiles + tile) * splits + split; blocks run one after another in
    any order."""
    most = heads * q_tiles * splits + 1
    tiles, count = torch.full((blocks, most), -1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    simulator = Simulator(build, seed)
    simulator.know(*views({"tile_counter": count}, {"list": tiles, "tile_counter": count}))
    params = struct.pack("<2Q7i4x", tiles.data_ptr(), count.data_ptr(), heads, heads // q_per_kv, q_tiles, kv_tiles,
                         splits, causal, most)
    simulator.launch_kernel("tile_scheduler", params, blocks, 32)
    assert count.item() == 0, "the next launch starts from zero"
    return [row[:row.index(-1)] for row in tiles.tolist()]


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_every_work_tile_is_drawn_once(build, causal):
    for shape in SHAPES:
        heads, q_tiles, _, splits = shape
        work_tiles = heads * q_tiles * splits
        for blocks in {1, min(3, work_tiles), work_tiles}:
            lists = drawn(build, *shape, blocks=blocks, causal=causal, seed=blocks)
            assert sorted(sum(lists, [])) == list(range(work_tiles)), shape
            assert all(lists), "every block has one"


def test_full_attention_draws_tiles_in_order(build):
    assert drawn(build, 3, 4, 1000, 2, blocks=1, causal=False) == [list(range(24))]


@pytest.mark.parametrize(("kv_tiles", "q_per_kv", "heads_at_once"), [
    (1, 1, 6), (CACHED_TILES // 6, 1, 6), (CACHED_TILES // 4, 1, 4), (CACHED_TILES // 2, 1, 2), (CACHED_TILES, 1, 1),
    (10 * CACHED_TILES, 1, 1), (CACHED_TILES, 2, 2), (CACHED_TILES // 2, 2, 4), (10 * CACHED_TILES, 3, 3)])
@pytest.mark.parametrize("splits", [1, 2])
def test_causal_draws_long_tiles_first_of_as_many_heads_as_the_cache_holds(build, kv_tiles, q_per_kv, heads_at_once,
                                                                           splits):
    """Indices count the tiles of a head from the longest. Splits of a query tile follow one another."""
    heads, q_tiles = 6, 3
    order, = drawn(build, heads, q_tiles, kv_tiles, splits, blocks=1, causal=True, q_per_kv=q_per_kv)
    assert order == [(head * q_tiles + tile) * splits + split for first in range(0, heads, heads_at_once)
                     for tile in range(q_tiles) for head in range(first, min(first + heads_at_once, heads))
                     for split in range(splits)]
