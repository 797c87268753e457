"""Hopper's instructions in kernels of their own, kernels/pipeline.cu and warpgroup_products.cu, against torch."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

import pytest
import simbuild
import torch
from hopper_faults import FAULTS, HARMLESS, NOTHING, WRONG
from layout import _key_of_column
from simbuild import PROJECT, Build, HostBuildError, Source
from simulator import Simulator, SimulatorError, views

from codegen.files import write_if_changed

KERNELS = Path(__file__).parent / "kernels"
KERNEL = KERNELS / "pipeline.cu"
SOURCES = [Source(name, KERNELS / f"{name}.cu") for name in ("pipeline", "warpgroup_products")]
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
        """b and v as the TMA unit brings them."""
        return _swizzled(self.b), _swizzled(self.v.view(torch.int8)[..., _key_of_column(KEYS, 4)])

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
    """[..., rows, 128] bytes, each row's chunks of 16 in the order of the hardware's swizzle of 128 bytes."""
    chunks = rows.unflatten(-1, (-1, 16))
    row, chunk = torch.arange(rows.shape[-2])[:, None], torch.arange(chunks.shape[-2])
    return chunks[..., row, chunk ^ row % 8, :].flatten(-2).contiguous()


def params(a: int, b: int, v: int, scores: int, out: int, tiles: int) -> bytes:
    """PipelineParams of kernels/pipeline.cu, from addresses."""
    return struct.pack("<5Qfi", a, b, v, scores, out, SCALE, tiles)


@pytest.fixture(scope="module")
def build() -> Build:
    return simbuild.build(SOURCES, PROJECT.build / "hopper")


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


# --- one product ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Product:
    """One wrapper of wgmma on rows of some bytes, kernels/warpgroup_products.cu."""

    which: int  # as the kernel takes it
    a: torch.Tensor  # [64, row bytes] s8 or e4m3
    b: torch.Tensor  # [columns, row bytes]
    d: torch.Tensor  # [64, columns] s32 or f32

    ROW_BYTES = (128, 64, 32, 256)
    WRAPPERS = (("s8", 64, "registers"), ("s8", 64, "shared memory"), ("s8", 128, "registers"),
                ("s8", 128, "shared memory"), ("e4m3", 64, "registers"), ("e4m3", 128, "registers"),
                ("e4m3", 72, "registers"), ("e4m3", 136, "registers"))
    SHARED_BYTES = (64 + 136) * 256
    THREADS = 128
    COUNT = len(ROW_BYTES) * len(WRAPPERS)

    @property
    def name(self) -> str:
        type_, columns, place = self.WRAPPERS[self.which % len(self.WRAPPERS)]
        return f"m64n{columns}k32 {type_}, A from {place}, rows of {self.a.shape[1]} bytes"

    @staticmethod
    def draw(which: int) -> Product:
        generator = torch.Generator().manual_seed(which)
        row_bytes = Product.ROW_BYTES[which // len(Product.WRAPPERS)]
        type_, columns, _ = Product.WRAPPERS[which % len(Product.WRAPPERS)]
        shapes = (64, row_bytes), (columns, row_bytes)
        if type_ == "s8":
            a, b = (torch.randint(-128, 128, shape, dtype=torch.int8, generator=generator) for shape in shapes)
            return Product(which, a, b, torch.full((64, columns), -1, dtype=torch.int32))
        a, b = (torch.randn(shape, generator=generator).to(torch.float8_e4m3fn) for shape in shapes)
        return Product(which, a, b, torch.full((64, columns), torch.nan))

    def is_solved(self) -> bool:
        expected = self.a.double() @ self.b.double().T
        bound = 0.0 if self.d.dtype == torch.int32 else 2.0**-10 * expected.abs().max().item()
        return bool((self.d.double() - expected).abs().max() <= bound)


def product_params(a: int, b: int, d: int, which: int) -> bytes:
    """ProductParams of kernels/warpgroup_products.cu, from addresses."""
    return struct.pack("<3Q2i", a, b, d, which, 0)


def run_product(build: Build, product: Product) -> None:
    simulator = Simulator(build)
    simulator.know(*views({"a": product.a, "b": product.b}, {"d": product.d}))
    params = product_params(*(x.data_ptr() for x in (product.a, product.b, product.d)), product.which)
    simulator.launch_kernel("warpgroup_products", params, 1, Product.THREADS, Product.SHARED_BYTES, arch=90)


@pytest.mark.parametrize("which", range(Product.COUNT))
def test_product(build, which):
    product = Product.draw(which)
    run_product(build, product)
    assert product.is_solved()


# --- faults -----------------------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def faulty() -> Build:
    folder, text = PROJECT.build / "hopper_faults", KERNEL.read_text()
    sources = []
    for fault in (*FAULTS, *HARMLESS):
        assert text.count(fault.there) == 1, fault.name
        path = folder / f"{fault.entry}.cu"
        changed = text.replace(fault.there, fault.instead).replace(" pipeline(", f" {fault.entry}(")
        write_if_changed(path, changed.encode())
        sources.append(Source(fault.entry, path))
    return simbuild.build(sources, folder / "build")


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("fault", (*FAULTS, *HARMLESS), ids=lambda fault: fault.name)
def test_fault_is_reported(faulty, fault, seed):
    problem = Problem.draw(1, 5, seed)
    try:
        run(faulty, fault.entry, problem, seed)
        seen = NOTHING if problem.is_solved() else WRONG
    except SimulatorError as error:
        seen = error.reports[0].kind
    assert seen in fault.kinds


@pytest.mark.parametrize("registers", [16, 100, 264])
@pytest.mark.parametrize("direction", ["inc", "dec"])
def test_setmaxnreg_takes_multiples_of_8_from_24_to_256(tmp_path, direction, registers):
    source = tmp_path / "registers.cu"
    call = f"sage::ptx::setmaxnreg_{direction}<{registers}>();"
    source.write_text('#include "sage/ptx/setmaxnreg.cuh"\n'
                      f'extern "C" __global__ void registers(int) {{ {call} }}\n')
    with pytest.raises(HostBuildError, match="a multiple of 8 from 24 to 256"):
        simbuild.build([Source("registers", source)], tmp_path / "build")
