"""``python -m codegen`` on a small project: folders it writes, problems it finds, exit statuses."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
from typing import Any

import pytest
from records import STRUCTS

from codegen import nvcc as nvcc_module
from codegen.cli import main
from codegen.compilation import Compilation
from codegen.matrix import read_matrix
from codegen.nvrtc import FLAGS, version
from codegen.project import ROOT, Project
from codegen.render import Renderer
from sage_aot._kernels.manifest import Arch, AttnRecord, KernelRecord, Manifest
from sage_aot._kernels.tile import Tile
from sage_aot._version import __version__

ONE = ["--arch", "sm80", "--only", "sage_attn_*_d64_*_full_*_qraw"]
ATTN = "sage_attn_sm80_d64_qkint8_pvf16_accf32_full_vraw_qraw"
QUANT = "sage_quant_sm80_d64_qkint8_pvf16"
PACK = "sage_pack_sm80"
MERGE = "sage_merge_sm80"
ALL = {ATTN, QUANT, PACK, MERGE}
SPILLING = """
extern "C" __global__ void __launch_bounds__(1024, 2) {{ name }}(float* x) {
  products(x);
  float a[64];
#pragma unroll
  for (int i = 0; i < 64; ++i) a[i] = x[i * 1024 + threadIdx.x];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 64; ++i) x[i * 1024 + threadIdx.x] = a[i] * a[(i * 7) & 63];
}
"""

NVCC = """
import sys
from pathlib import Path
if "--version" in sys.argv:
    print("Cuda compilation tools, release 13.0, V13.0.88")
else:
    sys.path.insert(0, "ROOT")
    from codegen.nvrtc import compile_kernel
    target, include, *_, source, _, out = sys.argv[2:]
    compiled = compile_kernel(Path(source), target.removeprefix("-arch="), Path(include.removeprefix("-I")))
    Path(out).write_bytes(compiled.code)
    from sage_aot._kernels.spec import spec_of
    for entry in spec_of(Path(source).stem).entries:
        print(f"ptxas info    : Compiling entry function '{entry}' for 'sm_80'")
    print("    32 bytes stack frame, 16 bytes spill stores, 8 bytes spill loads")
    print("ptxas info    : Used 128 registers")
