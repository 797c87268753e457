"""The checks themselves: small kernels with one fault each, which must be reported where it is, and nothing else."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import pytest
import simbuild
import torch
from hostcc import is_clang
from simbuild import PROJECT, Build, HostBuildError, Source
from simulator import Simulator, SimulatorError, views

FAULTS = Path(__file__).parent / "faults"
KERNELS = sorted(path.stem for path in FAULTS.glob("*.cu"))
BLOCKS, THREADS, SHARED_BYTES = 2, 64, 4096
SEEDS = range(5)
_MARK = re.compile(r"// fault: (?P<kinds>[a-z |]+?)(?:, block (?P<block>\d+))?(?:, thread (?P<thread>\d+))?$")


@pytest.fixture(scope="module")
def faults() -> Build:
    return simbuild.build([Source(name, FAULTS / f"{name}.cu") for name in KERNELS], PROJECT.build / "faults")


def run(build: Build, name: str, seed: int) -> torch.Tensor:
    values, out = torch.ones(256), torch.zeros(256)
    simulator = Simulator(build, seed)
    simulator.know(*views({"in": values}, {"out": out}))
    simulator.launch_kernel(name, struct.pack("<QQ", values.data_ptr(), out.data_ptr()), BLOCKS, THREADS, SHARED_BYTES)
    return out


def marks(name: str) -> dict[str, re.Match]:
    """Marks of a kernel's comments, by place."""
    lines = enumerate((FAULTS / f"{name}.cu").read_text().splitlines(), 1)
    found = {f"{FAULTS / name}.cu:{number}": _MARK.search(line) for number, line in lines if "// fault:" in line}
    assert all(found.values()), f"{name}: a mark that is none"
    return found


def faulty() -> list[object]:
    """Every kernel with a fault; clang does not check the alignment of whole structs."""
    blind = pytest.mark.xfail(is_clang(), reason="clang checks the alignment of scalars only", strict=True)
    return [pytest.param(name, marks=blind if name == "misaligned_struct" else ())
            for name in KERNELS if name != "no_fault"]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", faulty())
def test_fault_is_reported_where_it_is(faults, name, seed):
    expected = marks(name)
    with pytest.raises(SimulatorError) as caught:
        run(faults, name, seed)
    for report in caught.value.reports:
        mark = expected[report.place]
        assert report.kernel == name
        assert report.kind in mark["kinds"].split(" | ")
        for what in ("block", "thread"):
            assert mark[what] is None or int(mark[what]) == getattr(report, what)


@pytest.mark.parametrize("seed", SEEDS)
def test_nothing_is_reported_without_a_fault(faults, seed):
    assert run(faults, "no_fault", seed)[:64].eq(6.0).all()


def test_a_report_says_kernel_place_block_and_lane(faults):
    with pytest.raises(SimulatorError) as caught:
        run(faults, "unwritten_shared", 0)
    assert str(caught.value).startswith(
        f"unwritten_shared: read of memory that nothing wrote at {FAULTS}/unwritten_shared.cu:7, block 1, warp 1, "
        f"lane 5 (1 times): 4 bytes at shared address 0x")


def test_a_wrapper_without_a_meaning_does_not_compile(tmp_path):
    source = tmp_path / "unknown.cu"
    source.write_text('#include "sage/ptx/mma.cuh"\n'
                      'extern "C" __global__ void unknown(float* x) { sage::ptx::mma_m16n8k8_unheard_of(x); }\n')
    with pytest.raises(HostBuildError, match="error: .*mma_m16n8k8_unheard_of"):
        simbuild.build([Source("unknown", source)], tmp_path / "build")


def test_a_struct_of_another_size_is_refused(faults):
    with pytest.raises(AssertionError, match="its struct has 16 bytes, got 8"):
        Simulator(faults).launch_kernel("no_fault", bytes(8), BLOCKS, THREADS)
