"""Both loaders: cupy is a stand-in that records calls; cuda-bindings is the real package, on a library that stands in
for the driver's (fake_driver.c)."""

from __future__ import annotations

import ctypes
import json
import os
import platform
import subprocess
import sys
import threading
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import sage_aot
from sage_aot._backends import drivers, library_driver
from sage_aot._backends.cuda.queue import Bound, Queue
from sage_aot._backends.cupy_driver import CupyDriver
from sage_aot._backends.distribution import DRIVERS
from sage_aot._backends.drivers import default_driver
from sage_aot._call.backends import default_library
from sage_aot._kernels.drivers import CUDA_OF_DRIVER, cuda_of, cuda_text, too_old
from sage_aot._launch.structs import NO_SOURCE, SOURCES, Packed
from sage_aot.errors import LaunchError, UnsupportedError

HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def asked_again(monkeypatch):
    """Each test runs as in a process that has asked for no driver yet, with an environment that names none."""
    monkeypatch.delenv("SAGE_AOT_LOADER", raising=False)
    drivers._driver.cache_clear()
    yield
    drivers._driver.cache_clear()


USED_OF_CUPY = {"launchKernel", "ctxGetCurrent", "ctxSetCurrent"}
"""Functions of cupy that are called after a kernel is loaded; cupy's documentation names none of them."""

STRUCT_BYTES = 16


def install_cupy(monkeypatch, built=12090, driver=13000, refused=""):
    """Install a cupy that launches nothing. Contexts are numbers from 100 on, one a device. Returns the list of its
    calls, in order, and a dictionary of each thread's context. `refused`: a kernel that it does not launch."""
    told, entries, contexts = [], [], {}

    class Module:
        def load(self, image):
            told.append(("load", image))

        def get_function(self, entry):
            entries.append(entry)
            return SimpleNamespace(ptr=76 + len(entries))

    def launch(function, *configuration):
        *others, pointers, extra = configuration
        if entries[function - 77] == refused:
            raise OSError("CUDA_ERROR_LAUNCH_FAILED: bad launch")
        pointer = ctypes.c_void_p.from_address(pointers)
        told.append((entries[function - 77], *others, ctypes.string_at(pointer.value, STRUCT_BYTES), extra,
                     contexts.get(threading.get_ident(), 0)))

    def enter(context):
        contexts[threading.get_ident()] = context

    runtime = SimpleNamespace(runtimeGetVersion=lambda: built, driverGetVersion=lambda: driver,
                              setDevice=lambda device: enter(100 + device))
    cuda = SimpleNamespace(runtime=runtime, function=SimpleNamespace(Module=Module))
    api: Any = ModuleType("cupy_backends.cuda.api")
    api.driver = SimpleNamespace(
        funcSetAttribute=lambda *arguments: told.append(("attribute", *arguments)), launchKernel=launch,
        ctxGetCurrent=lambda: contexts.get(threading.get_ident(), 0), ctxSetCurrent=enter)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda, __version__="14.2.0"))
    monkeypatch.setitem(sys.modules, "cupy_backends.cuda.api", api)
    return told, contexts


def in_a_thread(work):
    results = []
    thread = threading.Thread(target=lambda: results.append(work()))
    thread.start()
    thread.join()
    return results[0]


class Bindings:
    """Replaces BindingsDriver in tests of the choice between loaders."""

    name, version, cuda = "cuda-bindings", "13.0.3", 12080


# --- which of the two -------------------------------------------------------------------------------------------------


def test_cupy_comes_first(monkeypatch):
    install_cupy(monkeypatch)
    monkeypatch.setitem(DRIVERS, "cuda-bindings", Bindings)
    driver = default_driver()
    assert (driver.name, driver.version, driver.cuda) == ("cupy", "14.2.0", 13000)
    assert default_driver() is driver


def test_cuda_bindings_where_cupy_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setitem(DRIVERS, "cuda-bindings", Bindings)
    assert isinstance(default_driver(), Bindings)


