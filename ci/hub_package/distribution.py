"""Parts that depend on how sage_aot is distributed: the loaders of kernels, and how to install it again.

This is the Hugging Face hub, whose kernels import torch and the standard library alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from sage_aot._backends.library_driver import LibraryDriver

if TYPE_CHECKING:
    from sage_aot._backends.drivers import Driver

DRIVERS: dict[str, Callable[[], Driver]] = {"ctypes": LibraryDriver}
"""The loaders by their names, in the order in which they are tried."""

INSTALL_AGAIN = "delete this kernel's folder from the cache of the Hugging Face hub, and load it again"