""".replace("ROOT", str(ROOT))


@pytest.fixture
def codegen(project, capfd):
    """A function that runs a command and returns its exit status, stdout and stderr."""

    def run(*argv: str) -> tuple[int, str, str]:
        capfd.readouterr()
        status = main(list(argv), project.root)
        printed = capfd.readouterr()
        return status, printed.out, printed.err

    return run


@pytest.fixture
def spilling(project):
    """Changes the template of attention kernels: they spill, whatever the target."""
    path = project.templates / "attn_mma.cu.jinja"
    text, count = re.subn(r'^extern "C" __global__ .*$', SPILLING, path.read_text(), flags=re.MULTILINE)
    assert count == 1
    path.write_text(text)


@pytest.fixture
def nvcc(tmp_path, monkeypatch):
    """An nvcc whose kernels spill."""
    path = tmp_path / "bin" / "nvcc"
    path.parent.mkdir()
    path.write_text(f"#!{sys.executable}\n{NVCC}")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{path.parent}{os.pathsep}{os.environ['PATH']}")
    version = nvcc_module.version
    version.cache_clear()
    yield
    version.cache_clear()


def _files(folder) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_list_prints_kernels_and_reasons(codegen):
    status, out, _ = codegen("list", "--arch", "sm90")
    assert status == 0
    assert out.startswith("14 kernels\n")
    assert ("sage_attn_sm90_d64_qkint8_pvf16_accf32_full_vraw_qraw: 128x64, warp_m 32, 2 stages, 3 blocks, "
            "attn_mma.cu.jinja\n") in out
    assert out.count(": mma.sync emulates FP8 on Hopper\n") == 1
    assert "\n    sage_attn_sm90_d64_qkint8_pve4m3_acc2f32_full_vraw_qraw\n" in out
    assert "sm80_" not in out


def test_archs_add_up(codegen):
    both = codegen("list", "--arch", "sm80", "--arch", "sm90")[1]
    assert both == codegen("list", "--arch", "sm80,sm90")[1] != codegen("list", "--arch", "sm90")[1]


def test_list_knows_combinations_without_a_kernel(codegen):
    one = "*sm90_d64_qkint4_pvf16_accf32_full_vraw_qraw"
    status, out, _ = codegen("list", "--only", "*sm90*qkint4*d64*", "--only", one)
    assert (status, out) == (2, "")
    status, out, _ = codegen("list", "--only", one)
    assert out == ("0 kernels\n1 combinations without a kernel\n"
                   "  1: Hopper has no INT4 tensor cores\n    sage_attn_sm90_d64_qkint4_pvf16_accf32_full_vraw_qraw\n")


def test_render_writes_only_sources(codegen, project):
    assert codegen("render", *ONE)[0] == 0
    assert {path.stem for path in project.sources.iterdir()} == ALL
    assert not project.package.exists()


def test_build_makes_a_folder_that_holds_what_its_manifest_says(codegen, project):
    assert codegen("build", *ONE)[0] == 0
    manifest = Manifest.read(project.package)
    assert manifest.kernels.keys() == ALL
    assert (manifest.version, manifest.compiler, manifest.flags) == (__version__, version(), FLAGS)
    taken = ("AttnParams", "MergeParams", "PackParams", "QuantParams")
    assert manifest.structs == {name: STRUCTS[name] for name in taken}
    assert manifest.retarget is None
    for name, record in manifest.kernels.items():
        assert hashlib.sha256((project.package / record.file).read_bytes()).hexdigest() == record.sha256, name
        assert (record.target, record.family, record.machine.spill_bytes) == ("sm_80", "mma", 0)
    attn: Any = manifest.kernels[ATTN]
    assert attn.facts == {"threads": 128, "shared_bytes": 64 * (128 + 3 * 2 * 64)}
    assert attn.tile == Tile(128, 64, 32, 2, 3)
    assert attn.companions == (PACK, QUANT, MERGE)
    assert attn.opcodes == {"HMMA.16816.F32": 1, "IMMA.16832.S8.S8": 1}
    assert (attn.main_loop.matrix, attn.main_loop.rare) == (2, 0)
    quant = manifest.kernels[QUANT]
    assert (quant.facts, quant.opcodes) == ({"threads": 256, "shared_bytes": 0}, {})
    assert (type(attn), type(quant)) == (AttnRecord, KernelRecord)
    assert (attn.params, attn.compiler, attn.machine.elf_abi, attn.least_driver) == ("AttnParams", version(), 7, 525)
    assert (manifest.complete, manifest.archs) == (False, {"sm80": Arch((8, 0), 525, None)})
    assert str(project.root) not in (project.package / "manifest.json").read_text()


PTX80 = """  ptx80: {shared_bytes: 101376, least_driver: 575}
axes:"""


@pytest.fixture
def ptx(project, edit):
    """Adds PTX of sm80's kernels to the project; returns the name of a kernel."""
    edit(project.matrix, "axes:", PTX80)
    edit(project.matrix, "arch: [sm80, sm90], headdim", "arch: [sm80, ptx80, sm90], headdim")
    edit(project.matrix, "[sm80, sm86], pv: e4m3", "[sm80, ptx80, sm86], pv: e4m3")
    return ATTN.replace("sm80", "ptx80")


