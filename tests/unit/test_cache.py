"""Files that were compiled before are not compiled again, in any folder, and never taken for something else."""

from __future__ import annotations

import dataclasses
import hashlib
import multiprocessing
import os
import shutil
from pathlib import Path

import pytest

from codegen import compilation, nvdisasm, nvrtc
from codegen.cache import Cache
from codegen.cli import main
from codegen.compilation import Compilation, without_comments
from codegen.matrix import read_matrix
from codegen.ninja import compile_all
from codegen.project import Project
from codegen.render import render_all

ONE, OTHER = (hashlib.sha256(name).hexdigest() for name in (b"one", b"other"))
DATA = b"machine code" * 1000, b"{}"


@pytest.fixture
def cache(tmp_path) -> Cache:
    return Cache(tmp_path / "cache")


@pytest.fixture
def files(tmp_path) -> list[Path]:
    """Two files to keep."""
    paths = [tmp_path / "made" / name for name in ("x.cubin", "x.json")]
    paths[0].parent.mkdir()
    for path, data in zip(paths, DATA):
        path.write_bytes(data)
    return paths


@pytest.fixture
def others(tmp_path) -> list[Path]:
    """Paths that the files are to have, in a folder that is not there yet."""
    return [tmp_path / "clone" / name for name in ("x.cubin", "x.json")]


def entry(cache: Cache, key: str = ONE) -> Path:
    return cache.folder / "entries-1" / key[:2] / key


def entries(folder: Path) -> list[Path]:
    return list((folder / "entries-1").glob("*/*"))


# --- entries ----------------------------------------------------------------------------------------------------------


def test_files_are_restored_in_another_folder(cache, files, others):
    assert not cache.restore(ONE, others) and not others[0].parent.exists()
    cache.keep({ONE: DATA})
    assert cache.restore(ONE, others)
    assert tuple(path.read_bytes() for path in others) == DATA
    assert not cache.restore(OTHER, others) and not cache.restore(ONE, others[:1])


def test_files_that_are_there_are_not_written_again(cache, files):
    cache.keep({ONE: DATA})
    before = files[0].stat().st_mtime_ns
    assert cache.restore(ONE, files) and files[0].stat().st_mtime_ns == before
    files[0].write_bytes(b"other")
    assert cache.restore(ONE, files) and files[0].read_bytes() == DATA[0]


@pytest.mark.parametrize("damage", [
    lambda data: data[:100] + bytes([data[100] ^ 1]) + data[101:], lambda data: data[:-1], lambda data: b"",
    lambda data: bytes([data[0] ^ 1]) + data[1:]])
def test_a_damaged_entry_is_none_and_is_replaced(cache, files, others, damage):
    cache.keep({ONE: DATA})
    entry(cache).write_bytes(damage(entry(cache).read_bytes()))
    assert not cache.restore(ONE, others) and not others[0].exists()
    cache.keep({ONE: DATA})
    assert cache.restore(ONE, others)


def test_an_entry_of_another_key_is_none(cache, files, others):
    cache.keep({ONE: DATA})
    entry(cache, OTHER).parent.mkdir()
    shutil.copy(entry(cache), entry(cache, OTHER))
    assert not cache.restore(OTHER, others)


def test_the_least_recently_used_make_room(cache, files):
    keys = [hashlib.sha256(bytes([i])).hexdigest() for i in range(4)]
    cache.keep(dict.fromkeys(keys[:3], DATA))
    size = entry(cache, keys[0]).stat().st_size
    for age, key in enumerate(keys[:3]):
        os.utime(entry(cache, key), ns=(age, age))
    small = dataclasses.replace(cache, limit=3 * size)
    assert small.restore(keys[0], files)  # used now
    small.keep({keys[3]: DATA})
    assert [cache.restore(key, files) for key in keys] == [True, False, True, True]


def test_an_entry_that_is_added_makes_room_later(cache, files):
    small = dataclasses.replace(cache, limit=1)
    small.add(ONE, DATA)
    assert small.restore(ONE, files)
    small.keep({OTHER: DATA})
    assert entries(cache.folder) == []


