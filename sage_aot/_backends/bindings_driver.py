"""The CUDA driver through cuda-bindings, which torch installs on Linux."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from sage_aot._backends.library_driver import PROGRAMMATIC, DriverFunction
from sage_aot.errors import UnsupportedError

if TYPE_CHECKING:
    from sage_aot._backends.drivers import Function, Launcher


class BindingsDriver:
    """Driver through cuda-bindings; UnsupportedError where cuda-bindings or the driver is missing."""

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
        """See :meth:`sage_aot._backends.drivers.Driver.context`; it is retained for the life of the process."""
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
        """Call a function of the driver; return its value without the status. RuntimeError for a status that is an
        error."""
        status, *values = function(*arguments)
        if status:
            raise RuntimeError(self._describe(status))
        return values[0] if values else None

    def _describe(self, status: Any) -> str:
        """An error's name and text, in cupy's format."""
        _, text = self._api.cuGetErrorString(status)
        return f"{status.name}: {text.decode()}" if text else str(status.name)
