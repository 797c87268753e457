"""What is installed, which devices there are, which kernels they would run, and what is missing."""

from __future__ import annotations

import importlib.metadata
import platform

import torch

from sage_aot._ops import emulated_arch
from sage_aot._loader import Library, default_library, import_cupy
from sage_aot._manifest import KernelRecord, Manifest
from sage_aot._select import built_archs, nearest_arch
from sage_aot._version import __version__
from sage_aot.errors import CubinError, SageAotError, UnsupportedError


def info() -> str:
    """A report in plain text: versions, what the build holds, per device the kernels it would run or why it has none.

    Nothing is launched. What is missing stands in lines that begin with ``missing:`` and say what to do.
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
    cupy = _cupy_version()
    if cupy:
        lines.append(f"cupy {cupy}")
    if not torch.cuda.is_available():
        return [*lines, _without_device(cupy)]
    try:
        import_cupy()
    except UnsupportedError as error:
        lines.append(f"missing: {error}")
    return lines


def _without_device(cupy: str) -> str:
    """No defect on a machine without a GPU; on one with a GPU, what it lacks."""
    if torch.version.cuda is None:
        needs = "a CUDA build of torch (this one is for CPUs)" + ("" if cupy else " and cupy")
    else:
        needs = f"a driver for CUDA {torch.version.cuda}, which this torch was built for, or a torch for an older CUDA"
    return f"no CUDA device: CPU tensors are emulated; a GPU would need {needs}"


def _cupy_version() -> str:
    """Version and name of what is installed, or nothing."""
    names = [dist.metadata["Name"] for dist in importlib.metadata.distributions()]
    return ", ".join(f"{importlib.metadata.version(name)} ({name})" for name in sorted(
        {name for name in names if name and name.startswith("cupy")}))


def _emulation(manifest: Manifest) -> str:
    try:
        return f"CPU tensors: emulation of the {emulated_arch(manifest)} kernels"
    except UnsupportedError as error:
        return f"missing: {error}"


def _kernels(library: Library) -> list[str]:
    manifest = library.manifest
    archs = ", ".join(built_archs(manifest))
    lines = [f"kernels: {len(manifest.kernels)} for {archs}, compiled by {manifest.compiler}, in {library.folder}"]
    if manifest.retarget:
        lines.append(f"built for {manifest.retarget} in place of their own archs: for tests only")
    return lines


def _device(device: int, manifest: Manifest) -> list[str]:
    major, minor = torch.cuda.get_device_capability(device)
    head = f"cuda:{device} {torch.cuda.get_device_name(device)}, compute capability {major}.{minor}"
    try:
        arch = nearest_arch((major, minor), manifest)
    except SageAotError as error:
        return [head, f"  missing: {error}"]
    records = [record for _, record in sorted(manifest.kernels.items())
               if record.spec.arch == arch and record.spec.kind == "attn"]
    return [head, *(f"  {describe(record)}" for record in records)]


def describe(record: KernelRecord) -> str:
    """An attention kernel in a line."""
    loop = record.main_loop  # None where a kernel was built for another chip and has none
    counts = f", {loop.matrix} matrix and {loop.other} other instructions a tile" if loop else ""
    return f"{record.spec.name}: {record.registers} registers{counts}"