def test_cuda_bindings_where_cupy_is_for_a_newer_driver(monkeypatch):
    install_cupy(monkeypatch, built=13000, driver=12080)
    monkeypatch.setitem(DRIVERS, "cuda-bindings", Bindings)
    assert isinstance(default_driver(), Bindings)


def test_none_names_all_and_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    message = (r"launched through cupy, cuda-bindings or ctypes; cupy cannot be imported .*: `pip install "
               r"'sage-aot\[cuda12\]'`, .*; cuda-bindings cannot be imported .*: `pip install cuda-bindings`; the "
               r"driver's library (libcuda.so.1|nvcuda.dll) does not load .*: install or update the NVIDIA driver$")
    with pytest.raises(UnsupportedError, match=message):
        default_driver()


def stand_in_library(monkeypatch, functions, *, platform="linux"):
    """The driver's library of a platform, with these functions, each of which succeeds."""
    opened = []
    library = SimpleNamespace(**{name: lambda *arguments: 0 for name in functions})
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(ctypes, "WinDLL" if platform == "win32" else "CDLL",
                        lambda name, **how: opened.append((name, how)) or library, raising=False)
    monkeypatch.delattr(ctypes, "CDLL" if platform == "win32" else "WinDLL", raising=False)
    return opened


@pytest.mark.parametrize(("platform", "opens"), [
    ("linux", ("libcuda.so.1", {})), ("win32", ("nvcuda.dll", {"winmode": 0x800}))])  # LOAD_LIBRARY_SEARCH_SYSTEM32
def test_the_library_where_neither_package_is_there(monkeypatch, platform, opens):
    """Windows has another calling convention, and looks in its system folder alone."""
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    opened = stand_in_library(monkeypatch, library_driver._FUNCTIONS, platform=platform)
    assert isinstance(default_driver(), library_driver.LibraryDriver) and opened == [opens]


def test_a_missing_library_is_named_with_what_windows_says(monkeypatch):
    def refuse(name, **how):
        raise FileNotFoundError(f"Could not find module '{name}' (or one of its dependencies)")

    stand_in_library(monkeypatch, (), platform="win32")
    monkeypatch.setattr(ctypes, "WinDLL", refuse, raising=False)
    message = "driver's library nvcuda.dll does not load .Could not find module .*install or update the NVIDIA driver$"
    with pytest.raises(UnsupportedError, match=message):
        library_driver.LibraryDriver()


def test_structs_of_the_library_have_one_layout_on_all_platforms():
    """No type of C whose size differs between Windows and Linux, as long does; the sizes are those of cuda.h."""
    sized = {ctypes.c_int, ctypes.c_uint, ctypes.c_void_p, ctypes.c_int * 16, ctypes.POINTER(library_driver._Attribute)}
    for struct in (library_driver._Attribute, library_driver._Config):
        assert {kind for _, kind in struct._fields_} <= sized
    assert ctypes.sizeof(library_driver._Attribute) == 72 and ctypes.sizeof(library_driver._Config) == 56
    assert (library_driver._Config.stream.offset, library_driver._Config.attributes.offset) == (32, 40)


def test_an_old_library_is_refused_by_name(monkeypatch):
    stand_in_library(monkeypatch, [name for name in library_driver._FUNCTIONS if name != "cuLaunchKernelEx"])
    message = "libcuda.so.1 has no cuLaunchKernelEx: update the driver, at least to 525"
    with pytest.raises(UnsupportedError, match=message):
        library_driver.LibraryDriver()


@pytest.mark.parametrize("asked", ["cupy", "cuda-bindings"])
def test_the_environment_decides(monkeypatch, asked):
    install_cupy(monkeypatch)
    monkeypatch.setitem(DRIVERS, "cuda-bindings", Bindings)
    monkeypatch.setenv("SAGE_AOT_LOADER", asked)
    assert default_driver().name == asked


