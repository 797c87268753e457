"""A report of what is installed, which devices there are, which kernels they would run, and what is missing."""

from __future__ import annotations

import importlib.metadata
import platform

import torch

from sage_aot._backends.cuda.device import gpu_here
from sage_aot._backends.distribution import DRIVERS
from sage_aot._backends.drivers import default_driver
from sage_aot._backends.emulation.backend import emulated_arch
from sage_aot._backends.loader import Library
from sage_aot._call.backends import default_library
from sage_aot._kernels.drivers import cuda_text
from sage_aot._kernels.manifest import AttnRecord, Manifest
from sage_aot._kernels.spec import is_ptx
from sage_aot._launch.choose import nearest_arch
from sage_aot._version import __version__
from sage_aot.errors import CubinError, SageAotError, UnsupportedError


def info() -> str:
    """A report in plain text: versions; the loader; the kernels of the build, and whether the build is complete; per
    device the kernels that it would run, or why it has none.

    Nothing is launched. Lines that begin with ``missing:`` say what is missing and what to do.
    """
    library = default_library()
    lines = _versions()
    try:
        lines += _kernels(library)
    except CubinError as error:
        return "\n".join([*lines, f"missing: {error}"])
    for device in range(torch.cuda.device_count()):
        lines += _device(device, library.manifest)
    return "\n".join([*lines, _emulation(library.manifest)])


def _versions() -> list[str]:
    lines = [f"sage_aot {__version__}, Python {platform.python_version()}, torch {torch.__version__}"]
    installed = loaders_installed()
    if not torch.cuda.is_available():
        return [*lines, f"loaders installed: {', '.join([*installed, 'ctypes'])}", _without_device()]
    try:
        driver = default_driver()
    except UnsupportedError as error:
        return [*lines, f"missing: {error}"]
    return [*lines, f"loader: {driver.name} {driver.version}, driver for CUDA {cuda_text(driver.cuda)}"]


def _without_device() -> str:
    """The line where torch sees no CUDA device: what a GPU would need. Without a GPU nothing is missing."""
    if torch.version.cuda is None:
        needs = "a CUDA build of torch (this one is for CPUs)"
    else:
        needs = f"a driver for CUDA {torch.version.cuda}, which this torch was built for, or a torch for an older CUDA"
    return f"no CUDA device: CPU tensors are emulated; a GPU would need {needs}"


def loaders_installed() -> list[str]:
    """Name and version of every installed package that launches kernels, whether the package works here or not."""
    names = {dist.metadata["Name"] for dist in importlib.metadata.distributions()}
    return [f"{name} {importlib.metadata.version(name)}" for loader in DRIVERS
            for name in sorted(filter(None, names)) if name.startswith(loader)]


def _emulation(manifest: Manifest) -> str:
    try:
        return f"CPU tensors: emulation of the {emulated_arch(manifest)} kernels"
    except UnsupportedError as error:
        return f"missing: {error}"


def _kernels(library: Library) -> list[str]:
    manifest = library.manifest
    lines = [f"kernels: {len(manifest.kernels)}, {_extent(manifest)}, compiled by {manifest.compiler}, in "
             f"{library.folder}"]
    for arch in manifest.attention_archs:
        built = manifest.archs[arch]
        by = " through its driver's compiler" if is_ptx(arch) else ""
        ran = f"ran on {built.run_on}{by}" if built.run_on else "not run on hardware"
        lines.append(f"  {arch}: compute capability {_served(arch, manifest)}, driver from {built.least_driver}, {ran}")
    if manifest.retarget:
        lines.append(f"built for {manifest.retarget} instead of their own archs: for tests only")
    return lines


def _extent(manifest: Manifest) -> str:
    return "complete" if manifest.complete else "narrowed (some of what can be built was left out)"


def _served(arch: str, manifest: Manifest) -> str:
    return manifest.any_attention(arch).served


def _device(device: int, manifest: Manifest) -> list[str]:
    gpu = gpu_here(device)
    head = f"cuda:{device} {gpu}"
    try:
        arch = nearest_arch(gpu, manifest)
    except SageAotError as error:
        return [head, f"  missing: {error}"]
    return [head, *(f"  {describe(record)}" for record in manifest.attention(arch))]


def describe(record: AttnRecord) -> str:
    """An attention kernel in a line."""
    loop = record.main_loop  # None where a kernel was built for another chip and has none
    counts = f", {loop.matrix} matrix and {loop.other} other instructions in the main loop" if loop else ""
    registers = f"{record.machine.registers} registers" if record.machine else "PTX"
    return f"{record.name}: {registers}{counts}"
