"""ninja: what is rebuilt after which change."""

from __future__ import annotations

import os
import sys

import pytest

from codegen import ninja, nvdisasm, nvrtc
from codegen.compilation import Compilation, headers_of
from codegen.errors import BuildError
from codegen.ninja import compile_all, ninja_text
from codegen.render import render_all, source_path
from codegen.selection import Selection

ALL = {"attn", "quant", "delta", "pack", "merge"}


@pytest.fixture(autouse=True)
def nothing_kept(monkeypatch):
    monkeypatch.setenv("SAGE_AOT_CACHE", "")


@pytest.fixture
def kernels(project, matrix):
    """One kernel of each kind, rendered."""
    selected = Selection(("sm80",), ("sage_attn_*_d64_*_full_*_qsmooth",)).kernels(matrix)
    render_all(selected, matrix, project)
    return selected


@pytest.fixture
def build(project, kernels, capfd):
    """A function that builds with NVRTC and returns the kinds that were compiled, and ninja's output."""

    def run(**how) -> tuple[set[str], str]:
        compilation = Compilation(project, **how)
        before = {kernel: _time(compilation.compiled(kernel)) for kernel in kernels}
        capfd.readouterr()
        compile_all(kernels, compilation, jobs=2)
        rebuilt = {kernel.spec.kind for kernel in kernels if _time(compilation.compiled(kernel)) != before[kernel]}
        return rebuilt, capfd.readouterr().err

    return run


def _time(path) -> int | None:
    return path.stat().st_mtime_ns if path.exists() else None


def _touch(path) -> None:
    path.write_text(path.read_text() + "// changed\n")


def test_only_what_changed_is_rebuilt(project, build):
    assert build()[0] == ALL
    rebuilt, said = build()
    assert (rebuilt, "no work to do" in said) == (set(), True)
    _touch(project.include / "sage" / "attn.cuh")
    assert build()[0] == {"attn"}
    _touch(project.include / "sage" / "quant.cuh")
    assert build()[0] == ALL - {"attn"}
    _touch(project.include / "sage" / "base.cuh")
    assert build()[0] == ALL


def test_a_lost_cubin_or_report_is_rebuilt(project, kernels, build):
    build()
    compilation = Compilation(project)
    compilation.compiled(kernels[0]).with_suffix(".json").unlink()
    assert build()[0] == {"attn"}
    compilation.compiled(kernels[-1]).unlink()
    assert build()[0] == {"quant"}


def test_another_version_of_a_tool_rebuilds(project, build):
    build()
    versions = Compilation(project).folder / "compiler.txt"
    assert versions.read_text().splitlines() == [nvrtc.version(), nvdisasm.version()]
    versions.write_text(versions.read_text().replace("nvdisasm 13.", "nvdisasm 13.0."))
    assert build()[0] == ALL


def test_another_environment_rebuilds_nothing(project, kernels, build, tmp_path, monkeypatch):
    """The other environment's Python lies in another folder, and may be started by another name."""
    build()
    other = tmp_path / "venv" / "bin"
    other.mkdir(parents=True)
    for name in ("python", "python3"):
        (other / name).symlink_to(sys.executable)
    monkeypatch.setattr(sys, "executable", str(other / "python3"))
    assert build()[0] == set()
    assert str(other) not in ninja_text(kernels, Compilation(project), Compilation(project).cache_keys(kernels))


@pytest.mark.parametrize("names", [["python3"], ["python3", "python"]])
def test_a_python_without_that_name_next_to_it_is_named_by_its_path(project, kernels, tmp_path, monkeypatch, names):
    for name in names:
        (tmp_path / name).write_text(f"#!/bin/sh\necho {name}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python3"))
    assert f"command = {tmp_path / 'python3'} -m codegen.nvrtc" in ninja_text(kernels, Compilation(project), {})


def test_commands_run_the_python_that_builds(build, tmp_path, monkeypatch):
    """The commands do so whatever `python` comes first on the PATH."""
    (tmp_path / "python").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert build()[0] == ALL


def test_another_target_has_its_own_cubins(project, kernels, build):
    build()
    assert build(retarget="sm_90")[0] == ALL
    own, foreign = Compilation(project), Compilation(project, retarget="sm_90")
    assert (own.target(kernels[0]), foreign.target(kernels[0])) == ("sm_80", "sm_90")
    assert own.compiled(kernels[0]).read_bytes() != foreign.compiled(kernels[0]).read_bytes()
    assert "no work to do" in build()[1]


def test_the_ninja_file_is_deterministic_and_left_alone(project, kernels, build):
    build()
    path = Compilation(project).folder / "build.ninja"
    time = _time(path)
    build()
    assert _time(path) == time
    assert path.read_text() == ninja_text(kernels, Compilation(project), Compilation(project).cache_keys(kernels))


def test_a_kernel_that_does_not_compile_fails_with_its_log(project, build, capfd):
    (project.include / "sage" / "base.cuh").write_text("constexpr float kValue = wrong;\n")
    with pytest.raises(BuildError, match="ninja exited with 1"):
        build()
    assert 'base.cuh(1): error: identifier "wrong" is undefined' in capfd.readouterr().err


def test_ninja_runs_from_any_folder(build, tmp_path, monkeypatch):
    folder = tmp_path / "else where"
    folder.mkdir()
    monkeypatch.chdir(folder)
    assert build()[0] == ALL
    assert os.listdir(folder) == []


def test_a_command_has_kernels_of_one_kind_and_target(project, matrix):
    """Every kernel has one command, so that a change of a header compiles no kernels of another kind again."""
    compilation, batches = Compilation(project), list(ninja._batches(matrix.kernels, Compilation(project)))
    assert sorted(kernel.spec.name for batch in batches for kernel in batch) == sorted(
        kernel.spec.name for kernel in matrix.kernels)
    for batch in batches:
        assert len({(kernel.spec.kind, compilation.target(kernel)) for kernel in batch}) == 1
        assert len(batch) <= ninja._BATCH
    of_quantizers = [batch[0].spec.kind == "quant" for batch in batches]
    assert of_quantizers == sorted(of_quantizers, reverse=True)


def test_headers_are_found_recursively_and_in_cycles(project, kernels):
    include = project.include
    (include / "sage" / "base.cuh").write_text('  #  include   <sage/deep.cuh>\n// #include "sage/comment.cuh"\n')
    (include / "sage" / "deep.cuh").write_text('#include "sage/attn.cuh"\n#include <cuda_fp16.h>\n')
    found = headers_of(source_path(kernels[0], project), include)
    assert found == {include / "sage" / name for name in ("attn.cuh", "base.cuh", "deep.cuh")}


def test_an_unknown_header_is_named(project, kernels):
    (project.include / "sage" / "base.cuh").write_text('#include "base2.cuh"\n')
    with pytest.raises(BuildError, match=r"base.cuh: expected a header of .*, got 'base2.cuh'"):
        headers_of(source_path(kernels[0], project), project.include)
