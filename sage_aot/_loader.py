"""Cubins from a kernel folder onto devices, and launches, through cupy.

The only module that imports cupy, and only when a kernel is first loaded. A cubin is read and its sha256 compared
with the manifest's when it is loaded, once per device; the loaded function is kept for the life of the process.
"""

from __future__ import annotations

import hashlib
import os
import threading
from functools import cached_property, lru_cache
from pathlib import Path
from types import ModuleType

import numpy as np

from sage_aot._manifest import FILE_NAME, KernelRecord, Manifest
from sage_aot._params import layout_digest
from sage_aot._plan import Launch
from sage_aot._version import __version__
from sage_aot.errors import CubinError, LaunchError, UnsupportedError

KERNEL_FOLDER = Path(__file__).parent / "kernels"
"""Where a build puts the cubins that the package ships."""

_CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8
_REBUILD = "reinstall sage-aot, or in a source tree run `python -m codegen build`"


class Library:
    """The kernels of one folder. Safe under threads."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._functions: dict[tuple[int, str], object] = {}  # by device and file
        self._modules: list[object] = []  # a function lives as long as its module
        self._lock = threading.Lock()

    @cached_property
    def manifest(self) -> Manifest:
        """The folder's manifest; CubinError where it is missing or of another version."""
        try:
            manifest = Manifest.read(self.folder)
        except OSError as error:
            raise CubinError(f"no kernels: {self.folder / FILE_NAME} is missing; {_REBUILD}") from error
        except ValueError as error:
            raise CubinError(f"{error}; {_REBUILD}") from error
        built, expected = (manifest.version, manifest.structs), (__version__, layout_digest())
        if built != expected:
            raise CubinError(f"{self.folder} holds kernels of another sage_aot: expected version and structs "
                             f"{expected}, got {built}; {_REBUILD}")
        if not any(record.spec.kind == "attn" for record in manifest.kernels.values()):
            raise CubinError(f"{self.folder} holds no attention kernel; {_REBUILD}")
        return manifest

    def read(self, record: KernelRecord) -> bytes:
        """A cubin's bytes; CubinError where they are not those that the manifest names."""
        path = self.folder / record.file
        try:
            cubin = path.read_bytes()
        except OSError as error:
            raise CubinError(f"the cubin of {record.spec.name} is missing: {path}; {_REBUILD}") from error
        found = hashlib.sha256(cubin).hexdigest()
        if found != record.sha256:
            raise CubinError(f"the cubin of {record.spec.name} is damaged: {path} has sha256 {found}, the manifest "
                             f"says {record.sha256}; {_REBUILD}")
        return cubin

    def launch(self, launch: Launch, device: int, stream: int) -> None:
        """Queue one launch on a raw stream handle of a device, which must be the current one."""
        function = self._functions.get((device, launch.record.file)) or self._load(launch.record, device)
        params = np.frombuffer(launch.params, dtype=f"V{len(launch.params)}")  # one element: cupy passes it by value
        try:
            function((launch.blocks, 1, 1), (launch.record.threads, 1, 1), (params,), launch.record.shared_bytes,
                     _RawStream(stream))
        except Exception as error:  # cupy's errors have no common base: whatever it is, name the kernel
            raise LaunchError(f"the driver does not launch {launch.record.spec.name} on device {device}: "
                              f"{error}") from error

    def _load(self, record: KernelRecord, device: int) -> object:
        cupy = import_cupy()
        with self._lock:
            key = (device, record.file)
            if key in self._functions:
                return self._functions[key]
            cubin = self.read(record)
            try:
                module = cupy.cuda.function.Module()
                module.load(cubin)
                function = module.get_function(record.spec.name)
                _allow_shared_memory(function, record.shared_bytes)
            except Exception as error:  # cupy's errors have no common base: whatever it is, name the kernel
                raise LaunchError(f"the driver does not load {record.spec.name} (built for {record.target}) on device "
                                  f"{device}: {error}") from error
            self._modules.append(module)
            self._functions[key] = function
            return function


def default_library() -> Library:
    """The kernels that the package ships, or those of the folder that SAGE_AOT_KERNELS names."""
    return _library(os.environ.get("SAGE_AOT_KERNELS") or str(KERNEL_FOLDER))


def import_cupy() -> ModuleType:
    """cupy, or UnsupportedError that says what to install where it is missing or the driver is older than its CUDA."""
    try:
        import cupy
    except ImportError as error:
        raise UnsupportedError(f"kernels are launched through cupy, which cannot be imported ({error}); install it "
                               f"with `pip install 'sage-aot[cuda12]'`, or [cuda13] for drivers from 580 on") from error
    built, driver = cupy.cuda.runtime.runtimeGetVersion(), cupy.cuda.runtime.driverGetVersion()
    if driver // 1000 < built // 1000:
        raise UnsupportedError(f"kernels are launched through cupy, which was built for CUDA {_cuda_version(built)}, "
                               f"but {_too_old(driver)}")
    return cupy


def _too_old(driver: int) -> str:
    """What a driver older than cupy's CUDA is for, and what to install in place of either."""
    if driver == 0:
        return "there is no driver; install or update the NVIDIA driver"
    found = f"the driver is for CUDA {_cuda_version(driver)}"
    if driver < 12000:
        return f"{found}; update the driver, at least to 525"
    return f"{found}; update the driver, or uninstall this cupy and `pip install 'sage-aot[cuda12]'`"


def _cuda_version(number: int) -> str:
    """12090 is 12.9."""
    return f"{number // 1000}.{number % 1000 // 10}"


@lru_cache(maxsize=None)
def _library(folder: str) -> Library:
    return Library(Path(folder))


def _allow_shared_memory(function: object, num_bytes: int) -> None:
    """Above 48 KB a kernel must ask for dynamic shared memory, once per device."""
    from cupy_backends.cuda.api import driver

    driver.funcSetAttribute(function.ptr, _CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, num_bytes)


class _RawStream:
    """What cupy reads of a stream."""

    __slots__ = ("ptr",)

    def __init__(self, ptr: int) -> None:
        self.ptr = ptr
