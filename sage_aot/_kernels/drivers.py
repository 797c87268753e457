"""NVIDIA's driver: its versions and CUDA's, as numbers, for the choice of kernels and for messages; its libraries."""

from __future__ import annotations

import ctypes
import sys
from typing import Any

CUDA_OF_DRIVER = {525: 12000, 530: 12010, 535: 12020, 545: 12030, 550: 12040, 555: 12050, 560: 12060, 565: 12070,
                  570: 12080, 575: 12090, 580: 13000, 590: 13010}
"""Per branch of the driver, its CUDA version: 12090 is 12.9. A process can ask the driver for its CUDA version alone,
not for its branch. Source: CUDA toolkit release notes, "CUDA Toolkit and Corresponding Driver Versions"."""

_SEARCH_SYSTEM32 = 0x800  # LOAD_LIBRARY_SEARCH_SYSTEM32 of Windows' LoadLibraryEx


def too_old(cuda: int, least_driver: int) -> str | None:
    """The reason why a driver for `cuda` (12090 is 12.9) is too old where a branch such as 525 is needed, or None."""
    needed = cuda_of(least_driver)
    if cuda >= needed:
        return None
    return (f"it needs a driver from {least_driver} on (CUDA {cuda_text(needed)}), this one is for CUDA "
            f"{cuda_text(cuda)}")


def cuda_of(driver: int) -> int:
    """The CUDA of a driver's branch: that of the newest branch in CUDA_OF_DRIVER up to it, 0 where all are newer."""
    return max((cuda for branch, cuda in CUDA_OF_DRIVER.items() if branch <= driver), default=0)


def cuda_text(number: int) -> str:
    """12090 is 12.9."""
    return f"{number // 1000}.{number % 1000 // 10}"


def driver_library(name: str) -> Any:
    """A library that the driver installs, by its name; OSError where it does not load.

    Windows looks in its system folder alone, where the driver puts its libraries: a file of that name in the program's
    folder, or in one that a package has added to the search, is not loaded.
    """
    if sys.platform == "win32":
        return ctypes.WinDLL(name, winmode=_SEARCH_SYSTEM32)
    return ctypes.CDLL(name)
