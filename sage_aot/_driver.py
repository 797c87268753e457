"""The CUDA driver, through cupy or through cuda-bindings: a cubin becomes a function, a function is launched.

The only module that imports either, and only when a GPU is first asked about. Which of the two makes no difference to
a kernel; cupy is taken first, cuda-bindings (which torch brings along on Linux) where cupy cannot be used.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Protocol

import numpy as np

from sage_aot.errors import UnsupportedError

CUDA_OF_DRIVER = {525: 12000, 530: 12010, 535: 12020, 545: 12030, 550: 12040, 555: 12050, 560: 12060, 565: 12070,
                  570: 12080, 575: 12090, 580: 13000, 590: 13010}
"""Per branch of the driver the CUDA that it is for, which is all that a process can ask the driver itself: 12090 is
12.9. Source: CUDA toolkit release notes, "CUDA Toolkit and Corresponding Driver Versions"."""

Function = Callable[[int, int, bytes], None]
"""A loaded kernel: blocks, raw stream handle, and the struct that it takes by value. Queues one launch."""

_CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8


class Driver(Protocol):
    """What loads and launches."""

    name: str  # as SAGE_AOT_LOADER spells it
    version: str  # of the package
    cuda: int  # that the driver is for: 12090 is 12.9

    def load(self, device: int, image: bytes, entry: str, threads: int, shared_bytes: int) -> Function:
        """The kernel `entry` of a cubin or of PTX, on a device, for blocks of so many threads and so much dynamic
        shared memory. The device must be torch's current one here and in every launch."""
        ...


class CupyDriver:
    """Through cupy; UnsupportedError where it is missing or made for a newer CUDA than the driver."""

    name = "cupy"

    def __init__(self) -> None:
        try:
            import cupy
        except ImportError as error:
            raise UnsupportedError(f"cupy cannot be imported ({error}): `pip install 'sage-aot[cuda12]'`, or [cuda13] "
                                   f"for drivers from 580 on") from error
        built, self.cuda = cupy.cuda.runtime.runtimeGetVersion(), cupy.cuda.runtime.driverGetVersion()
        if self.cuda // 1000 < built // 1000:
            raise UnsupportedError(f"cupy was built for CUDA {cuda_text(built)}, but {_too_old(self.cuda)}")
        self.version = cupy.__version__
        self._module = cupy.cuda.function.Module

    def load(self, device: int, image: bytes, entry: str, threads: int, shared_bytes: int) -> Function:
        from cupy_backends.cuda.api import driver

        module = self._module()
        module.load(image)
        function = module.get_function(entry)  # keeps its module
        # Above 48 KB a kernel must ask for dynamic shared memory, once per device.
        driver.funcSetAttribute(function.ptr, _CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, shared_bytes)
        block = (threads, 1, 1)

        def launch(blocks: int, stream: int, params: bytes) -> None:
            argument = np.frombuffer(params, f"V{len(params)}")  # one element: cupy passes it by value
            function((blocks, 1, 1), block, (argument,), shared_bytes, _RawStream(stream))

        return launch


