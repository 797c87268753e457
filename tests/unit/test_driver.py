"""Both ways to the driver: cupy as a stand-in that remembers what it is told; cuda-bindings itself, on a library that
stands in for the driver's (fake_driver.c)."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from sage_aot import _driver
from sage_aot._driver import CUDA_OF_DRIVER, CupyDriver, cuda_of, cuda_text, default_driver, too_old
from sage_aot._loader import default_library
from sage_aot.errors import UnsupportedError

HERE = Path(__file__).parent
PARAMS = bytes(range(7)) + b"\0\0struct"


@pytest.fixture(autouse=True)
def asked_again(monkeypatch):
    """Each test finds a process that has asked for no driver yet, and an environment that names none."""
    monkeypatch.delenv("SAGE_AOT_LOADER", raising=False)
    _driver._driver.cache_clear()
    yield
    _driver._driver.cache_clear()


def install_cupy(monkeypatch, built=12090, driver=13000):
    """A cupy that launches nothing; comes back as the list of what it is told."""
    told = []

    class Module:
        def load(self, image):
            told.append(("load", image))

        def get_function(self, entry):
            return Function(entry)

    class Function:
        def __init__(self, entry):
            self.entry, self.ptr = entry, 77

        def __call__(self, grid, block, arguments, shared_bytes, stream):
            told.append((self.entry, grid, block, [a.tobytes() for a in arguments], [a.size for a in arguments],
                         shared_bytes, stream.ptr))

    runtime = SimpleNamespace(runtimeGetVersion=lambda: built, driverGetVersion=lambda: driver)
    cuda = SimpleNamespace(runtime=runtime, function=SimpleNamespace(Module=Module))
    api = ModuleType("cupy_backends.cuda.api")
    api.driver = SimpleNamespace(funcSetAttribute=lambda *arguments: told.append(("attribute", *arguments)))
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda, __version__="14.2.0"))
    monkeypatch.setitem(sys.modules, "cupy_backends.cuda.api", api)
    return told


class Bindings:
    """In the place of cuda-bindings where a test is about the choice."""

    name, version, cuda = "cuda-bindings", "13.0.3", 12080


# --- which of the two -------------------------------------------------------------------------------------------------


def test_cupy_comes_first(monkeypatch):
    install_cupy(monkeypatch)
    monkeypatch.setitem(_driver.DRIVERS, "cuda-bindings", Bindings)
    driver = default_driver()
    assert (driver.name, driver.version, driver.cuda) == ("cupy", "14.2.0", 13000)
    assert default_driver() is driver


def test_cuda_bindings_where_cupy_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setitem(_driver.DRIVERS, "cuda-bindings", Bindings)
    assert isinstance(default_driver(), Bindings)


def test_cuda_bindings_where_cupy_is_for_a_newer_driver(monkeypatch):
    install_cupy(monkeypatch, built=13000, driver=12080)
    monkeypatch.setitem(_driver.DRIVERS, "cuda-bindings", Bindings)
    assert isinstance(default_driver(), Bindings)


def test_neither_names_both_and_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(UnsupportedError, match=r"launched through cupy or cuda-bindings; cupy cannot be imported .*: "
                                               r"`pip install 'sage-aot\[cuda12\]'`, .*; cuda-bindings cannot be "
                                               r"imported .*: `pip install cuda-bindings`$"):
        default_driver()


@pytest.mark.parametrize("asked", ["cupy", "cuda-bindings"])
def test_the_environment_decides(monkeypatch, asked):
    install_cupy(monkeypatch)
    monkeypatch.setitem(_driver.DRIVERS, "cuda-bindings", Bindings)
    monkeypatch.setenv("SAGE_AOT_LOADER", asked)
    assert default_driver().name == asked


def test_what_the_environment_asks_for_has_no_substitute(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setitem(_driver.DRIVERS, "cuda-bindings", Bindings)
    monkeypatch.setenv("SAGE_AOT_LOADER", "cupy")
    with pytest.raises(UnsupportedError, match="SAGE_AOT_LOADER is cupy; cupy cannot be imported"):
        default_driver()


def test_an_unknown_loader_is_refused(monkeypatch):
    monkeypatch.setenv("SAGE_AOT_LOADER", "pycuda")
    with pytest.raises(UnsupportedError, match="SAGE_AOT_LOADER: expected one of cupy, cuda-bindings; got 'pycuda'"):
        default_driver()


# --- versions ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("built", "driver", "advice"), [
    (13000, 12090, r"the driver is for CUDA 12.9: update the driver, or uninstall this cupy and .*sage-aot\[cuda12\]"),
    (12090, 11080, "the driver is for CUDA 11.8: update the driver, at least to 525$"),
    (13000, 11080, "the driver is for CUDA 11.8: update the driver, at least to 525$"),
    (12090, 0, "there is no driver: install or update the NVIDIA driver$"),
])
def test_a_cupy_for_a_newer_cuda_than_the_drivers_says_what_to_install(monkeypatch, built, driver, advice):
    install_cupy(monkeypatch, built, driver)
    with pytest.raises(UnsupportedError, match=rf"built for CUDA {built // 1000}\.{built % 1000 // 10}, but {advice}"):
        CupyDriver()


@pytest.mark.parametrize("driver", [12020, 12090, 13000])
def test_a_cupy_for_the_drivers_cuda_or_an_older_one_is_taken(monkeypatch, driver):
    install_cupy(monkeypatch, 12090, driver)
    assert CupyDriver().cuda == driver


@pytest.mark.parametrize(("driver", "cuda"), [
    (470, 0), (525, 12000), (534, 12010), (535, 12020), (570, 12080), (575, 12090), (580, 13000), (585, 13000),
    (999, 13010)])
def test_the_cuda_of_a_driver_is_that_of_its_branch(driver, cuda):
    assert cuda_of(driver) == cuda


def test_floors():
    assert too_old(12000, 525) is None and too_old(13000, 525) is None and too_old(13000, 580) is None
    assert too_old(11080, 525) == "it needs a driver from 525 on (CUDA 12.0), this one is for CUDA 11.8"
    assert too_old(12090, 580) == "it needs a driver from 580 on (CUDA 13.0), this one is for CUDA 12.9"
    assert cuda_text(12090) == "12.9" and cuda_text(13000) == "13.0"


def test_every_floor_of_the_package_is_a_branch_in_the_table():
    assert {record.least_driver for record in default_library().manifest.kernels.values()} <= set(CUDA_OF_DRIVER)
    assert sorted(CUDA_OF_DRIVER.items()) == list(CUDA_OF_DRIVER.items())
    assert sorted(CUDA_OF_DRIVER.values()) == list(CUDA_OF_DRIVER.values())


# --- cupy -------------------------------------------------------------------------------------------------------------


def test_cupy_loads_bytes_and_takes_the_struct_by_value(monkeypatch):
    told = install_cupy(monkeypatch)
    launch = CupyDriver().load(0, b"an image", "entry", 128, 50000)
    assert told == [("load", b"an image"), ("attribute", 77, 8, 50000)]  # 8: MAX_DYNAMIC_SHARED_SIZE_BYTES
    launch(77, 0xDEAD, PARAMS)
    assert told[-1] == ("entry", (77, 1, 1), (128, 1, 1), [PARAMS], [1], 50000, 0xDEAD)


# --- cuda-bindings ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """What on_fake_driver.py saw."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if sys.platform != "linux" or compiler is None:
        pytest.skip("the library that stands in for the driver's needs Linux and a C compiler")
    folder = tmp_path_factory.mktemp("driver")
    subprocess.run([compiler, "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", "-Wl,-soname,libcuda.so.1", "-o",
                    folder / "libcuda.so.1", HERE / "fake_driver.c"], check=True)
    environment = {**os.environ, "LD_LIBRARY_PATH": str(folder), "SAGE_AOT_LOADER": "cuda-bindings"}
    done = subprocess.run([sys.executable, HERE / "on_fake_driver.py"], env=environment, capture_output=True, text=True,
                          check=False, cwd=HERE.parents[1])
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_bindings_know_the_driver(seen):
    name, version, cuda = seen["driver"]
    assert (name, cuda) == ("cuda-bindings", 12090) and version.split(".")[0] in ("12", "13")


