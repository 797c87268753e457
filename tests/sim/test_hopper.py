"""Hopper's instructions in a pipeline of their own, kernels/pipeline.cu, against numpy."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

import pytest
import simbuild
import torch
from layout import _key_of_column
from simbuild import Build, Source
from simulator import Simulator, views

KERNEL = Path(__file__).parent / "kernels" / "pipeline.cu"
ROWS, DEPTH, KEYS, CHANNELS, STAGES = 128, 128, 128, 64, 2
THREADS, SCALE = 384, 2.0**-9
SHARED_BYTES = ROWS * DEPTH + STAGES * (KEYS * DEPTH + CHANNELS * KEYS) + 32


@dataclass(frozen=True)
class Problem:
    """Tensors as the kernel takes them, and as plain matrices."""

    a: torch.Tensor  # [blocks, rows, depth] s8
    b: torch.Tensor  # [tiles, keys, depth] s8
    v: torch.Tensor  # [tiles, channels, keys] e4m3
    scores: torch.Tensor
    out: torch.Tensor

    @staticmethod
    def draw(blocks: int, tiles: int, seed: int) -> Problem:
        generator = torch.Generator().manual_seed(seed)

        def integers(*shape: int) -> torch.Tensor:
            return torch.randint(-127, 128, shape, dtype=torch.int8, generator=generator)

        v = torch.randn(tiles, CHANNELS, KEYS, generator=generator).to(torch.float8_e4m3fn)
        return Problem(integers(blocks, ROWS, DEPTH), integers(tiles, KEYS, DEPTH), v,
                       torch.full((blocks, ROWS, KEYS), -1, dtype=torch.int32),
                       torch.full((blocks, ROWS, CHANNELS), torch.nan))

    def packed(self) -> tuple[torch.Tensor, torch.Tensor]:
        """b and v as the copy engine brings them."""
        return _swizzled(self.b), _swizzled(self.v.view(torch.int8)[..., _key_of_column(KEYS)])

    def expected(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The scores of all tiles together, and the output in f64."""
        tiles = torch.einsum("brd,tkd->tbrk", self.a.long(), self.b.long())
        p = (tiles.float() * SCALE).clamp(-448, 448).to(torch.float8_e4m3fn)
        return tiles.sum(0).int(), torch.einsum("tbrk,tck->brc", p.double(), self.v.double())


def _swizzled(rows: torch.Tensor) -> torch.Tensor:
    """[..., rows, 128] bytes, each row's chunks of 16 in the order that the hardware's swizzle of 128 bytes gives them."""
    chunks = rows.unflatten(-1, (-1, 16))
    row, chunk = torch.arange(rows.shape[-2])[:, None], torch.arange(chunks.shape[-2])
    return chunks[..., row, chunk ^ row % 8, :].flatten(-2).contiguous()


def params(a: int, b: int, v: int, scores: int, out: int, tiles: int) -> bytes:
    """PipelineParams of kernels/pipeline.cu, from addresses."""
    return struct.pack("<5Qfi", a, b, v, scores, out, SCALE, tiles)


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    return simbuild.build([Source("pipeline", KERNEL)], tmp_path_factory.mktemp("hopper"))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("tiles", [1, 2, 5])
def test_pipeline(build, tiles, seed):
    problem = Problem.draw(2, tiles, seed)
    b, v = problem.packed()
    simulator = Simulator(build, seed)
    simulator.know(*views({"a": problem.a, "b": b, "v": v}, {"scores": problem.scores, "out": problem.out}))
    addresses = [tensor.data_ptr() for tensor in (problem.a, b, v, problem.scores, problem.out)]
    simulator.launch_kernel("pipeline", params(*addresses, tiles), 2, THREADS, SHARED_BYTES, arch=90)
    scores, out = problem.expected()
    assert torch.equal(problem.scores, scores)
    assert (problem.out - out).abs().max() < 2.0**-10 * out.abs().max() * tiles
