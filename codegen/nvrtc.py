"""The compiler of the wheels: NVRTC 12.9, from PyPI, without nvcc, gcc or a GPU.

The version is fixed for two reasons. Cubins by 12.x compilers load on every driver from 525 on, cubins by 13.x only
from 580 on. 12.9 is the first version with --frandom-seed, which keeps the names of internal symbols the same from
process to process."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from codegen.compiler import Compiled, main
from codegen.errors import INSTALL, BuildError
from codegen.targets import is_ptx_target

FLAGS: tuple[str, ...] = ("-std=c++17", "-default-device", "--frandom-seed=sage_aot", "--ptxas-options=-v",
                          "--no-cache")
"""--no-cache: where there is a driver, NVRTC keeps cubins in the driver's cache. One from there has no log, which the
report reads. Source: https://github.com/NVIDIA/cuda-python/issues/1124."""

_DISTRIBUTION = "nvidia-cuda-nvrtc-cu12"
_LIBRARY = "libnvrtc.so.12"


def version() -> str:
    """Name and version, ``"nvrtc 12.9.86"``; BuildError where another version or none is installed."""
    try:
        installed = distribution(_DISTRIBUTION).version
    except PackageNotFoundError:
        installed = "none"
    if not installed.startswith("12.9."):
        raise BuildError(f"expected NVRTC 12.9, got {installed}: {INSTALL}")
    return f"nvrtc {installed}"


def compile_kernel(source: Path, target: str, include: Path) -> Compiled:
    """Compile one source; BuildError with the compiler's log where it does not compile."""
    nvrtc = _load()
    # Give only the file's name: a path would end up in the cubin, which must be the same from every folder.
    program = _checked(nvrtc.nvrtcCreateProgram(source.read_bytes(), source.name.encode(), 0, [], []))
    options = [f"--gpu-architecture={target}", f"--include-path={include}", *FLAGS]
    status, = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
    log = _read(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program).rstrip(b"\0").decode()
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise BuildError(f"{status.name}\n{log}")
    if is_ptx_target(target):
        return Compiled(_read(nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX, program).rstrip(b"\0"), log, True)
    return Compiled(_read(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program), log)


def _load() -> Any:  # the bindings have no types
    """cuda.bindings.nvrtc on top of the library of _DISTRIBUTION.

    The library is loaded first, since cuda.pathfinder takes a library that is already loaded. It might otherwise find
    the 13.x that comes with torch.
    """
    version()
    files = distribution(_DISTRIBUTION).files or ()
    for file in files:
        if file.name == _LIBRARY:
            ctypes.CDLL(str(file.locate()))
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        raise BuildError(f"expected cuda-bindings, got none: {INSTALL}") from error
    found = _checked(nvrtc.nvrtcVersion())
    if found != (12, 9):
        raise BuildError(f"expected NVRTC 12.9, got {'.'.join(map(str, found))}: {INSTALL}")
    return nvrtc


def _checked(result: tuple[Any, ...]) -> Any:
    """The values that a call returns in addition to its status; BuildError for a status that is an error."""
    status, *values = result
    if status != 0:
        raise BuildError(f"expected NVRTC_SUCCESS, got {status.name}")
    return values[0] if len(values) == 1 else tuple(values)


def _read(size_of: Callable[..., Any], fill: Callable[..., Any], program: object) -> bytes:
    """Read bytes from NVRTC by two calls: `size_of` gives their number, `fill` copies them into a buffer."""
    buffer = bytes(_checked(size_of(program)))
    _checked(fill(program, buffer))
    return buffer


if __name__ == "__main__":
    sys.exit(main(compile_kernel, version))
