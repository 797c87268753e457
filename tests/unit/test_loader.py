"""Reading a kernel folder: what is missing or damaged is refused by name, before anything is loaded."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import threading

import pytest
from records import manifest_of, record_of

from sage_aot._backends.loader import Library
from sage_aot._call.backends import default_library
from sage_aot._kernels.manifest import FILE_NAME, FORMAT, Struct, records_by_name, sealed_text
from sage_aot._kernels.spec import AttnSpec, DeltaSpec
from sage_aot.errors import CubinError, LaunchError, UnsupportedError

SPEC = DeltaSpec("sm80", 64)
CUBIN = b"not really a cubin"
RECORD = record_of(SPEC, file="it.cubin", sha256=hashlib.sha256(CUBIN).hexdigest())

ATTENTION = record_of(AttnSpec("sm80", 64, "int8", "f16", "f32", "exp2", "full", "vraw", "qraw"), file="other.cubin")
MANIFEST = manifest_of([RECORD, ATTENTION])


@pytest.fixture
def folder(tmp_path):
    (tmp_path / RECORD.file).write_bytes(CUBIN)
    (tmp_path / FILE_NAME).write_bytes(MANIFEST.to_text().encode())
    return tmp_path


def test_manifest_and_cubin_are_read_back(folder):
    library = Library(folder)
    assert library.manifest.to_text() == MANIFEST.to_text()
    assert library.manifest.kernels[SPEC.name] == RECORD
    assert library.read(RECORD) == CUBIN


_ATTN = MANIFEST.structs["AttnParams"]


@pytest.mark.parametrize(("changes", "message"), [
    ({"version": "0.0.1"}, r"expected version and fields .*, got \('0.0.1', .*; reinstall"),
    ({"vocabulary": "0123456789abcdef"}, "expected version and fields .*, got .*'0123456789abcdef'.*; reinstall"),
    ({"structs": {"AttnParams": Struct(_ATTN.size, {**_ATTN.fields, "dtype": ("f", 136)})}},
     "holds kernels of another sage_aot: expected fields of AttnParams .*, got dtype of type 'f';"),
    ({"kernels": records_by_name([RECORD])}, "holds no attention kernel"),
])
def test_a_folder_of_another_build_is_refused(folder, changes, message):
    (folder / FILE_NAME).write_bytes(dataclasses.replace(MANIFEST, **changes).to_text().encode())
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
    (folder / FILE_NAME).write_bytes(sealed_text({**values, "format": FORMAT + 1}).encode())
    with pytest.raises(CubinError, match=f"is not a manifest of this version of sage_aot: expected format {FORMAT}"):
        Library(folder).manifest


@pytest.mark.parametrize("text", ["{", MANIFEST.to_text().replace('"threads": 128.0', '"threads": 256.0')])
def test_a_manifest_that_is_no_json_or_was_edited_is_refused(folder, text):
    (folder / FILE_NAME).write_bytes(text.encode())
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
    """A kernel of another version under this version's manifest, and the other way round."""
    newer = dataclasses.replace(MANIFEST, version="9.9.9")
    other = dataclasses.replace(RECORD, sha256=hashlib.sha256(b"another kernel").hexdigest())
    (folder / RECORD.file).write_bytes(b"another kernel")
    with pytest.raises(CubinError, match=f"the cubin of {SPEC.name} is damaged"):
        Library(folder, Driver()).load(RECORD, SPEC.name, 0)
    (folder / FILE_NAME).write_bytes(newer.to_text().encode())
    with pytest.raises(CubinError, match=r"holds kernels of another sage_aot: .*got \('9.9.9'"):
        Library(folder).manifest
    (folder / RECORD.file).write_bytes(CUBIN)
    mixed = manifest_of([other, ATTENTION])
    (folder / FILE_NAME).write_bytes(mixed.to_text().encode())
    library = Library(folder, Driver())
    with pytest.raises(CubinError, match="is damaged"):
        library.load(library.manifest.kernels[SPEC.name], SPEC.name, 0)


# --- loading ----------------------------------------------------------------------------------------------------------


