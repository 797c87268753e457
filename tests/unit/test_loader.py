"""Reading a kernel folder: what is missing or damaged is refused by name, before anything is loaded."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import threading

import pytest
from records import manifest_of, record_of

from sage_aot import _loader
from sage_aot._loader import Library, default_library
from sage_aot._manifest import FILE_NAME, FORMAT, sealed_text
from sage_aot._plan import Launch
from sage_aot._spec import KernelSpec
from sage_aot.errors import CubinError, LaunchError, UnsupportedError

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


# --- damage: whatever happens to a file, it is refused before the driver sees it --------------------------------------


def test_any_byte_of_a_cubin_is_refused(folder):
    for position in range(len(CUBIN)):
        for bit in range(8):
            damaged = bytearray(CUBIN)
            damaged[position] ^= 1 << bit
            (folder / RECORD.file).write_bytes(damaged)
            with pytest.raises(CubinError, match="is damaged") as refused:
                Library(folder).read(RECORD)
    assert f"the cubin of {SPEC.name} is damaged: {folder / RECORD.file} has sha256" in str(refused.value)


@pytest.mark.parametrize("length", [0, 1, len(CUBIN) - 1, len(CUBIN) + 1])
def test_a_cubin_of_another_length_is_refused(folder, length):
    (folder / RECORD.file).write_bytes((CUBIN + b"\0")[:length])
    with pytest.raises(CubinError, match="is damaged"):
        Library(folder).read(RECORD)


def test_files_of_two_versions_are_refused(folder):
    """Another version's kernel under this one's manifest, and the other way round."""
    newer = dataclasses.replace(MANIFEST, version="9.9.9")
    other = dataclasses.replace(RECORD, sha256=hashlib.sha256(b"another kernel").hexdigest())
    (folder / RECORD.file).write_bytes(b"another kernel")
    with pytest.raises(CubinError, match=f"the cubin of {SPEC.name} is damaged"):
        Library(folder).load(RECORD, 0)
    (folder / FILE_NAME).write_text(newer.to_text())
    with pytest.raises(CubinError, match="holds kernels of another sage_aot: .*'9.9.9'"):
        Library(folder).manifest
    (folder / RECORD.file).write_bytes(CUBIN)
    mixed = dataclasses.replace(MANIFEST, kernels={**MANIFEST.kernels, SPEC.name: other})
    (folder / FILE_NAME).write_text(mixed.to_text())
    library = Library(folder)
    with pytest.raises(CubinError, match="is damaged"):
        library.load(library.manifest.kernels[SPEC.name], 0)


# --- loading and launching --------------------------------------------------------------------------------------------


class Driver:
    """Loads anything, unless it is told to fail; knows what it was told."""

    name, version, cuda = "fake", "1", 12000

    def __init__(self):
        self.loaded, self.launched, self.failing = [], [], ""

    def load(self, *arguments):
        if self.failing == "load":
            raise OSError("CUDA_ERROR_INVALID_IMAGE: bad image")
        self.loaded.append(arguments)

        def launch(*launched):
            if self.failing == "launch":
                raise OSError("CUDA_ERROR_LAUNCH_FAILED: bad launch")
            self.launched.append((arguments[0], *launched))

        return launch


@pytest.fixture(autouse=True)
def driver(monkeypatch):
    fake = Driver()
    monkeypatch.setattr(_loader, "default_driver", lambda: fake)
    return fake


def test_a_kernel_is_loaded_once_a_device_and_launched_there(folder, driver):
    library = Library(folder)
    library.launch(Launch(RECORD, 7, b"params"), 0, 0xABC)
    library.launch(Launch(RECORD, 8, b"others"), 0, 0)
    library.launch(Launch(RECORD, 9, b"params"), 1, 5)
    library.launch(Launch(RECORD, 9, b"params"), 1, 6)
    assert driver.loaded == [(device, CUBIN, SPEC.name, RECORD.threads, RECORD.shared_bytes) for device in (0, 1)]
    assert driver.launched == [(0, 7, 0xABC, b"params"), (0, 8, 0, b"others"), (1, 9, 5, b"params"),
                               (1, 9, 6, b"params")]


def test_threads_load_a_kernel_once(folder, driver):
    library = Library(folder)
    meet = threading.Barrier(8)

    def work():
        meet.wait()
        library.launch(Launch(RECORD, 1, b""), 0, 0)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(driver.loaded) == 1 and len(driver.launched) == 8


def test_what_the_driver_refuses_names_the_kernel(folder, driver):
    library = Library(folder)
    driver.failing = "load"
    with pytest.raises(LaunchError, match=rf"does not load {SPEC.name} \(built for sm_80\) on device 3: "
                                          "CUDA_ERROR_INVALID_IMAGE"):
        library.launch(Launch(RECORD, 1, b""), 3, 0)
    driver.failing = ""
    library.launch(Launch(RECORD, 1, b""), 3, 0)  # a failure is not kept
    driver.failing = "launch"
    with pytest.raises(LaunchError, match=f"does not launch {SPEC.name} on device 3: CUDA_ERROR_LAUNCH_FAILED"):
        library.launch(Launch(RECORD, 1, b""), 3, 0)


def test_a_driver_below_a_kernels_floor_is_refused_before_it_sees_the_file(folder, driver):
    library, demanding = Library(folder), dataclasses.replace(RECORD, least_driver=570, file="not there.cubin")
    with pytest.raises(UnsupportedError, match=rf"the driver of device 0 is too old for {SPEC.name}: it needs a driver "
                                               r"from 570 on \(CUDA 12.8\), this one is for CUDA 12.0; update it"):
        library.load(demanding, 0)
    driver.cuda = 12080
    with pytest.raises(CubinError, match="is missing"):
        library.load(demanding, 0)
