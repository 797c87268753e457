"""The CUDA driver through its own library and ctypes: a loader that needs the driver and the standard library alone."""

from __future__ import annotations

import ctypes
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from sage_aot._kernels.drivers import driver_library
from sage_aot.errors import UnsupportedError

MAX_DYNAMIC_SHARED_SIZE_BYTES = 8  # CUfunction_attribute
_PROGRAMMATIC_STREAM_SERIALIZATION = 6  # CUlaunchAttributeID
PROGRAMMATIC = 12030
"""The first CUDA whose graphs capture programmatic dependent launches: 12.3."""

_FUNCTIONS = ("cuInit", "cuDriverGetVersion", "cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuCtxGetCurrent",
              "cuCtxPushCurrent_v2", "cuCtxPopCurrent_v2", "cuModuleLoadData", "cuModuleGetFunction",
              "cuFuncSetAttribute", "cuLaunchKernelEx", "cuGetErrorName", "cuGetErrorString")
"""The library's functions that are called; the last to come, cuLaunchKernelEx, is there from CUDA 11.8 on."""


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute of cuda.h; the value is a union of 64 bytes."""

    _fields_ = [("id", ctypes.c_int), ("unused", ctypes.c_int), ("value", ctypes.c_int * 16)]


class _Config(ctypes.Structure):
    """CUlaunchConfig of cuda.h."""

    _fields_ = [*((name, ctypes.c_uint) for name in ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z",
                                                     "shared_bytes")),
                ("stream", ctypes.c_void_p), ("attributes", ctypes.POINTER(_Attribute)),
                ("num_attributes", ctypes.c_uint)]


class LibraryDriver:
    """Driver through its own library; UnsupportedError where the library is missing or too old."""

    name = "ctypes"

    def __init__(self) -> None:
        self._library = _load()
        self.version: str = platform.python_version()
        self._contexts: dict[int, int] = {}  # by device
        cuda = ctypes.c_int()
        try:
            self._call("cuDriverGetVersion", ctypes.byref(cuda))
        except RuntimeError as error:
            raise UnsupportedError(f"the driver does not tell its version ({error}): install or update the NVIDIA "
                                   f"driver") from error
        self.cuda: int = cuda.value

    def load(self, device: int, image: bytes, entry: str, threads: int, shared_bytes: int,
             programmatic: bool = False) -> DriverFunction:
        """See :meth:`sage_aot._backends.drivers.Driver.load`."""
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        with self.entered(self.context(device)):
            self._call("cuModuleLoadData", ctypes.byref(module), image)  # Python ends bytes in a zero, as PTX must
            self._call("cuModuleGetFunction", ctypes.byref(function), module, entry.encode())
            self._call("cuFuncSetAttribute", function, MAX_DYNAMIC_SHARED_SIZE_BYTES, shared_bytes)
        return DriverFunction(self, function, threads, shared_bytes, programmatic and self.cuda >= PROGRAMMATIC)

    def context(self, device: int) -> int:
        """See :meth:`sage_aot._backends.drivers.Driver.context`; it is retained for the life of the process."""
        if device not in self._contexts:
            handle, context = ctypes.c_int(), ctypes.c_void_p()
            self._call("cuInit", 0)  # no sooner: a process that forks afterwards has no CUDA in its children
            self._call("cuDeviceGet", ctypes.byref(handle), device)
            self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), handle)
            self._contexts[device] = context.value or 0
        return self._contexts[device]

    def current(self) -> int:
        """Current context of this thread, 0 where it has none, or where the driver says why not when it is entered."""
        context = ctypes.c_void_p()
        status = self._library.cuCtxGetCurrent(ctypes.byref(context))
        return 0 if status else context.value or 0

    @contextmanager
    def entered(self, context: int) -> Iterator[None]:
        """Makes a context current on this thread; on exit, makes the earlier context current again."""
        self._call("cuCtxPushCurrent_v2", ctypes.c_void_p(context))
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def launcher(self, function: ctypes.c_void_p, blocks: int, threads: int, shared_bytes: int, pointers: int,
                 programmatic: bool) -> Any:
        """A launcher of one function, on a CUlaunchConfig of which launches change only the stream."""
        attribute = _Attribute(_PROGRAMMATIC_STREAM_SERIALIZATION, 0, (1,))
        config = _Config(blocks, 1, 1, threads, 1, 1, shared_bytes, None, ctypes.pointer(attribute), int(programmatic))
        launch_kernel, described = self._library.cuLaunchKernelEx, self._described
        arguments = ctypes.byref(config), function, ctypes.c_void_p(pointers), None

        def launch(stream: int) -> None:
            config.stream = stream
            if status := launch_kernel(*arguments):
                raise RuntimeError(described(status))

        return launch

    def _call(self, name: str, *arguments: object) -> None:
        """Call a function of the library; RuntimeError for a status that is an error."""
        if status := getattr(self._library, name)(*arguments):
            raise RuntimeError(self._described(status))

    def _described(self, status: int) -> str:
        """An error's name and text, in cupy's format."""
        texts = []
        for ask in (self._library.cuGetErrorName, self._library.cuGetErrorString):
            text = ctypes.c_char_p()
            if not ask(status, ctypes.byref(text)) and text.value:
                texts.append(text.value.decode())
        return ": ".join(texts) or f"CUDA error {status}"


class DriverFunction(NamedTuple):
    """A kernel on a device, of a driver that makes launchers."""

    driver: Any
    function: Any
    threads: int
    shared_bytes: int
    programmatic: bool

    def bind(self, blocks: int, pointers: int) -> Any:
        """See :meth:`sage_aot._backends.drivers.Function.bind`."""
        return self.driver.launcher(self.function, blocks, self.threads, self.shared_bytes, pointers,
                                    self.programmatic)


def _load() -> Any:
    """The driver's library; UnsupportedError where it is missing, or older than its functions that are called."""
    name = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
    try:
        library = driver_library(name)
    except OSError as error:
        raise UnsupportedError(f"the driver's library {name} does not load ({error}): install or update the NVIDIA "
                               f"driver") from error
    for function in _FUNCTIONS:
        if not hasattr(library, function):
            raise UnsupportedError(f"the driver's library {name} has no {function}: update the driver, at least to 525")
    return library
