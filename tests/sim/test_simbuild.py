"""Libraries of the simulator are those of their sources, in any folder, and are compiled once."""

from __future__ import annotations

import os
import shutil
import struct

import hostcc
import pytest
import simbuild
import torch
from simbuild import ROOT, Build, HostBuildError, Source
from simulator import Simulator, SimulatorError, views

KERNEL = '''#include "sage/types.cuh"
#include "own.cuh"

struct Params { const float* in; float* out; };

extern "C" __global__ void doubled(Params params) {
  __shared__ float shared[32];
  if (threadIdx.x == kUnwritten) params.out[0] = shared[5];
  params.out[threadIdx.x] = 2 * params.in[threadIdx.x];
}
'''


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SAGE_AOT_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def tree(tmp_path):
    """Makes a folder with a kernel, its header and the kernels' headers; returns a function that builds there."""
    def make(name: str, unwritten: int = 1000):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "doubled.cu").write_text(KERNEL)
        (folder / "own.cuh").write_text(f"constexpr unsigned kUnwritten = {unwritten};\n")
        shutil.copytree(ROOT / "templates" / "include", folder / "headers")

        def build() -> Build:
            return simbuild.build([Source("doubled", folder / "doubled.cu")], folder / "build", folder / "headers")

        return folder, build

    return make


def doubled(build: Build) -> torch.Tensor:
    values, out = torch.arange(32.0), torch.zeros(32)
    simulator = Simulator(build, 0)
    simulator.know(*views({"in": values}, {"out": out}))
    simulator.launch_kernel("doubled", struct.pack("<QQ", values.data_ptr(), out.data_ptr()), 1, 32)
    return out


@pytest.fixture
def no_compiler(monkeypatch, tmp_path):
    """Function that lets nothing compile from its call on."""
    Simulator(Build(tmp_path))  # loads the engine

    def fail(*_):
        raise AssertionError("compiled again")

    return lambda: monkeypatch.setattr(simbuild, "_run_ninja", fail)


def test_another_folder_takes_the_library(tree, no_compiler):
    _, build = tree("first")
    first = build()
    no_compiler()
    _, build = tree("second")
    second = build()
    assert first.library("doubled").read_bytes() == second.library("doubled").read_bytes()
    assert doubled(second).equal(2 * torch.arange(32.0))


def test_a_fault_is_reported_in_the_folder_that_took_the_library(tree, no_compiler):
    tree("first", unwritten=3)[1]()
    no_compiler()
    folder, build = tree("second", unwritten=3)
    with pytest.raises(SimulatorError) as caught:
        doubled(build())
    report, = caught.value.reports
    assert report.place == f"{folder}/doubled.cu:8"


@pytest.mark.parametrize("change", ["source", "own header", "kernels' header", "flags", "compiler"])
def test_a_change_compiles_again(tree, no_compiler, monkeypatch, change):
    tree("first")[1]()
    no_compiler()
    folder, build = tree("second")
    files = {"source": folder / "doubled.cu", "own header": folder / "own.cuh",
             "kernels' header": folder / "headers" / "sage" / "types.cuh"}
    if change in files:
        files[change].write_text(files[change].read_text() + "// changed\n")
    else:
        monkeypatch.setattr(simbuild, *{"flags": ("kernel_flags", lambda: (*hostcc.kernel_flags(), "-DOTHER")),
                                        "compiler": ("identity", lambda: "another")}[change])
    with pytest.raises(AssertionError, match="compiled again"):
        build()


def test_a_damaged_library_is_compiled_again(tree, tmp_path):
    tree("first")[1]()
    for path in (tmp_path / "cache").glob("entries-1/*/*"):
        path.write_bytes(path.read_bytes()[:1000])
    assert doubled(tree("second")[1]()).equal(2 * torch.arange(32.0))


@pytest.mark.parametrize("change", ["source", "compiler"])
def test_times_of_files_do_not_decide(tree, monkeypatch, change):
    """A copy gives a header an old time; a compiler is upgraded in place."""
    folder, build = tree("first")
    before = build().library("doubled").stat().st_mtime_ns
    if change == "source":
        time = (folder / "own.cuh").stat()
        (folder / "own.cuh").write_text("constexpr unsigned kUnwritten = 1001;\n")
        os.utime(folder / "own.cuh", ns=(time.st_atime_ns, time.st_mtime_ns))
    else:
        monkeypatch.setattr(simbuild, "identity", lambda: "another")
    assert build().library("doubled").stat().st_mtime_ns > before


def test_an_unknown_header_is_named(tree):
    folder, build = tree("first")
    (folder / "own.cuh").write_text('#include "sage/none.cuh"\n')
    with pytest.raises(HostBuildError, match=r"own.cuh: expected a header of .*, got 'sage/none.cuh'"):
        build()
