"""The CUDA driver, through cupy, cuda-bindings or its own library: a cubin becomes a function, a function is launched.

No other module imports cupy or cuda-bindings. This module imports one when a GPU is first asked about: cupy, or
cuda-bindings (which torch installs on Linux) where cupy cannot be used. Where neither can, library_driver.py calls the
driver's library. The results are the same through all three.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any, NamedTuple, Protocol

from sage_aot._backends.library_driver import (
    MAX_DYNAMIC_SHARED_SIZE_BYTES,
    PROGRAMMATIC,
    DriverFunction,
    LibraryDriver,
)
from sage_aot._kernels.drivers import cuda_text
from sage_aot.errors import UnsupportedError

Launcher = Callable[[int], None]
"""Queues one launch on a raw stream handle, in the current context. Threads must not share a launcher."""


class Function(Protocol):
    """A kernel on a device."""

    def bind(self, blocks: int, pointers: int) -> Launcher:
        """A launcher of grids of so many blocks with a struct, which the driver reads at each launch. `pointers`: the
        address of one pointer to that struct. Keep pointer and struct alive as long as the launcher."""
        ...


class Driver(Protocol):
    """A loader and launcher of kernels."""

    name: str  # as SAGE_AOT_LOADER spells it
    version: str  # of the package
    cuda: int  # CUDA version of the GPU's driver: 12090 is 12.9

    def load(self, device: int, image: bytes, entry: str, threads: int, shared_bytes: int,
             programmatic: bool = False) -> Function:
        """Load the kernel `entry` of a cubin or of PTX on a device, which must be torch's current one, for blocks of so
        many threads and so much dynamic shared memory. `programmatic`: launch with programmatic stream serialization
        where the driver supports it, so that the kernel may start before the kernel in front of it has ended."""
        ...

    def context(self, device: int) -> int:
        """The primary context of a device, which torch uses too. The device must be torch's current one."""
        ...

    def current(self) -> int:
        """This thread's current context, 0 where it has none."""
        ...

    def entered(self, context: int) -> AbstractContextManager[None]:
        """Makes a context current on this thread; on exit, makes the earlier context current again."""
        ...


# --- cupy -------------------------------------------------------------------------------------------------------------


class CupyDriver:
    """Through cupy; UnsupportedError where it is missing or made for a newer CUDA than the driver."""

    name = "cupy"

    def __init__(self) -> None:
        try:
            import cupy
            from cupy_backends.cuda.api import driver
        except ImportError as error:
            raise UnsupportedError(f"cupy cannot be imported ({error}): `pip install 'sage-aot[cuda12]'`, or [cuda13] "
                                   f"for drivers from 580 on") from error
        self.cuda: int = cupy.cuda.runtime.driverGetVersion()
        built = cupy.cuda.runtime.runtimeGetVersion()
        if self.cuda // 1000 < built // 1000:
            raise UnsupportedError(f"cupy was built for CUDA {cuda_text(built)}, but {_too_old(self.cuda)}")
        self.version: str = cupy.__version__
        self._api, self._runtime, self._module = driver, cupy.cuda.runtime, cupy.cuda.function.Module
        self.current: Callable[[], int] = driver.ctxGetCurrent

    def load(self, device: int, image: bytes, entry: str, threads: int, shared_bytes: int,
             programmatic: bool = False) -> Function:
        """See :meth:`Driver.load`, but `programmatic` has no effect: cupy's launches take no attributes."""
        module = self._module()
        module.load(image)
        function = module.get_function(entry)  # keeps its module
        # Above 48 KB a kernel must ask for dynamic shared memory, once per device.
        self._api.funcSetAttribute(function.ptr, MAX_DYNAMIC_SHARED_SIZE_BYTES, shared_bytes)
        return _CupyFunction(self._api.launchKernel, function, threads, shared_bytes)

    def context(self, device: int) -> int:
        self._runtime.setDevice(device)  # torch's current one; makes its primary context current where none is yet
        return self.current()

    @contextmanager
    def entered(self, context: int) -> Iterator[None]:
        before = self.current()
        self._api.ctxSetCurrent(context)
        try:
            yield
        finally:
            self._api.ctxSetCurrent(before)


class _CupyFunction(NamedTuple):
    launch_kernel: Callable[..., None]
    function: Any
    threads: int
    shared_bytes: int

    def bind(self, blocks: int, pointers: int) -> Launcher:
        launch_kernel, _, threads, shared_bytes = self
        handle = self.function.ptr

        def launch(stream: int) -> None:
            launch_kernel(handle, blocks, 1, 1, threads, 1, 1, shared_bytes, stream, pointers, 0)

        return launch


# --- cuda-bindings ----------------------------------------------------------------------------------------------------


