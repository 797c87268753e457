"""Which driver is for which CUDA: numbers alone, for the choice of kernels and for messages."""

from __future__ import annotations

CUDA_OF_DRIVER = {525: 12000, 530: 12010, 535: 12020, 545: 12030, 550: 12040, 555: 12050, 560: 12060, 565: 12070,
                  570: 12080, 575: 12090, 580: 13000, 590: 13010}
"""Per branch of the driver the CUDA that it is for, which is all that a process can ask the driver itself: 12090 is
12.9. Source: CUDA toolkit release notes, "CUDA Toolkit and Corresponding Driver Versions"."""


def too_old(cuda: int, least_driver: int) -> str | None:
    """Why a driver for this CUDA is too old for a floor such as 525, or None where it is not."""
    needed = cuda_of(least_driver)
    if cuda >= needed:
        return None
    return (f"it needs a driver from {least_driver} on (CUDA {cuda_text(needed)}), this one is for CUDA "
            f"{cuda_text(cuda)}")


def cuda_of(driver: int) -> int:
    """The CUDA of the newest branch in CUDA_OF_DRIVER up to this one; 0 for a driver older than all of them."""
    return max((cuda for branch, cuda in CUDA_OF_DRIVER.items() if branch <= driver), default=0)


def cuda_text(number: int) -> str:
    """12090 is 12.9."""
    return f"{number // 1000}.{number % 1000 // 10}"