def test_what_the_environment_asks_for_has_no_substitute(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setitem(DRIVERS, "cuda-bindings", Bindings)
    monkeypatch.setenv("SAGE_AOT_LOADER", "cupy")
    with pytest.raises(UnsupportedError, match="SAGE_AOT_LOADER is cupy; cupy cannot be imported"):
        default_driver()


def test_an_unknown_loader_is_refused(monkeypatch):
    monkeypatch.setenv("SAGE_AOT_LOADER", "pycuda")
    message = "SAGE_AOT_LOADER: expected one of cupy, cuda-bindings, ctypes; got 'pycuda'"
    with pytest.raises(UnsupportedError, match=message):
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


def test_cupy_loads_bytes_and_reads_the_struct_in_each_launch(monkeypatch):
    told, _ = install_cupy(monkeypatch)
    function = CupyDriver().load(0, b"an image", "entry", 128, 50000)
    assert told == [("load", b"an image"), ("attribute", 77, 8, 50000)]  # 8: MAX_DYNAMIC_SHARED_SIZE_BYTES
    data = ctypes.create_string_buffer(b"\0struct\0 of sixteen"[:STRUCT_BYTES], STRUCT_BYTES)
    pointer = ctypes.c_void_p(ctypes.addressof(data))
    launch = function.bind(7, ctypes.addressof(pointer))
    for stream in (0xDEAD, 0):
        data[0] = bytes([stream & 0xFF])
        launch(stream)
        assert told[-1] == ("entry", 7, 1, 1, 128, 1, 1, 50000, stream, data.raw, 0, 0)


def cupy_queue(monkeypatch, refused=""):
    """A queue of two launches for device 1 on cupy's driver, the list of cupy's calls, and the threads' contexts."""
    told, contexts = install_cupy(monkeypatch, refused=refused)
    driver = CupyDriver()
    bound = [Bound(SimpleNamespace(name=name), driver.load(1, b"", name, 32, 0), blocks,
                    Packed(bytes([blocks] * 16), bytes([NO_SOURCE, SOURCES.index("out")])))
             for blocks, name in ((1, "first"), (2, "second"))]
    queue = Queue(bound, driver, 1, driver.context(1))
    told.clear()
    return lambda: queue(9, *range(1, len(SOURCES) + 1)), told, contexts


def launched(told):
    """Kernel, blocks and context of each launch."""
    return [(entry, blocks, context) for entry, blocks, *_, context in told]


EXPECTED = [("first", 1, 101), ("second", 2, 101)]


def test_a_queue_on_cupy_runs_in_its_own_context_whatever_the_threads_is(monkeypatch):
    call, told, contexts = cupy_queue(monkeypatch)
    call()
    assert launched(told) == EXPECTED and contexts[threading.get_ident()] == 101
    address = int.from_bytes(bytes([1] * 8), "little") + SOURCES.index("out") + 1
    assert told[0][9] == bytes([1] * 8) + address.to_bytes(8, "little")
    for before in (0, 100):
        told.clear()

        def elsewhere(before=before):
            contexts[threading.get_ident()] = before
            call()
            return contexts[threading.get_ident()]

        assert in_a_thread(elsewhere) == before
        assert launched(told) == EXPECTED


def test_what_cupy_refuses_names_the_kernel_and_gives_the_context_back(monkeypatch):
    call, told, contexts = cupy_queue(monkeypatch, refused="second")
    contexts[threading.get_ident()] = 100
    with pytest.raises(LaunchError, match="^the driver does not launch second on device 1: CUDA_ERROR_L"):
        call()
    assert launched(told) == EXPECTED[:1] and contexts[threading.get_ident()] == 100


def test_the_installed_cupy_has_what_is_used_of_it(monkeypatch):
    """The stand-in has just the functions that are used, so that no test passes by a function that cupy lacks."""
    install_cupy(monkeypatch)
    stand_in = vars(sys.modules["cupy_backends.cuda.api"].driver)
    assert set(stand_in) == {*USED_OF_CUPY, "funcSetAttribute"}
    monkeypatch.undo()
    pytest.importorskip("cupy", exc_type=ImportError)
    from cupy_backends.cuda.api import driver

    assert {name for name in (*USED_OF_CUPY, "funcSetAttribute") if callable(getattr(driver, name, None))} == set(
        stand_in)


# --- cuda-bindings, ctypes --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["cuda-bindings", "ctypes"])
def loader(request):
    return request.param


@pytest.fixture(scope="module")
def seen(fake_driver, loader):
    """The output of on_fake_driver.py: the calls that the fake driver recorded."""
    environment = {**os.environ, "LD_LIBRARY_PATH": str(fake_driver), "SAGE_AOT_LOADER": loader,
                   "PYTHONPATH": str(Path(sage_aot.__file__).parents[1])}
    done = subprocess.run([sys.executable, HERE / "on_fake_driver.py"], env=environment, capture_output=True, text=True,
                          check=False, cwd=HERE.parents[1])
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_loaders_know_the_driver(seen, loader):
    name, version, cuda = seen["driver"]
    assert (name, cuda) == (loader, 12090)
    assert version.split(".")[0] in ("12", "13") if loader == "cuda-bindings" else version == platform.python_version()


def test_loaders_launch_as_they_are_told(seen):
    found = seen["launchers"]
    for launch in ("first", "second"):  # by another function of the driver each
        assert found[launch] == ["first on 0: grid 77 1 1, block 128 1 1, 50000 bytes, stream 0xdead"]
    assert found["params"] and found["params, read in each launch"]
    assert found["of the other device"] == ["second on 1: grid 2147483647 1 1, block 256 1 1, 0 bytes, stream "
                                            "0x8000000000000000"]


def test_loaders_launch_on_the_stream_of_each_launch(seen):
    assert seen["launchers"]["streams"] == ["0", "0x5", "0x5", "0x8000000000000000", "0"]


def test_a_kernel_starts_early_where_graphs_can_hold_that(seen, loader):
    """A kernel starts early through cuda-bindings from its second launch on: the first launch has no CUlaunchConfig."""
    first = "0" if loader == "cuda-bindings" else "0, programmatic"
    assert seen["programmatic launches"] == {"12020": ["0", "0x7", "0x7"],
                                             "12030": [first, "0x7, programmatic", "0x7, programmatic"]}


def test_loaders_launch_in_the_current_context_alone(seen):
    assert seen["launchers"]["unbound"] == "CUDA_ERROR_INVALID_CONTEXT"
    assert seen["launchers"]["bound to another"] == ["CUDA_ERROR_INVALID_HANDLE", True, 1]
    assert seen["contexts left"] == 0
    assert seen["contexts retained"] == 2  # once a device


QUEUED = ["first on 0: grid 77 1 1, block 128 1 1, 50000 bytes, stream 0xdead",
          "again on 0: grid 5 1 1, block 32 1 1, 0 bytes, stream 0xdead"]


def test_a_queue_launches_in_order_with_the_structs_of_the_call(seen):
    found = seen["queues"]
    assert found["on its thread"] == [[True, 1], QUEUED] and found["structs"] == [True, True]


def test_a_queue_gives_a_thread_its_context_back(seen):
    found = seen["queues"]
    assert found["without a context"] == [[0, 0], QUEUED]
    assert found["in another's"] == [[True, 1], QUEUED]


def test_a_launch_that_is_refused_names_the_kernel_and_the_next_call_works(seen):
    found, message = seen["queues"], "the driver does not launch again on device 0: CUDA_ERROR_ILLEGAL_ADDRESS"
    assert found["refused"] == [[message, True, 1], QUEUED[:1]]
    assert found["refused, without a context"] == [[message, 0, 0]]
    assert found["the next call"] == [[True, True], QUEUED]


def test_loaders_give_ptx_the_zero_it_must_end_in(seen):
    assert seen["zero behind the image"] == 1


def test_loaders_name_errors_of_the_driver(seen):
    assert seen["bad image"] == "CUDA_ERROR_INVALID_IMAGE: device kernel image is invalid"
    assert seen["bad entry"] == "CUDA_ERROR_NOT_FOUND"
    assert seen["no such device"].startswith("CUDA_ERROR_INVALID_VALUE")