def test_bindings_launch_as_they_are_told(seen):
    assert seen["bound"] == "first on 0: grid 77 1 1, block 128 1 1, 50000 bytes, stream 0xdead"
    assert seen["params"]


def test_bindings_launch_on_their_device_whatever_the_thread_was_bound_to(seen):
    assert seen["unbound"] == "first on 0: grid 78 1 1, block 128 1 1, 50000 bytes, stream 0"
    assert seen["bound to another"] == ("second on 1: grid 2147483647 1 1, block 256 1 1, 0 bytes, stream "
                                        "0x8000000000000000")
    assert seen["contexts left"] == [0, 0] and seen["contexts left by errors"] == 0
    assert seen["contexts retained"] == 2  # once a device


def test_bindings_give_ptx_the_zero_it_must_end_in(seen):
    assert seen["zero behind the image"] == 1


def test_bindings_name_errors_of_the_driver(seen):
    assert seen["bad image"] == "CUDA_ERROR_INVALID_IMAGE: device kernel image is invalid"
    assert seen["bad entry"] == "CUDA_ERROR_NOT_FOUND"
    assert seen["no such device"].startswith("CUDA_ERROR_INVALID_VALUE")
    assert seen["bad launch"] == seen["bad launch, unbound"] == "CUDA_ERROR_ILLEGAL_ADDRESS"
