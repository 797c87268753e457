"""The CUDA driver through cupy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from sage_aot._backends.library_driver import MAX_DYNAMIC_SHARED_SIZE_BYTES
from sage_aot._kernels.drivers import cuda_text
from sage_aot.errors import UnsupportedError

if TYPE_CHECKING:
    from sage_aot._backends.drivers import Function, Launcher


class CupyDriver:
    """Driver through cupy; UnsupportedError where cupy is missing or made for a newer CUDA than the driver."""

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
        """See :meth:`sage_aot._backends.drivers.Driver.load`, but `programmatic` has no effect: cupy's launches take no
        attributes."""
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


def _too_old(cuda: int) -> str:
    """Message about a driver older than cupy's CUDA: the CUDA that the driver is for, and what to install."""
    if cuda == 0:
        return "there is no driver: install or update the NVIDIA driver"
    found = f"the driver is for CUDA {cuda_text(cuda)}"
    if cuda < 12000:
        return f"{found}: update the driver, at least to 525"
    return f"{found}: update the driver, or uninstall this cupy and `pip install 'sage-aot[cuda12]'`"