class BindingsDriver:
    """Through cuda-bindings; UnsupportedError where cuda-bindings or the driver is missing."""

    name = "cuda-bindings"

    def __init__(self) -> None:
        try:
            from cuda import bindings
            from cuda.bindings import driver
        except ImportError as error:
            raise UnsupportedError(f"cuda-bindings cannot be imported ({error}): `pip install "
                                   f"cuda-bindings`") from error
        self._api: Any = driver
        self._get_current = driver.cuCtxGetCurrent
        self.version: str = bindings.__version__
        try:
            self.cuda: int = self._call(driver.cuDriverGetVersion)
        except RuntimeError as error:  # raised by cuda-bindings itself where libcuda is missing
            raise UnsupportedError(f"cuda-bindings finds no driver ({error}): install or update the NVIDIA "
                                   f"driver") from error
        self._contexts: dict[int, int] = {}  # by device

    def load(self, device: int, image: bytes, entry: str, threads: int, shared_bytes: int,
             programmatic: bool = False) -> Function:
        with self.entered(self.context(device)):
            module = self._call(self._api.cuModuleLoadData, image)
            function = self._call(self._api.cuModuleGetFunction, module, entry.encode())
            self._call(self._api.cuFuncSetAttribute, function,
                       self._api.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, shared_bytes)
        return DriverFunction(self, function, threads, shared_bytes, programmatic and self.cuda >= PROGRAMMATIC)

    def context(self, device: int) -> int:
        """See :meth:`Driver.context`; the context is retained for the life of the process."""
        if device not in self._contexts:
            self._call(self._api.cuInit, 0)
            handle = self._call(self._api.cuDeviceGet, device)
            self._contexts[device] = int(self._call(self._api.cuDevicePrimaryCtxRetain, handle))
        return self._contexts[device]

    def current(self) -> int:
        status, context = self._get_current()
        return 0 if status else int(context)  # after 0 the caller enters the context, whose error says what is wrong

    @contextmanager
    def entered(self, context: int) -> Iterator[None]:
        self._call(self._api.cuCtxPushCurrent, context)
        try:
            yield
        finally:
            self._call(self._api.cuCtxPopCurrent)

    def launcher(self, function: Any, blocks: int, threads: int, shared_bytes: int, pointers: int,
                 programmatic: bool) -> Launcher:
        """A launcher of one function. The first launch passes its arguments one by one. The second launch makes a
        CUlaunchConfig, of which later launches change only the stream. For a call that is made once, as with lengths
        that grow from call to call, a CUlaunchConfig takes longer than it saves."""
        plain, by_config, stream_type = self._api.cuLaunchKernel, self._api.cuLaunchKernelEx, self._api.CUstream
        described, config, launched, last_stream = self._describe, None, False, -1

        def launch(stream: int) -> None:
            nonlocal config, launched, last_stream
            if not launched:
                launched = True
                status, = plain(function, blocks, 1, 1, threads, 1, 1, shared_bytes, stream_type(stream), pointers, 0)
            else:
                if stream != last_stream:
                    config = config or self._config(blocks, threads, shared_bytes, programmatic)
                    config.hStream = stream_type(stream)
                    last_stream = stream
                status, = by_config(config, function, pointers, 0)
            if status:
                raise RuntimeError(described(status))

        return launch

    def _config(self, blocks: int, threads: int, shared_bytes: int, programmatic: bool) -> Any:
        """The configuration of a launch, less its stream."""
        config = self._api.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = blocks, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
        config.sharedMemBytes, config.numAttrs = shared_bytes, int(programmatic)
        if programmatic:
            attribute = self._api.CUlaunchAttribute()
            attribute.id = self._api.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            config.attrs = [attribute]
        return config

    def _call(self, function: Callable[..., Any], *arguments: object) -> Any:
        """Call a function of the driver; return its value beside the status. RuntimeError for a status that is an
        error."""
        status, *values = function(*arguments)
        if status:
            raise RuntimeError(self._describe(status))
        return values[0] if values else None

    def _describe(self, status: Any) -> str:
        """An error's name and text, in cupy's format."""
        _, text = self._api.cuGetErrorString(status)
        return f"{status.name}: {text.decode()}" if text else str(status.name)


# --- which of them ----------------------------------------------------------------------------------------------------

DRIVERS: dict[str, Callable[[], Driver]] = {"cupy": CupyDriver, "cuda-bindings": BindingsDriver,
                                            "ctypes": LibraryDriver}


def default_driver() -> Driver:
    """The driver of this process: the one that SAGE_AOT_LOADER names, else the first of DRIVERS that works.

    UnsupportedError where none works; the message says why, and what to install.
    """
    return _driver(os.environ.get("SAGE_AOT_LOADER") or None)


@cache
def _driver(asked: str | None) -> Driver:
    if asked is not None and asked not in DRIVERS:
        raise UnsupportedError(f"SAGE_AOT_LOADER: expected one of {', '.join(DRIVERS)}; got {asked!r}")
    reasons = []
    for name in [asked] if asked else DRIVERS:
        try:
            return DRIVERS[name]()
        except UnsupportedError as error:
            reasons.append(str(error))
    head = f"SAGE_AOT_LOADER is {asked}" if asked else "kernels are launched through cupy, cuda-bindings or ctypes"
    raise UnsupportedError(f"{head}; {'; '.join(reasons)}")


def _too_old(cuda: int) -> str:
    """For a driver older than cupy's CUDA: the CUDA that the driver is for, and what to install."""
    if cuda == 0:
        return "there is no driver: install or update the NVIDIA driver"
    found = f"the driver is for CUDA {cuda_text(cuda)}"
    if cuda < 12000:
        return f"{found}: update the driver, at least to 525"
    return f"{found}: update the driver, or uninstall this cupy and `pip install 'sage-aot[cuda12]'`"