class Driver:
    """Loads anything unless `failing`; records its calls."""

    name, version, cuda = "fake", "1", 12000

    def __init__(self):
        self.loaded, self.failing = [], False

    def load(self, *arguments):
        if self.failing:
            raise OSError("CUDA_ERROR_INVALID_IMAGE: bad image")
        self.loaded.append(arguments)
        return object()


@pytest.fixture
def driver():
    return Driver()


def test_a_kernel_is_loaded_once_a_device(folder, driver):
    library = Library(folder, driver)
    functions = [library.load(RECORD, SPEC.name, device) for device in (0, 0, 1, 1)]
    assert functions[0] is functions[1] and functions[2] is functions[3] and functions[0] is not functions[2]
    assert driver.loaded == [(device, CUBIN, SPEC.name, RECORD.fact("threads"), RECORD.fact("shared_bytes"), False)
                             for device in (0, 1)]


def test_a_kernel_is_loaded_for_the_threads_and_the_memory_that_it_says(folder, driver):
    record = dataclasses.replace(RECORD, facts={"threads": 384.0, "shared_bytes": 213088.0})
    Library(folder, driver).load(record, SPEC.name, 0)
    assert driver.loaded == [(0, CUBIN, SPEC.name, 384, 213088, False)]
    assert [type(number) for number in driver.loaded[0][3:]] == [int, int, bool]


@pytest.mark.parametrize("says", [0.0, 1.0])
def test_a_kernel_that_waits_for_the_grids_before_it_may_start_early(folder, driver, says):
    record = dataclasses.replace(RECORD, facts={**RECORD.facts, "programmatic_launch": says})
    Library(folder, driver).load(record, SPEC.name, 0)
    assert driver.loaded[0][5] is bool(says)


def test_threads_load_a_kernel_once(folder, driver):
    library, found = Library(folder, driver), []
    meet = threading.Barrier(8)

    def work():
        meet.wait()
        found.append(library.load(RECORD, SPEC.name, 0))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(driver.loaded) == 1 and len(found) == 8 and len(set(map(id, found))) == 1


def test_what_the_driver_refuses_names_the_kernel(folder, driver):
    library = Library(folder, driver)
    driver.failing = True
    with pytest.raises(LaunchError, match=rf"does not load {SPEC.name} \(built for sm_80\) on device 3: "
                                          "CUDA_ERROR_INVALID_IMAGE"):
        library.load(RECORD, SPEC.name, 3)
    driver.failing = False
    library.load(RECORD, SPEC.name, 3)  # a failure is not kept


def test_a_driver_below_a_kernels_floor_is_refused_before_it_sees_the_file(folder, driver):
    library, demanding = Library(folder, driver), dataclasses.replace(RECORD, least_driver=570, file="not there.cubin")
    with pytest.raises(UnsupportedError, match=rf"the driver of device 0 is too old for {SPEC.name}: it needs a driver "
                                               r"from 570 on \(CUDA 12.8\), this one is for CUDA 12.0; update it"):
        library.load(demanding, SPEC.name, 0)
    driver.cuda = 12080
    with pytest.raises(CubinError, match="is missing"):
        library.load(demanding, SPEC.name, 0)


def test_a_library_without_a_driver_of_its_own_takes_that_of_the_process(folder, monkeypatch):
    monkeypatch.setenv("SAGE_AOT_LOADER", "none of them")
    with pytest.raises(UnsupportedError, match="SAGE_AOT_LOADER: expected one of"):
        Library(folder).load(RECORD, SPEC.name, 0)
    assert Library(folder, driver := Driver()).driver is driver


def test_an_entry_that_nobody_here_can_read_is_refused_by_its_name(folder):
    """The entry has a size that only another sage_aot knows. Entries are read when they are asked for."""
    values = json.loads((folder / FILE_NAME).read_text())
    values.pop("sha256")
    entry = next(row for row in values["kernels"] if row["spec"] == SPEC.name)
    entry["tile" if "tile" in entry else "machine"]["split_k"] = 2
    (folder / FILE_NAME).write_bytes(sealed_text(values).encode())
    manifest = Library(folder).manifest
    with pytest.raises(CubinError, match=f"the manifest's entry of {SPEC.name} is not one of this sage_aot .*split_k"):
        manifest.kernels[SPEC.name]
    with pytest.raises(KeyError):
        manifest.kernels["sage_delta_sm89_d32"]