def test_ptx_is_an_arch_whose_files_are_text(codegen, project, ptx):
    assert codegen("build", "--only", ptx)[0] == 0
    assert _files(project.package) == {"manifest.json", *(f"{name.replace('sm80', 'ptx80')}.ptx" for name in ALL)}
    record: Any = Manifest.read(project.package).kernels[ptx]
    assert (record.target, record.is_ptx, record.served) == ("compute_80", True, "8.0 and later")
    assert (record.machine, record.main_loop) == (None, None)
    assert record.facts == {"threads": 128, "shared_bytes": 64 * (128 + 3 * 2 * 64)}
    assert record.opcodes == {"mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32": 1,
                              "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32": 1}
    assert (record.least_driver, record.compiler) == (575, version())
    text = (project.package / record.file).read_text()
    assert ".target sm_80" in text and f".entry {ptx}(" in text and text.endswith("}\n\n")
    assert codegen("build", "--only", ptx, "--retarget", "sm_90")[0] == 0  # it is for that chip too, as it is
    assert (project.build / "retarget_sm_90" / record.file).read_text() == text


def test_ptx_is_held_to_its_products_and_its_driver(codegen, project, ptx, edit):
    edit(project.matrix, "ptx80: {shared_bytes: 101376, least_driver: 575}",
         "ptx80: {shared_bytes: 101376, least_driver: 525}")
    err = codegen("build", "--only", ptx)[2]
    assert "expected a file for drivers from 525 on, got one that 575 is the first to read" in err
    edit(project.templates / "attn_mma.cu.jinja", "products(x);", "")
    err = codegen("build", "--only", ptx)[2]
    assert "expected instructions for qkint8, mma.*s32.s8.s8.s32, got tensor-core instructions: none" in err
    assert not project.package.exists()


def test_a_whole_build_says_that_it_is(codegen, project, small):
    assert codegen("build")[0] == 0
    manifest = Manifest.read(project.package)
    assert manifest.complete and ALL < manifest.kernels.keys() and len(manifest.kernels) == 8
    assert codegen("build", "--arch", "sm80")[0] == 0
    assert not Manifest.read(project.package).complete


def test_an_arch_is_added_by_rows_alone_and_changes_no_others_kernels(codegen, project, small, edit):
    """The other archs' files and records stay the same, and none of their kernels is compiled again."""
    codegen("build")
    before = Manifest.read(project.package)
    times = {path.name: path.stat().st_mtime_ns for path in (project.build / "nvrtc" / "own").glob("*.cubin")}
    edit(project.matrix, "axes:", "  sm103: {shared_bytes: 232448, least_driver: 570}\naxes:")
    assert codegen("build")[0] == 0
    after = Manifest.read(project.package)
    others = {name: record for name, record in after.kernels.items() if record.spec.arch != "sm103"}
    assert others == dict(before.kernels)
    assert {name: after.archs[name] for name in before.archs} == before.archs
    assert after.archs["sm103"] == Arch((10, 3), 570, None) and after.complete
    new = [record for record in after.kernels.values() if record.spec.arch == "sm103"]
    assert {(record.target, record.machine.elf_abi, record.served) for record in new} == {
        ("sm_103", 8, "10.3 and later 10.x")}
    assert len(new) == 4
    assert {path.name: path.stat().st_mtime_ns for path in (project.build / "nvrtc" / "own").glob("*.cubin")
            if "sm103" not in path.name} == times


def test_an_arch_in_the_rows_of_others_changes_none_of_their_sources(tmp_path, edit):
    """Rows of the real matrix list several archs; a source quotes its own arch alone."""
    def sources(text: str) -> dict[str, str]:
        path = tmp_path / "build_matrix.yaml"
        path.write_text(text)
        renderer = Renderer(ROOT / "templates")
        return {kernel.spec.name: renderer.render(kernel) for kernel in read_matrix(path, ROOT / "templates").kernels}

    text = (ROOT / "build_matrix.yaml").read_text()
    before = sources(text)
    rows = re.sub(r"^(  sm87: .*)$", r"\1\n  sm88: {shared_bytes: 166912, least_driver: 525}", text, flags=re.MULTILINE)
    after = sources(re.sub(r"\bsm87\b(?=[,\]])", "sm87, sm88", rows))
    assert {name: source for name, source in after.items() if "sm88" not in name} == before
    assert {name.replace("sm88", "sm87") for name in after if "sm88" in name} == {n for n in before if "sm87" in n}


