"""Versions of the driver and of CUDA: numbers alone, for the choice of kernels and for messages."""

from __future__ import annotations

CUDA_OF_DRIVER = {525: 12000, 530: 12010, 535: 12020, 545: 12030, 550: 12040, 555: 12050, 560: 12060, 565: 12070,
                  570: 12080, 575: 12090, 580: 13000, 590: 13010}
"""Per branch of the driver, its CUDA version: 12090 is 12.9. A process can ask the driver for its CUDA version alone,
not for its branch. Source: CUDA toolkit release notes, "CUDA Toolkit and Corresponding Driver Versions"."""


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