class BindingsDriver:
    """Through cuda-bindings; UnsupportedError where it is missing, or a driver is."""

    name = "cuda-bindings"

    def __init__(self) -> None:
        try:
            from cuda import bindings
            from cuda.bindings import driver
        except ImportError as error:
            raise UnsupportedError(f"cuda-bindings cannot be imported ({error}): `pip install "
                                   f"cuda-bindings`") from error
        self._api, self.version = driver, bindings.__version__
        try:
            self.cuda = self._call(driver.cuDriverGetVersion)
        except RuntimeError as error:  # of cuda-bindings itself, where there is no library of a driver to call
            raise UnsupportedError(f"cuda-bindings finds no driver ({error}): install or update the NVIDIA "
                                   f"driver") from error
        self._contexts: dict[int, object] = {}  # by device

    def load(self, device: int, image: bytes, entry: str, threads: int, shared_bytes: int) -> Function:
        api, context = self._api, self._context(device)
        with self._entered(context):
            module = self._call(api.cuModuleLoadData, image)
            function = self._call(api.cuModuleGetFunction, module, entry.encode())
            self._call(api.cuFuncSetAttribute, function,
                       api.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, shared_bytes)
        launch_kernel, current, own = api.cuLaunchKernel, api.cuCtxGetCurrent, int(context)

        def launch(blocks: int, stream: int, params: bytes) -> None:
            argument = ctypes.c_char_p(params)  # is what the driver wants: a list of pointers to arguments, of one
            arguments = (function, blocks, 1, 1, threads, 1, 1, shared_bytes, stream, ctypes.addressof(argument), 0)
            if int(current()[1]) == own:
                status, = launch_kernel(*arguments)
            else:  # a thread on which nothing has used the device yet, or one that uses another
                with self._entered(context):
                    status, = launch_kernel(*arguments)
            if status:
                raise RuntimeError(self._describe(status))

        return launch

    def _context(self, device: int) -> object:
        """The device's primary context, which torch uses too; retained for the life of the process."""
        if device not in self._contexts:
            self._call(self._api.cuInit, 0)
            handle = self._call(self._api.cuDeviceGet, device)
            self._contexts[device] = self._call(self._api.cuDevicePrimaryCtxRetain, handle)
        return self._contexts[device]

    @contextmanager
    def _entered(self, context: object) -> Iterator[None]:
        self._call(self._api.cuCtxPushCurrent, context)
        try:
            yield
        finally:
            self._call(self._api.cuCtxPopCurrent)

    def _call(self, function: Callable, *arguments: object) -> object:
        """What a function of the driver returns beside its status; RuntimeError for a status that is an error."""
        status, *values = function(*arguments)
        if status:
            raise RuntimeError(self._describe(status))
        return values[0] if values else None

    def _describe(self, status: object) -> str:
        """An error by its name and in words, as cupy spells them."""
        _, text = self._api.cuGetErrorString(status)
        return f"{status.name}: {text.decode()}" if text else status.name


DRIVERS = {driver.name: driver for driver in (CupyDriver, BindingsDriver)}


def default_driver() -> Driver:
    """What loads kernels in this process: what SAGE_AOT_LOADER names, else the first of DRIVERS that works here.

    UnsupportedError says why where none does, and what to install.
    """
    return _driver(os.environ.get("SAGE_AOT_LOADER") or None)


@lru_cache(maxsize=None)
def _driver(asked: str | None) -> Driver:
    if asked is not None and asked not in DRIVERS:
        raise UnsupportedError(f"SAGE_AOT_LOADER: expected one of {', '.join(DRIVERS)}; got {asked!r}")
    reasons = []
    for name in [asked] if asked else DRIVERS:
        try:
            return DRIVERS[name]()
        except UnsupportedError as error:
            reasons.append(str(error))
    head = f"SAGE_AOT_LOADER is {asked}" if asked else "kernels are launched through cupy or cuda-bindings"
    raise UnsupportedError(f"{head}; {'; '.join(reasons)}")


def too_old(cuda: int, least_driver: int) -> str | None:
    """Why a driver for this CUDA is too old for a floor such as 525, or None where it is not."""
    needed = cuda_of(least_driver)
    if cuda >= needed:
        return None
    return (f"it needs a driver from {least_driver} on (CUDA {cuda_text(needed)}), this one is for CUDA "
            f"{cuda_text(cuda)}")


def cuda_of(driver: int) -> int:
    """The CUDA of the newest branch in CUDA_OF_DRIVER up to this one; 0 for a driver older than all of them."""
    return max((cuda for branch, cuda in CUDA_OF_DRIVER.items() if branch <= driver), default=0)


def cuda_text(number: int) -> str:
    """12090 is 12.9."""
    return f"{number // 1000}.{number % 1000 // 10}"


def _too_old(cuda: int) -> str:
    """What a driver older than cupy's CUDA is for, and what to install in place of either."""
    if cuda == 0:
        return "there is no driver: install or update the NVIDIA driver"
    found = f"the driver is for CUDA {cuda_text(cuda)}"
    if cuda < 12000:
        return f"{found}: update the driver, at least to 525"
    return f"{found}: update the driver, or uninstall this cupy and `pip install 'sage-aot[cuda12]'`"


class _RawStream:
    """What cupy reads of a stream."""

    __slots__ = ("ptr",)

    def __init__(self, ptr: int) -> None:
        self.ptr = ptr
