"""Hopper's instructions in a pipeline of their own, kernels/pipeline.cu, against numpy."""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from pathlib import Path

import pytest
import simbuild
import torch
from layout import _key_of_column
from simbuild import Build, Source
from simulator import Simulator, SimulatorError, views

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

    def is_solved(self) -> bool:
        scores, out = self.expected()
        close = (self.out - out).abs().max() < 2.0**-10 * out.abs().max() * len(self.b)
        return torch.equal(self.scores, scores) and bool(close)


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


def run(build: Build, name: str, problem: Problem, seed: int) -> None:
    b, v = problem.packed()
    simulator = Simulator(build, seed)
    simulator.know(*views({"a": problem.a, "b": b, "v": v}, {"scores": problem.scores, "out": problem.out}))
    addresses = [tensor.data_ptr() for tensor in (problem.a, b, v, problem.scores, problem.out)]
    simulator.launch_kernel(name, params(*addresses, len(b)), len(problem.a), THREADS, SHARED_BYTES, arch=90)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("tiles", [1, 2, 5])
def test_pipeline(build, tiles, seed):
    problem = Problem.draw(2, tiles, seed)
    run(build, "pipeline", problem, seed)
    assert problem.is_solved()


# --- faults -----------------------------------------------------------------------------------------------------------

FAULTS = {
    "no_proxy_fence": ("  ptx::fence_proxy_async();", "", "operand written without fence.proxy.async"),
    "no_barrier_after_store": ("  __syncthreads();", "", "data race|barrier used before it was initialized|read of memory"),
    "no_wgmma_fence": ("    ptx::wgmma_fence();", "", "wgmma without a fence"),
    "no_wgmma_wait": ("  ptx::wgmma_wait<0>();\n}", "}", "wrong result"),
    "waits_for_one_group_less": ("ptx::wgmma_wait<0>();\n    ptx::barrier_sync(3", "ptx::wgmma_wait<1>();\n    ptx::barrier_sync(3",
                                 "registers of a pending instruction written|wgmma that nobody waits for|buffer overwritten"),
    "operand_changed": ("    ptx::wgmma_wait<0>();\n    ptx::barrier_sync(3", "    p[1][2] ^= 1;\n    ptx::wgmma_wait<0>();\n    ptx::barrier_sync(3",
                        "registers of a pending instruction written"),
    "full_not_waited_for": ("    ptx::mbarrier_wait(ptx::shared_address(&shared.full[stage]), tile / kStages % 2);", "",
                            "asynchronous copy read before it was waited for|data race|read of memory that nothing wrote"),
    "full_of_wrong_phase": ("tile / kStages % 2);", "(tile / kStages + 1) % 2);",
                            "asynchronous copy read before it was waited for|data race|read of memory that nothing wrote|deadlock"),
    "empty_not_waited_for": ("if (tile >= kStages) ptx::mbarrier_wait(", "if (tile < 0) ptx::mbarrier_wait(",
                             "buffer overwritten|data race|asynchronous copy|more arrivals"),
    "empty_of_wrong_phase": ("(tile / kStages - 1) % 2);", "tile / kStages % 2);", "buffer overwritten|data race|deadlock|more arrivals"),
    "too_few_bytes_announced": ("sizeof(shared.b[0]) + sizeof(shared.v[0]));", "sizeof(shared.b[0]));",
                                "asynchronous copy read before it was waited for|deadlock|data race|more arrivals"),
    "stage_released_by_the_first_warp": ("    ptx::barrier_sync(3 + consumer, kWarpgroup);", "", "buffer overwritten|data race"),
    "misaligned_descriptor": ("matrix_descriptor<kKeys>(ptx::shared_address(shared.v[stage]))",
                              "matrix_descriptor<kKeys>(ptx::shared_address(shared.v[stage]) + 128)", "misaligned descriptor"),
    "misaligned_copy": ("ptx::shared_address(shared.v[stage]), params.v +", "ptx::shared_address(shared.v[stage]) + 8, params.v +",
                        "misaligned access"),
    "copy_beyond_the_end": ("    ptx::bulk_copy(ptx::shared_address(shared.b[stage]), params.b + static_cast<i64>(tile)",
                            "    ptx::bulk_copy(ptx::shared_address(shared.b[stage]), params.b + static_cast<i64>(tile + 1)",
                            "access outside an allocation"),
    "barrier_not_initialized": ("      ptx::mbarrier_init(ptx::shared_address(&memory.empty[stage]), kConsumers);\n", "",
                                "barrier used before it was initialized"),
    "initialization_not_fenced": ("    ptx::fence_mbarrier_init();\n", "", "barrier initialized without a fence for the copy engine"),
    "too_many_arrivals": ("if (thread == 0) ptx::mbarrier_arrive(", "if (thread < 2) ptx::mbarrier_arrive(",
                          "more arrivals|buffer overwritten|data race|asynchronous copy|deadlock"),
    "different_counts": ("ptx::barrier_sync(turn_of(consumer), 2 * kWarpgroup);", "ptx::barrier_sync(turn_of(consumer), kWarpgroup);",
                         "barrier of different counts"),
    "turn_not_handed_over": ("if (consumer == 0 || tile + 1 < params.tiles) ptx::barrier_arrive", "if (consumer == 1) ptx::barrier_arrive",
                             "deadlock"),
    "turn_handed_over_too_often": ("if (consumer == 0 || tile + 1 < params.tiles) ptx::barrier_arrive", "ptx::barrier_arrive",
                                   "barrier that not all threads reach"),
    "too_many_registers": ("setmaxnreg_inc<232>", "setmaxnreg_inc<256>", "more registers than there are"),
    "warp_left_out": ("    if (registers) ptx::wgmma", "    if (ptx::thread_index() / 32 == 5) continue;\n    if (registers) ptx::wgmma",
                      "warps of a warpgroup diverge"),
    "lanes_differ": ("v_tile + k * kNextK, k > 0", "v_tile + k * kNextK + lane % 2 * 512, k > 0", "threads diverge"),
}
"""What is taken out of the pipeline, what is put in its place, and what that may bring to light, by the order of threads."""


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Build:
    folder, text = tmp_path_factory.mktemp("faulty"), KERNEL.read_text()
    sources = []
    for name, (there, instead, _) in FAULTS.items():
        assert text.count(there) >= 1, name
        path = folder / f"{name}.cu"
        path.write_text(text.replace(there, instead, 1).replace("(kThreads, 1) pipeline(", f"(kThreads, 1) {name}("))
        sources.append(Source(name, path))
    return simbuild.build(sources, folder / "build")


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_reported(faulty, name, seed):
    problem = Problem.draw(1, 5, seed)
    try:
        run(faulty, name, problem, seed)
        seen = "nothing" if problem.is_solved() else "wrong result"
    except SimulatorError as error:
        seen = error.reports[0].kind
    assert re.match(FAULTS[name][2], seen), seen
