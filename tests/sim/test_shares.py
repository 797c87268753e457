"""Blocks that take several query tiles each, kernels/shares.cu: who takes which, and when."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
import simbuild
import torch
from simbuild import PROJECT, Build, Source
from simulator import Simulator, views

KERNEL = Path(__file__).parent / "kernels" / "shares.cu"
SHAPES = [(heads, q_tiles, blocks) for heads in (1, 2, 5) for q_tiles in (1, 2, 3, 4, 7) for blocks in (1, 3, 4, 40)]


@pytest.fixture(scope="module")
def build() -> Build:
    return simbuild.build([Source("shares", KERNEL)], PROJECT.build / "shares")


def shares(build: Build, heads: int, q_tiles: int, blocks: int, causal: bool) -> Iterator[list[int]]:
    """By block the query tiles that it takes, as head * q_tiles + tile."""
    most = heads * q_tiles + 2
    taken = torch.full((blocks, most), -1, dtype=torch.int32)
    simulator = Simulator(build)
    simulator.know(*views({}, {"taken": taken}))
    simulator.launch_kernel("shares", struct.pack("<Q4i", taken.data_ptr(), heads, q_tiles, causal, most), blocks, 32)
    for row in taken.tolist():
        yield row[:row.index(-1)]


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_every_query_tile_is_taken_once(build, causal):
    for shape in SHAPES:
        taken = [index for share in shares(build, *shape, causal) for index in share]
        assert sorted(taken) == list(range(shape[0] * shape[1])), shape


def test_no_block_takes_two_tiles_more_than_another(build):
    for shape in SHAPES:
        counts = [len(share) for share in shares(build, *shape, False)]
        assert max(counts) - min(counts) <= 1, shape


def test_causal_tiles_are_taken_in_pairs_of_one_length(build):
    """The near one first, which is that of the last rows: it has the most keys."""
    for heads, q_tiles, blocks in SHAPES:
        for share in shares(build, heads, q_tiles, blocks, True):
            tiles = iter(share)
            for near in tiles:
                assert near % q_tiles <= (q_tiles - 1) / 2
                if near % q_tiles != (q_tiles - 1) / 2:
                    far = next(tiles)
                    assert near // q_tiles == far // q_tiles and near % q_tiles + far % q_tiles == q_tiles - 1