def test_a_folder_is_compared_with_the_tree_without_compiling(codegen, project, small, edit):
    status, _, err = codegen("verify")
    assert (status, "expected the kernels of this source tree in" in err) == (1, True)
    codegen("build")
    status, out, _ = codegen("verify")
    assert (status, out) == (0, f"8 kernels in {project.package} are those of this source tree\n")
    cubin = project.package / f"{ATTN}.cubin"
    good = cubin.read_bytes()
    cubin.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    (project.package / "notes.txt").write_text("")
    found = codegen("verify")[2].splitlines()
    assert len(found) == 2
    assert found[0].startswith("notes.txt: expected what manifest.json names in ")
    assert found[1].startswith(f"{ATTN}: expected sha256 ")
    cubin.unlink()
    assert f"{ATTN}: expected sha256 'no such file', got" in codegen("verify")[2]
    cubin.write_bytes(good)
    (project.package / "notes.txt").unlink()
    assert codegen("verify")[0] == 0
    edit(project.include / "sage" / "attn.cuh", "x[2] = o[0]", "x[3] = o[0]")
    named = [line.split(": expected ")[0] for line in codegen("verify")[2].splitlines()]
    assert named == [ATTN, ATTN.replace("80", "86")]
    edit(project.include / "sage" / "attn.cuh", "x[3] = o[0]", "x[2] = o[0]")
    codegen("build", "--arch", "sm80")
    err = codegen("verify")[2]
    assert "manifest.json: expected complete True, got False" in err
    assert f"{QUANT.replace('80', '86')}: expected it in" in err
    codegen("build", "--retarget", "sm_90")
    err = codegen("verify", str(project.build / "retarget_sm_90"))[2]
    assert "expected retarget None, got 'sm_90'" in err and "expected target 'sm_80', got 'sm_90'" in err


def test_the_source_hash_follows_what_is_compiled(codegen, project, edit):
    def hashes() -> dict[str, str]:
        assert codegen("build", *ONE)[0] == 0
        return {name: record.source_sha256 for name, record in Manifest.read(project.package).kernels.items()}

    before = hashes()
    assert len(set(before.values())) == len(ALL)
    edit(project.include / "sage" / "attn.cuh", "x[2] = o[0]", "x[3] = o[0]")
    after = hashes()
    assert {name for name in before if before[name] != after[name]} == {ATTN}
    edit(project.matrix, "stages: 2, min_blocks: 3", "stages: 3, min_blocks: 3")
    assert hashes()[ATTN] != after[ATTN]
    edit(project.matrix, "stages: 3, min_blocks: 3", "stages: 2, min_blocks: 3")
    edit(project.include / "sage" / "attn.cuh", "x[3] = o[0]", "x[2] = o[0]")
    assert hashes() == before


def test_a_second_build_writes_nothing_and_removes_what_left(codegen, project):
    codegen("build", *ONE)
    (project.package / "stale.cubin").write_bytes(b"")
    times = {name: (project.package / name).stat().st_mtime_ns for name in _files(project.package) - {"stale.cubin"}}
    status, out, _ = codegen("build", *ONE)
    assert (status, out.count("\n")) == (0, 1)
    assert {name: (project.package / name).stat().st_mtime_ns for name in _files(project.package)} == times
    assert codegen("build", "--only", QUANT)[0] == 0
    assert _files(project.package) == {"manifest.json", f"{QUANT}.cubin"}


def test_spills_leave_no_package(codegen, project, spilling):
    status, _, err = codegen("build", *ONE)
    assert status == 1
    assert f"{ATTN}: expected at most 0 bytes of spilt registers, got " in err
    assert "(row {family: mma, headdim: 64, q: qraw})" in err
    assert not project.package.exists()
    assert "spilt registers" in codegen("check", *ONE)[2]


