"""Facts of a CUDA device: its arch, its number of SMs, its context."""

from __future__ import annotations

import os
import warnings
from contextlib import AbstractContextManager, nullcontext
from functools import cache

import torch

from sage_aot._backends.drivers import Driver, default_driver
from sage_aot._backends.loader import Library
from sage_aot._kernels.spec import is_ptx
from sage_aot._launch.choose import Gpu, nearest_arch
from sage_aot.errors import LaunchError, PtxWarning, UnsupportedError


def arch_of(library: Library, device: int) -> str:
    """The arch whose kernels a CUDA device runs. UnsupportedError where no arch fits, or no loader works here."""
    gpu = gpu_here(device, library.driver)  # library.driver raises where no loader works, and says what is missing
    arch = nearest_arch(gpu, library.manifest)
    if is_ptx(arch) and os.environ.get("SAGE_AOT_PTX_WARNING") != "0":
        warnings.warn(f"this sage-aot has no machine code for this GPU ({gpu}): the driver compiles the PTX of {arch}, "
                      f"which takes seconds at the first call of each kernel and does not use what is new in this GPU. "
                      f"Look for a newer sage-aot; SAGE_AOT_PTX_WARNING=0 silences this", PtxWarning, stacklevel=2)
    return arch


def gpu_here(device: int, driver: Driver | None = None) -> Gpu:
    """A CUDA device's capability, driver and name. `driver`: None for the default; the CUDA of the device's driver is
    None where no loader works."""
    try:
        cuda = (driver or default_driver()).cuda
    except UnsupportedError:
        cuda = None
    return Gpu(torch.cuda.get_device_capability(device), cuda, torch.cuda.get_device_name(device))


@cache
def sm_count(device: int) -> int:
    """Number of SMs of a CUDA device."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def context_of(driver: Driver, device: int) -> int:
    """The context in which the kernels of a device are launched. The device must be torch's current one."""
    try:
        return driver.context(device)
    except Exception as error:  # cupy's errors have no common base
        raise LaunchError(f"the driver has no context for device {device}: {error}") from error


def entered(device: int) -> AbstractContextManager[object]:
    """Makes a device torch's current one, unless it already is."""
    return nullcontext() if torch.cuda.current_device() == device else torch.cuda.device(device)