def test_files_of_others_stay(cache):
    """The folder that SAGE_AOT_CACHE names may hold other things."""
    for path in (cache.folder / "ab" / "note", cache.folder / ".ssh" / "key"):
        path.parent.mkdir(parents=True)
        path.write_bytes(b"older and larger" * 1000)
        os.utime(path, ns=(0, 0))
    dataclasses.replace(cache, limit=1).keep({ONE: DATA})
    assert entries(cache.folder) == [] and len(list(cache.folder.glob("*/*"))) == 2 + len([entry(cache).parent])


def test_none_is_kept_where_the_environment_says_so(monkeypatch, files, others, tmp_path):
    monkeypatch.setenv("SAGE_AOT_CACHE", "")
    Cache.of_environment().keep({ONE: DATA})
    assert not Cache.of_environment().restore(ONE, others)
    monkeypatch.setenv("SAGE_AOT_CACHE", str(tmp_path / "named"))
    assert Cache.of_environment().folder == tmp_path / "named"
    monkeypatch.delenv("SAGE_AOT_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert Cache.of_environment().folder == tmp_path / "xdg" / "sage_aot"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert Cache.of_environment().folder == tmp_path / "home" / ".cache" / "sage_aot"


def test_a_folder_that_cannot_be_written_is_told(files, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    Cache(tmp_path / "file" / "cache").keep({ONE: DATA})
    assert "set SAGE_AOT_CACHE to another folder, or to nothing" in capsys.readouterr().err
    assert not Cache(tmp_path / "file" / "cache").restore(ONE, files)


def _hammer(folder: Path, keys: list[str], name: str) -> int:
    """Keep and restore entries of a cache that holds a few of them; return how often one was restored."""
    files, restored = [folder.parent / name], 0
    for round in range(40):
        key = keys[round % len(keys)]
        data = key.encode() * 500
        Cache(folder, limit=1200).keep({key: [data]})
        files[0].unlink(missing_ok=True)
        if Cache(folder, limit=1200).restore(key, files):
            restored += 1
            assert files[0].read_bytes() == data
    return restored


def test_processes_share_a_folder(cache, tmp_path):
    keys = [hashlib.sha256(bytes([i])).hexdigest() for i in range(16)]
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        restored = pool.starmap(_hammer, [(cache.folder, keys, "first"), (cache.folder, keys[::-1], "second")])
    assert all(restored)
    assert sum(path.stat().st_size for path in entries(cache.folder)) <= 1200


# --- kernels ----------------------------------------------------------------------------------------------------------

ASKED = ["--arch", "sm80", "--only", "sage_attn_*_d64_*_full_*_qraw"]


@pytest.fixture
def cached(project, monkeypatch, tmp_path) -> Path:
    """The cache's folder, next to a project."""
    monkeypatch.setenv("SAGE_AOT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def clone(project: Project, name: str) -> Project:
    """Copy the sources to another folder, with nothing compiled."""
    root = project.root.with_name(name)
    shutil.copytree(project.root, root, ignore=shutil.ignore_patterns("build", "kernels"))
    return Project(root, root / "build")


def built(project: Project, capfd) -> tuple[dict[str, bytes], str]:
    """The folder that `build` makes, and what it prints to stderr."""
    capfd.readouterr()
    assert main(["build", *ASKED], project.root) == 0
    return {path.name: path.read_bytes() for path in project.package.iterdir()}, capfd.readouterr().err


def test_the_payload_is_the_same_with_and_without(project, cached, monkeypatch, capfd):
    first, said = built(project, capfd)
    assert "compiled before" not in said and "[4/4]" in said
    again, said = built(clone(project, "again"), capfd)
    assert said == f"4 of 4 kernels from {cached}, compiled before\n"
    monkeypatch.setenv("SAGE_AOT_CACHE", "")
    without, said = built(clone(project, "without"), capfd)
    assert "compiled before" not in said
    assert first == again == without and len(first) == 5


def test_only_what_a_change_reaches_is_compiled_again(project, cached, edit, capfd):
    built(project, capfd)
    other = clone(project, "other")
    edit(other.include / "sage" / "attn.cuh", "x[2] = o[0]", "x[3] = o[0]")
    changed, said = built(other, capfd)
    assert f"3 of 4 kernels from {cached}, compiled before" in said and "[1/1]" in said
    edit(other.include / "sage" / "attn.cuh", "x[3] = o[0]", "x[2] = o[0]")
    back, said = built(other, capfd)
    assert "4 of 4 kernels" in said and back == built(project, capfd)[0] != changed


def test_comments_are_no_reason_to_compile(project, cached, edit, capfd):
    first, _ = built(project, capfd)
    other = clone(project, "other")
    edit(other.include / "sage" / "attn.cuh", "x[2] = o[0];", "x[2] = o[0];  // of one tile\n\n  /* and\n no other */")
    again, said = built(other, capfd)
    assert said == f"4 of 4 kernels from {cached}, compiled before\n" and again == first


@pytest.mark.parametrize(("text", "code"), [
    ("a;  // b\n\n  c;\n", "a;\n  c;"), ("a /* b\n // c */ d", "a   d"), ('"// a" b  // "c"', '"// a" b'),
    ("""'"' // a""", """'"'"""), (r'"a\"// b" // c', r'"a\"// b"'),
    ("1'000 // it's\n2", "1'000\n2"), ("a / b", "a / b"), ("// a \\\nb;", "// a \\\nb;")], ids=str)
def test_comments_are_told_from_code(text, code):
    assert without_comments(text) == code


def test_a_damaged_cubin_is_compiled_again(project, cached, capfd):
    first, _ = built(project, capfd)
    for path in entries(cached):
        path.write_bytes(path.read_bytes()[:-3])
    again, said = built(clone(project, "again"), capfd)
    assert "compiled before" not in said and again == first
    assert "4 of 4 kernels" in built(clone(project, "third"), capfd)[1]


def test_versions_flags_commands_and_sources_are_in_the_key(project, matrix, monkeypatch, tmp_path):
    kernels = matrix.kernels
    render_all(kernels, matrix, project)

    def keys(**how) -> set[str]:
        return set(Compilation(project, **how).cache_keys(kernels).values())

    before = keys()
    assert len(before) == len(kernels)
    assert not before & keys(retarget="sm_87") and keys(toolchain="nvcc") == set()
    with monkeypatch.context() as patch:
        patch.setattr(nvdisasm, "version", lambda: "nvdisasm 13.0")
        assert not before & keys()
    with monkeypatch.context() as patch:
        patch.setattr(nvrtc, "version", lambda: "nvrtc 12.9.0")
        assert not before & keys()
    with monkeypatch.context() as patch:
        patch.setattr(nvrtc, "FLAGS", (*nvrtc.FLAGS, "-G"))
        assert not before & keys()
    with monkeypatch.context() as patch:
        patch.setattr(compilation, "REPORT_LAYOUT", "other")
        assert not before & keys()
    with monkeypatch.context() as patch:
        (tmp_path / "census.py").write_text("")
        patch.setattr(Compilation, "command_files", [tmp_path / "census.py"])
        assert not before & keys()
    assert keys() == before


def test_times_of_files_do_not_decide(project, cached, capfd):
    """A copy may keep the times of its files: ninja would take the cubin for up to date."""
    first, _ = built(project, capfd)
    header = project.include / "sage" / "attn.cuh"
    old = header.stat()
    header.write_text(header.read_text().replace("x[2] = o[0]", "x[3] = o[0]"))
    os.utime(header, ns=(old.st_atime_ns, old.st_mtime_ns))
    assert built(project, capfd)[0] != first


def test_what_changed_while_it_was_compiled_is_not_kept(project, cached, monkeypatch):
    matrix = read_matrix(project.matrix, project.templates)
    kernels = matrix.kernels[:1]
    render_all(kernels, matrix, project)
    own, keys = Compilation(project), Compilation.cache_keys
    found = iter(("0" * 64, "1" * 64))
    monkeypatch.setattr(Compilation, "cache_keys", lambda self, of: {kernel: next(found) for kernel in of})
    compile_all(kernels, own)
    assert entries(cached) == []
    monkeypatch.setattr(Compilation, "cache_keys", keys)
    own.compiled(kernels[0]).unlink()
    compile_all(kernels, own)
    assert len(entries(cached)) == 1
