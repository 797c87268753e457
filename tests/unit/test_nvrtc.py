"""One kernel, compiled: the same bytes everywhere, a report that tells the truth, nothing left after a failure."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest

from codegen import compiler, nvcc, nvrtc
from codegen.compiler import Compiled, Report
from codegen.errors import BuildError
from codegen.kernel_info import KernelInfo
from codegen.project import ROOT
from sage_aot._kernels.manifest import MachineCode, Struct

# What every kernel says of itself.
INFO = """
#include "sage/kernel_info.cuh"
namespace sage {
struct KParams {
  float* x;
  int n;
  float y;
};
constexpr auto fields_of(const KParams*) {
  using Params = KParams;
  return fields(SAGE_STRUCT(KParams), SAGE_FIELD(x), SAGE_FIELD(n), SAGE_FIELD(y));
}
}  // namespace sage
struct Kernel {
  static constexpr auto facts() { return sage::facts(sage::Fact{"threads", 1024}); }
};
SAGE_KERNEL_INFO(Kernel, KParams);
"""
# 64 values live across a barrier do not fit the 32 registers that two blocks of 1024 threads leave.
SPILLS = """
extern "C" __global__ void __launch_bounds__(1024, 2) k(float* x) {
  float a[64];
#pragma unroll
  for (int i = 0; i < 64; ++i) a[i] = x[i * 1024 + threadIdx.x];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 64; ++i) x[i * 1024 + threadIdx.x] = a[i] * a[(i * 7) & 63];
}
""" + INFO
# __FILE__ would carry the folder into the cubin.
TABLE = """
#include "sage/one.cuh"
static __device__ float table[64] = {kOne, 2.f};
extern "C" __global__ void k(float* x, const char** file, int i) {
  x[i] = table[i];
  table[i] += 1.f;
  file[i] = __FILE__;
}
""" + INFO


@pytest.fixture
def compile(tmp_path):
    """A function that compiles a source named k.cu in a folder of its own, and returns the finished process and the
    path of its cubin."""

    def run(text: str, folder: str = "a", toolchain: str = "nvrtc", target: str = "sm_80",
            entries: tuple[str, ...] = ()):
        here = tmp_path / folder
        (here / "include" / "sage").mkdir(parents=True, exist_ok=True)
        (here / "include" / "sage" / "one.cuh").write_text("constexpr float kOne = 1.f;\n")
        for header in ("kernel_info.cuh", "types.cuh"):
            shutil.copy(ROOT / "templates/include/sage" / header, here / "include" / "sage")
        (here / "k.cu").write_text(text)
        command = [sys.executable, "-m", f"codegen.{toolchain}", "--target", target, "--include",
                   str(here / "include"), "-o", str(here), "--kernel", str(here / "k.cu"), *entries]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False), here / "k.cubin"

    return run


def test_a_cubin_does_not_depend_on_its_folder(compile):
    (first, a), (second, b) = compile(TABLE), compile(TABLE, "another/deeper folder")
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert a.read_bytes() == b.read_bytes()
    assert a.read_bytes()[:4] == b"\x7fELF"
    assert a.read_bytes()[8] == 7  # the ABI that drivers from 525 on load; that of 13.x is 8


def test_a_command_compiles_several_kernels_or_none(tmp_path):
    """Outputs are those of a command for each kernel; the error of one names it, and leaves none of the others."""
    names, shared = ("k", "l"), tmp_path / "sage"
    shared.mkdir()
    for header in ("kernel_info.cuh", "types.cuh"):
        shutil.copy(ROOT / "templates/include/sage" / header, shared)
    (shared / "one.cuh").write_text("constexpr float kOne = 1.f;\n")
    (tmp_path / "k.cu").write_text(TABLE)
    (tmp_path / "l.cu").write_text(SPILLS.replace(" k(", " l("))
    (tmp_path / "wrong.cu").write_text("nonsense")

    def run(folder: str, *kernels: str):
        (tmp_path / folder).mkdir(exist_ok=True)
        sources = [word for name in kernels for word in ("--kernel", str(tmp_path / f"{name}.cu"))]
        command = [sys.executable, "-m", "codegen.nvrtc", "--target", "sm_80", "--include", str(tmp_path), "-o",
                   str(tmp_path / folder), *sources]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    def made(folder: str) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in (tmp_path / folder).iterdir()}

    for name in names:
        assert run("apart", name).returncode == 0
    done = run("together", *names)
    assert done.returncode == 0, done.stderr
    assert made("together") == made("apart") and len(made("apart")) == 4
    failed = run("together", *names, "wrong")
    assert failed.returncode == 1 and f"{tmp_path / 'wrong.cu'}: NVRTC_ERROR_COMPILATION" in failed.stderr
    assert made("together") == {}


def test_the_seed_is_fixed():
    """No kernel here needs the seed; without it, globals with internal linkage got another name in every process."""
    assert "--frandom-seed=sage_aot" in nvrtc.FLAGS


def test_the_report_counts_registers_and_spills(compile):
    done, cubin = compile(SPILLS)
    assert done.returncode == 0, done.stderr
    report = json.loads(cubin.with_suffix(".json").read_text())
    assert report.keys() == {"compiler", "machine", "first_driver", "opcodes", "main_loop",
                             "exponentials_before_arrival", "promotion_under_products", "info"}
    assert (report["compiler"], report["first_driver"]) == (nvrtc.version(), 525)
    machine = Report.read(cubin).machine
    assert (machine.registers, machine.elf_abi) == (32, 7)
    assert machine.spill_bytes > 0


def test_of_several_entry_points_the_largest_counts(compile):
    """The report has the registers of the largest entry point, and the spills of all of them."""
    plain = 'extern "C" __global__ void k_{}(float* x) {{ x[0] = 1; }}\n'
    text = plain.format("first") + SPILLS.replace(" k(", " k_middle(") + plain.format("last")
    spills = Report.read(compile(SPILLS)[1]).machine
    done, cubin = compile(text, "several", entries=("k_first", "k_middle", "k_last"))
    assert done.returncode == 0, done.stderr
    assert Report.read(cubin).machine == spills
    done, cubin = compile(text, "several", entries=("k_first", "k_middle"))
    assert done.returncode == 1 and not cubin.exists()
    assert "expected the __global__ functions k_first, k_middle, got " in done.stderr


def test_a_plain_kernel_spills_nothing(compile):
    assert Report.read(compile(TABLE)[1]).machine.spill_bytes == 0


def test_the_report_holds_what_the_kernel_says_of_itself(compile):
    info = Report.read(compile(TABLE)[1]).info
    layout = Struct(16, {"x": ("Q", 0), "n": ("i", 8), "y": ("f", 12)})
    assert info == KernelInfo({"threads": 1024.0}, "KParams", layout)


@pytest.mark.parametrize("text, target, message", [
    ('extern "C" __global__ void k(float* x) { x[0] = y; }', "sm_80", 'k.cu(1): error: identifier "y" is undefined'),
    ('extern "C" __global__ void k(float* x) { int unused; }', "sm_80", "expected no warnings"),
    ('extern "C" __global__ void other(float* x) {}', "sm_80", "functions k, got other"),
    ('extern "C" __global__ void k() {} extern "C" __global__ void l() {}', "sm_80", "functions k, got l, k"),
    ("", "sm_80", "functions k, got none"),
    ('extern "C" __global__ void k() { asm volatile("setmaxnreg.inc.sync.aligned.u32 240;"); }', "sm_90a",
     "as they are written, got (C7508)"),
    ('extern "C" __global__ void k(float* x) { x[0] = 1; }', "sm_80",
     "without sage_facts and sage_fields: end its template with SAGE_KERNEL_INFO"),
    (TABLE, "sm_1", "invalid value for --gpu-architecture"),
])
def test_a_failure_says_why_and_leaves_nothing(compile, text, target, message):
    done, cubin = compile(TABLE)
    assert done.returncode == 0
    done, cubin = compile(text, target=target)
    assert done.returncode == 1
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert sorted(path.name for path in cubin.parent.iterdir()) == ["include", "k.cu"]


def test_another_nvrtc_is_refused_with_advice(monkeypatch):
    class Other:
        version = "12.8.93"

    monkeypatch.setattr(nvrtc, "distribution", lambda name: Other)
    with pytest.raises(BuildError, match=r"expected NVRTC 12.9, got 12.8.93: install .*pip install -e"):
        nvrtc.version()


def test_the_log_of_ptxas_is_summed_over_functions(monkeypatch):
    log = """ptxas info    : Compiling entry function 'k' for 'sm_80'
ptxas info    : Function properties for k
    264 bytes stack frame, 304 bytes spill stores, 300 bytes spill loads
ptxas info    : Function properties for callee
    16 bytes stack frame, 8 bytes spill stores, 4 bytes spill loads
ptxas info    : Used 32 registers, used 1 barriers, 264 bytes cumulative stack size, 360 bytes cmem[0]
"""
    monkeypatch.setattr(compiler, "of_elf", lambda code: None)
    found = Report.of("c", Compiled(b"\x7fELF\x02\x01\x01\x33\x07", log), ())
    assert found.machine == MachineCode(registers=32, spill_bytes=616, elf_abi=7)


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not on the PATH")
def test_nvcc_reports_the_same_things(compile):
    done, cubin = compile(SPILLS, toolchain="nvcc")
    assert done.returncode == 0, done.stderr
    report = Report.read(cubin)
    assert report.compiler == nvcc.version()
    assert (report.machine.registers, report.machine.spill_bytes > 0) == (32, True)
    assert report.info.facts == {"threads": 1024.0}
    done, cubin = compile("nonsense", toolchain="nvcc")
    assert done.returncode == 1
    assert "k.cu(1): error" in done.stderr
    assert not cubin.exists()
