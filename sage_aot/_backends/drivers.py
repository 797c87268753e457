"""The CUDA driver, through cupy, cuda-bindings or its own library: a cubin becomes a function, a function is launched.

Each has a module of its own, which imports its package when a GPU is first asked about: cupy_driver.py, or
bindings_driver.py where cupy cannot be used. Where neither can, library_driver.py calls the driver's library. The
results are the same through all three.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache
from typing import Protocol

from sage_aot._backends.distribution import DRIVERS
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
        """Current context of this thread, 0 where it has none."""
        ...

    def entered(self, context: int) -> AbstractContextManager[None]:
        """Makes a context current on this thread; on exit, makes the earlier context current again."""
        ...


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
    *others, last = DRIVERS
    every = f"{', '.join(others)} or {last}" if others else last
    head = f"SAGE_AOT_LOADER is {asked}" if asked else f"kernels are launched through {every}"
    raise UnsupportedError(f"{head}; {'; '.join(reasons)}")