def test_a_kernel_that_lost_its_tensor_cores_leaves_no_package(codegen, project, edit):
    edit(project.templates / "attn_mma.cu.jinja", "products(x);", "")
    status, _, err = codegen("build", *ONE)
    assert (status, err.count(f"{ATTN}: expected instructions for ")) == (1, 2)
    assert not project.package.exists()
    assert "expected instructions for qkint8" in codegen("check", *ONE)[2]
    assert codegen("build", *ONE, "--retarget", "sm_90")[0] == 0  # a row is about its own chip


def test_a_row_may_allow_spills(codegen, project, spilling, edit):
    edit(project.matrix, "stages: 2, min_blocks: 3}", "stages: 2, min_blocks: 3, allow_spills: 4096, why: a test}")
    assert codegen("build", *ONE)[0] == 0
    spilt = Manifest.read(project.package).kernels[ATTN].machine.spill_bytes
    assert spilt > 0
    edit(project.matrix, "allow_spills: 4096", f"allow_spills: {spilt - 1}")
    assert f"expected at most {spilt - 1} bytes" in codegen("build", *ONE)[2]
    edit(project.matrix, f"allow_spills: {spilt - 1}", f"allow_spills: {spilt}")
    (project.golden / f"{ATTN}.cu").write_text("")
    assert codegen("check", *ONE, "--update")[0] == 0


def test_retargeted_kernels_go_elsewhere(codegen, project, spilling):
    assert codegen("build", *ONE, "--retarget", "sm_90")[0] == 0  # spills count on a row's own chip only
    manifest = Manifest.read(project.build / "retarget_sm_90")
    assert manifest.retarget == "sm_90"
    assert {record.target for record in manifest.kernels.values()} == {"sm_90"}
    assert not project.package.exists()


@pytest.mark.parametrize(("chip", "suffixes"), [("sm_80", {""}), ("sm_90", {"", "a"}), ("sm_120", {"", "f"}),
                                                ("sm_121", {"", "f"}), ("sm_100", {""})])
def test_kernels_whose_instructions_a_chip_lacks_are_not_retargeted(chip, suffixes):
    matrix = read_matrix(ROOT / "build_matrix.yaml", ROOT / "templates")
    compilation = Compilation(Project(ROOT, ROOT / "build"), retarget=chip)
    assert {kernel.suffix for kernel in filter(compilation.takes, matrix.kernels)} == suffixes
    assert all(map(Compilation(compilation.project).takes, matrix.kernels))


def test_what_is_not_retargeted_is_said(tmp_path, capfd):
    only = "sage_attn_sm120_d64_qknvfp4_pvnvfp4_accf32_full_vraw_qsmooth"
    assert main(["census", "--only", only, "--retarget", "sm_90", "--build-dir", str(tmp_path)]) == 0
    found = capfd.readouterr().out
    assert f"not for sm_90, which lacks instructions of sm_120f: {only}\n" in found and f"| `{only}`" not in found
    assert not list(tmp_path.rglob("*.cubin"))  # nor are its companions built


@pytest.mark.parametrize("folder", ["kernels", "kernels/deep", "other", "."])
@pytest.mark.parametrize("how", [("--retarget", "sm_90"), ("--toolchain", "nvcc")])
def test_kernels_that_are_not_for_wheels_stay_out_of_the_package(codegen, project, folder, how):
    package = project.root / "sage_aot"
    status, out, err = codegen("build", *ONE, *how, "--out", str(package / folder))
    assert (status, out) == (2, "")
    assert err.startswith(f"expected a folder outside {package}, as kernels ") and err.count("\n") == 1
    assert not package.exists()


def test_a_link_into_the_package_is_the_package(codegen, project):
    (project.root / "sage_aot").mkdir()
    (project.root / "link").symlink_to(project.root / "sage_aot")
    status, _, err = codegen("build", *ONE, "--retarget", "sm_90", "--out", str(project.root / "link" / "kernels"))
    assert (status, "expected a folder outside" in err) == (2, True)


