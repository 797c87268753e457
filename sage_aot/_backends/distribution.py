"""Parts that depend on how sage_aot is distributed: the loaders of kernels, and how to install it again.

This is the wheel. A build for the Hugging Face hub has ci/hub_package/distribution.py in its place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from sage_aot._backends.bindings_driver import BindingsDriver
from sage_aot._backends.cupy_driver import CupyDriver
from sage_aot._backends.library_driver import LibraryDriver

if TYPE_CHECKING:
    from sage_aot._backends.drivers import Driver

DRIVERS: dict[str, Callable[[], Driver]] = {"cupy": CupyDriver, "cuda-bindings": BindingsDriver,
                                            "ctypes": LibraryDriver}
"""The loaders by their names, in the order in which they are tried."""

INSTALL_AGAIN = "reinstall sage-aot, or in a source tree run `python -m codegen build`"
