"""Reading a kernel folder: what is missing or damaged is refused by name, before anything is loaded."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
from types import SimpleNamespace

import pytest
from records import manifest_of, record_of

from sage_aot._loader import Library, default_library, import_cupy
from sage_aot._manifest import FILE_NAME, FORMAT, sealed_text
from sage_aot._spec import KernelSpec
from sage_aot.errors import CubinError, UnsupportedError

SPEC = KernelSpec("stats", "sm80", 64)
CUBIN = b"not really a cubin"
RECORD = record_of(SPEC, file="it.cubin", sha256=hashlib.sha256(CUBIN).hexdigest())

ATTENTION = record_of(KernelSpec("attn", "sm80", 64, 8, "f16", "f32", "full", "vraw", "qraw"), file="other.cubin")
MANIFEST = manifest_of([RECORD, ATTENTION])


@pytest.fixture
def folder(tmp_path):
    (tmp_path / RECORD.file).write_bytes(CUBIN)
    (tmp_path / FILE_NAME).write_text(MANIFEST.to_text())
    return tmp_path


def test_manifest_and_cubin_are_read_back(folder):
    library = Library(folder)
    assert library.manifest == MANIFEST
    assert library.read(RECORD) == CUBIN


@pytest.mark.parametrize(("changes", "message"), [
    ({"version": "0.0.1"}, "holds kernels of another sage_aot: expected version and structs .*got .'0.0.1'"),
    ({"structs": "0" * 16}, "holds kernels of another sage_aot"),
    ({"kernels": {SPEC.name: RECORD}}, "holds no attention kernel"),
])
def test_a_folder_of_another_build_is_refused(folder, changes, message):
    (folder / FILE_NAME).write_text(dataclasses.replace(MANIFEST, **changes).to_text())
    with pytest.raises(CubinError, match=message):
        Library(folder).manifest


@pytest.mark.parametrize("position", [0, len(CUBIN) // 2, len(CUBIN) - 1])
def test_a_flipped_bit_is_refused(folder, position):
    damaged = bytearray(CUBIN)
    damaged[position] ^= 1
    (folder / RECORD.file).write_bytes(damaged)
    with pytest.raises(CubinError, match=f"the cubin of {SPEC.name} is damaged: .*it.cubin has sha256"):
        Library(folder).read(RECORD)


def test_a_truncated_cubin_is_refused(folder):
    (folder / RECORD.file).write_bytes(CUBIN[:-1])
    with pytest.raises(CubinError, match="is damaged"):
        Library(folder).read(RECORD)


def test_a_missing_cubin_is_refused(folder):
    (folder / RECORD.file).unlink()
    with pytest.raises(CubinError, match=f"the cubin of {SPEC.name} is missing: .*codegen build"):
        Library(folder).read(RECORD)


def test_a_missing_manifest_says_how_to_build(tmp_path):
    with pytest.raises(CubinError, match=r"no kernels: .*manifest.json is missing; .*python -m codegen build"):
        Library(tmp_path).manifest


def test_a_manifest_of_another_version_is_refused(folder):
    values = json.loads(MANIFEST.to_text())
    (folder / FILE_NAME).write_text(sealed_text({**values, "format": FORMAT + 1}))
    with pytest.raises(CubinError, match=f"is not a manifest of this version of sage_aot: expected format {FORMAT}"):
        Library(folder).manifest


@pytest.mark.parametrize("text", ["{", MANIFEST.to_text().replace('"threads": 128', '"threads": 256')])
def test_a_manifest_that_is_no_json_or_was_edited_is_refused(folder, text):
    (folder / FILE_NAME).write_text(text)
    with pytest.raises(CubinError, match="is not a manifest"):
        Library(folder).manifest


def test_the_folder_can_be_named_by_the_environment(folder, monkeypatch):
    monkeypatch.setenv("SAGE_AOT_KERNELS", str(folder))
    assert default_library().folder == folder
    assert default_library() is default_library()


def test_a_missing_cupy_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(UnsupportedError, match=r"pip install 'sage-aot\[cuda12\]'"):
        import_cupy()


def fake_cupy(monkeypatch, built, driver):
    runtime = SimpleNamespace(runtimeGetVersion=lambda: built, driverGetVersion=lambda: driver)
    module = SimpleNamespace(cuda=SimpleNamespace(runtime=runtime))
    monkeypatch.setitem(sys.modules, "cupy", module)
    return module


@pytest.mark.parametrize(("built", "driver", "advice"), [
    (13000, 12090, r"the driver is for CUDA 12.9; update the driver, or uninstall this cupy and .*sage-aot\[cuda12\]"),
    (12090, 11080, "the driver is for CUDA 11.8; update the driver, at least to 525$"),
    (13000, 11080, "the driver is for CUDA 11.8; update the driver, at least to 525$"),
    (12090, 0, "there is no driver; install or update the NVIDIA driver$"),
])
def test_a_cupy_for_a_newer_cuda_than_the_drivers_says_what_to_install(monkeypatch, built, driver, advice):
    fake_cupy(monkeypatch, built, driver)
    with pytest.raises(UnsupportedError, match=rf"built for CUDA {built // 1000}\.{built % 1000 // 10}, but {advice}"):
        import_cupy()


@pytest.mark.parametrize("driver", [12020, 12090, 13000])
def test_a_cupy_for_the_drivers_cuda_or_an_older_one_is_taken(monkeypatch, driver):
    module = fake_cupy(monkeypatch, 12090, driver)
    assert import_cupy() is module