def test_nvcc_builds_to_debug(codegen, project, nvcc):
    status, out, _ = codegen("build", *ONE, "--toolchain", "nvcc")
    assert status == 0
    assert f"{ATTN}: expected at most 0 bytes of spilt registers, got 24" in out
    manifest = Manifest.read(project.build / "nvcc_kernels")
    assert (manifest.compiler, manifest.kernels.keys()) == ("nvcc 13.0.88", ALL)
    assert manifest.kernels[ATTN].machine.spill_bytes == 24
    assert not project.package.exists()
    (project.golden / f"{ATTN}.cu").write_text("")
    status, out, _ = codegen("check", *ONE, "--toolchain", "nvcc", "--update")
    assert (status, "got 24" in out) == (0, True)
    assert codegen("build", *ONE, "--toolchain", "nvcc", "--retarget", "sm_90")[0] == 0
    assert Manifest.read(project.build / "nvcc_retarget_sm_90").retarget == "sm_90"


def test_out_is_no_folder_of_someone_else(codegen, project):
    folder = project.root / "mine"
    folder.mkdir()
    (folder / "thesis.tex").write_text("")
    status, _, err = codegen("build", *ONE, "--out", str(folder))
    assert (status, "thesis.tex" in err, _files(folder)) == (2, True, {"thesis.tex"})
    (folder / "thesis.tex").unlink()
    assert codegen("build", *ONE, "--out", str(folder), "--build-dir", str(project.root / "other"))[0] == 0
    assert "manifest.json" in _files(folder)
    assert not project.build.exists()


def test_check_finds_golden_drift_and_mends_it(codegen, project, edit):
    golden = project.golden / f"{ATTN}.cu"
    golden.write_text("")
    status, _, err = codegen("check", *ONE)
    assert (status, f"tests/golden/{ATTN}.cu: expected what its kernel renders to" in err) == (1, True)
    assert codegen("check", *ONE, "--update")[0] == 0
    assert ATTN in golden.read_text()
    assert codegen("check", *ONE)[0] == 0
    edit(project.templates / "attn_mma.cu.jinja", "x[0] = kValue", "x[2] = kValue")
    assert codegen("check", *ONE)[0] == 1
    golden.rename(project.golden / "sage_attn_old.cu")
    status, _, err = codegen("check", *ONE)
    assert (status, "expected the name of a kernel, got 'sage_attn_old'" in err) == (2, True)


def test_check_finds_drift_of_the_table_and_mends_it(codegen, project, edit):
    (project.golden / f"{ATTN}.cu").write_text("")
    before = project.instructions.read_text()
    status, _, err = codegen("check", *ONE)
    assert (status, "docs/instructions.md: expected the counts of these kernels" in err) == (1, True)
    codegen("check", *ONE, "--update")
    after = project.instructions.read_text()
    assert after.count(f"| `{ATTN}` |") == 1
    census = codegen("census", *ONE)[1]
    assert census.startswith("| kernel | registers |") and f"| `{ATTN}` |" in census
    assert (after.split("<!--")[0], after.split("-->")[-1]) == (before.split("<!--")[0], before.split("-->")[-1])
    row = after.split("---:|\n")[1].split("<!--")[0]
    other = row.replace("sm80", "sm90")  # of a kernel that this selection leaves out
    stale = row.replace(" | 0 | ", " | 4 | ", 1)
    edit(project.instructions, row, stale + other + row.replace("d64", "d96"))
    assert "docs/instructions.md" in codegen("check", *ONE)[2]
    codegen("check", *ONE, "--update")
    assert project.instructions.read_text() == after.replace(row, row + other)
    assert codegen("check", *ONE)[0] == 0
    project.instructions.write_text("no table")
    assert "expected a table between the comments" in codegen("check", *ONE)[2]


def test_check_finds_misspelt_names(codegen, project, edit):
    edit(project.templates / "quantize.cu.jinja", "{{ threads | cpp }}", "{{ treads | cpp }}")
    status, _, err = codegen("check", *ONE)
    assert (status, err.count("templates/quantize.cu.jinja: expected")) == (1, 2)


