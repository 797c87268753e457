"""The choice of a backend: the kernels on CUDA devices, their emulation on the CPU, or a backend that is handed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from sage_aot._backends.base import Backend
    from sage_aot._backends.loader import Library

_handed: Backend | None = None
when_taken_back: list[Callable[[Backend], None]] = []
"""Functions to call with a backend that is handed no longer."""


def backend_of(tensor: torch.Tensor) -> Backend:
    """The backend for a tensor's device: the kernels of :func:`default_library` on CUDA, their emulation on the CPU."""
    if _handed is not None:
        return _handed
    library = default_library()
    return _cuda_backend(library) if tensor.is_cuda else _emulation_backend(library)


def handed_backend() -> Backend | None:
    """The backend of :func:`handing`, where one is handed."""
    return _handed


@contextmanager
def handing(backend: Backend) -> Iterator[None]:
    """Run all calls of the process, other threads' too, on this backend: for tests, and for benches of the kernels of
    another arch."""
    global _handed
    before, _handed = _handed, backend
    try:
        yield
    finally:
        _handed = before
        for forget in when_taken_back:
            forget(backend)


def default_library() -> Library:
    """The kernels that the package ships, or those of the folder that SAGE_AOT_KERNELS names."""
    from sage_aot._backends.loader import library_in, shipped_library

    named = os.environ.get("SAGE_AOT_KERNELS")
    return library_in(named) if named else shipped_library()


@cache
def _cuda_backend(library: Library) -> Backend:
    from sage_aot._backends.cuda.backend import CudaBackend

    return CudaBackend(library)


@cache
def _emulation_backend(library: Library) -> Backend:
    from sage_aot._backends.emulation.backend import EmulationBackend

    return EmulationBackend(library.manifest)


# --- the environment --------------------------------------------------------------------------------------------------

_VARIABLES = ("SAGE_AOT_KERNELS", "SAGE_AOT_EMULATE")


def _reader() -> Any:
    """A function that reads _VARIABLES from the dictionary behind os.environ. os.environ.get() raises and catches an
    exception where a variable is missing, which takes longer than the rest of a look-up. Where Python has no such
    dictionary, the function reads os.environ."""
    data, encode = getattr(os.environ, "_data", None), getattr(os.environ, "encodekey", None)
    if not isinstance(data, dict) or encode is None:
        return lambda: tuple(map(os.environ.get, _VARIABLES))
    kernels, emulate = map(encode, _VARIABLES)
    get = data.get
    return lambda: (get(kernels), get(emulate))


environment = _reader()
"""The current values of _VARIABLES, on which the preparation of a call depends."""

Surroundings = tuple["Backend | None", tuple[Any, ...]]
"""A backend that is handed, or None, and the environment: what a call depends on in addition to its arguments."""


def surroundings() -> Surroundings:
    """The surroundings of a call that is made now."""
    return _handed, environment()