def test_check_fails_without_goldens(codegen, project):
    status, _, err = codegen("check", *ONE)
    assert (status, "tests/golden: expected goldens, got none" in err) == (1, True)
    project.golden.rmdir()
    assert codegen("check", *ONE, "--update")[0] == 1


def test_check_writes_no_package(codegen, project):
    (project.golden / f"{ATTN}.cu").write_text("")
    assert codegen("check", *ONE, "--update")[0] == 0
    assert not project.package.exists()


@pytest.mark.parametrize("argv, part", [
    (["build", "--only", "*d96*"], "expected a pattern that fits a name, got '*d96*'; python -m codegen list"),
    (["build", "--only", "d64"], "got 'd64'; it must fit the whole name, try '*d64*'; python -m codegen list"),
    (["render", "--arch", "sm75"], "expected an arch of sm80, sm86, sm89, sm90, got 'sm75'"),
])
def test_wrong_requests_are_one_complaint(codegen, argv, part):
    status, out, err = codegen(*argv)
    assert (status, out, part in err) == (2, "", True)


@pytest.mark.parametrize("argv", [["build", "--jobs", "0"], ["build", "--retarget", "hopper"], [], ["bulid"]])
def test_wrong_arguments(codegen, argv):
    with pytest.raises(SystemExit) as stop:
        codegen(*argv)
    assert stop.value.code == 2


@pytest.mark.parametrize(("target", "advice"), [
    ("sm_100f", ": pass sm_100, kernels that need a suffix add it\n"),  # no record of a manifest can hold it
    ("sm_90a", ": pass sm_90, kernels that need a suffix add it\n"),  # the family adds another a
    ("sm_9", "\n"), ("sm_", "\n"), ("compute_80", "\n"), ("sm_90ab3", "\n"), ("sm_90\n", "\n"),
])
def test_kernels_are_retargeted_to_a_chip_without_a_suffix(codegen, project, capfd, target, advice):
    with pytest.raises(SystemExit) as stop:
        codegen("build", *ONE, "--retarget", target)
    assert stop.value.code == 2
    assert capfd.readouterr().err.endswith(f"expected a chip such as sm_90, without a suffix, got {target!r}{advice}")
    assert not project.build.exists()


def test_a_bad_matrix_is_listed_line_by_line(codegen, project, edit):
    edit(project.matrix, "headdim: [64, 128]", "headdim: [64, 128, 96, 32]")
    status, _, err = codegen("list")
    assert status == 2
    assert [line.split(", got ")[1] for line in err.splitlines()] == ["32", "96"]
    assert "Traceback" not in err


@pytest.mark.parametrize("text", [None, b"axes:\n  # caf\xe9\n"])
def test_a_matrix_that_cannot_be_read_is_one_line(codegen, project, text):
    project.matrix.unlink()
    if text:
        project.matrix.write_bytes(text)
    status, out, err = codegen("list")
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert "build_matrix.yaml" in err


def test_a_closed_pipe_is_no_error():
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as closed:
        done = subprocess.run([sys.executable, "-m", "codegen", "list"], cwd=ROOT, stdout=closed,
                              stderr=subprocess.PIPE, check=False)
    assert (done.returncode, done.stderr) == (-signal.SIGPIPE, b"")


def test_codegen_runs_where_torch_is_not_installed():
    script = ("import sys; sys.modules.update(torch=None, numpy=None); from codegen.cli import main;"
              "sys.exit(main(['list']))")
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("package", ["jinja2", "yaml", "ninja", "elftools"])
def test_codegen_without_its_extra_names_the_extra(package):
    script = (f"import runpy, sys; sys.modules[{package!r}] = None; sys.argv = ['codegen', 'list'];"
              f"runpy.run_module('codegen', run_name='__main__')")
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (f"expected the package {package}, got none: install what code generation needs: "
                           f"pip install -e '.[codegen]'\n")


def test_the_manifest_is_json_with_records_by_name(codegen, project):
    codegen("build", *ONE)
    values = json.loads((project.package / "manifest.json").read_text())
    assert [record["spec"] for record in values["kernels"]] == sorted(ALL)
