"""Cubins → a kernel folder that the runtime reads: the cubins, manifest.json, and nothing else.

Everything that can go wrong is checked before the first write, so a build that may not be shipped leaves no folder.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from codegen._shared import FILE_NAME, KernelRecord, Manifest, __version__, layout_digest
from codegen.budget import problems_of
from codegen.compiler import Report
from codegen.errors import BuildError, UsageError
from codegen.files import write_if_changed
from codegen.matrix import PlannedKernel
from codegen.ninja import Compilation


def write_package(kernels: tuple[PlannedKernel, ...], compilation: Compilation, out: Path) -> Manifest:
    """Make a folder hold exactly these compiled kernels; BuildError where one is not what its row asks for."""
    reports = {kernel: compilation.report(kernel) for kernel in kernels}
    problems = problems_of(reports)
    if problems and compilation.shippable:
        raise BuildError("\n".join(problems))
    if not compilation.retarget:  # a row is about its own chip
        print(*problems, sep="\n", end="\n" if problems else "")
    cubins = {kernel: compilation.cubin(kernel).read_bytes() for kernel in kernels}
    records = [_record(kernel, compilation, reports[kernel], cubin) for kernel, cubin in cubins.items()]
    manifest = Manifest(__version__, next(iter(reports.values())).compiler, compilation.flags, layout_digest(),
                        compilation.retarget, {record.spec.name: record for record in records})
    for record, cubin in zip(records, cubins.values()):
        write_if_changed(out / record.file, cubin)
    write_if_changed(out / FILE_NAME, manifest.to_text().encode())  # last: it vouches for the files it names
    _remove_others(out, {FILE_NAME, *(record.file for record in records)})
    return manifest


def check_out(out: Path) -> None:
    """UsageError for a folder with someone's files in it, which :func:`write_package` would remove."""
    if not out.exists() or (out / FILE_NAME).is_file():
        return
    if not out.is_dir():
        raise UsageError(f"expected a folder to write kernels to, got the file {out}")
    foreign = sorted(path.name for path in out.iterdir() if path.suffix not in (".cubin", ".tmp"))
    if foreign:
        raise UsageError(f"expected an empty folder or one with a {FILE_NAME}, got {out} with {foreign[0]} in it")


def _record(kernel: PlannedKernel, compilation: Compilation, report: Report, cubin: bytes) -> KernelRecord:
    """Only attention kernels use dynamic shared memory; the others declare theirs."""
    return KernelRecord(
        spec=kernel.spec,
        file=f"{kernel.spec.name}.cubin",
        sha256=hashlib.sha256(cubin).hexdigest(),
        target=compilation.target(kernel),
        tile=kernel.tile,
        threads=kernel.threads,
        shared_bytes=kernel.tile.shared_bytes(kernel.spec) if kernel.spec.kind == "attn" else 0,
        registers=report.registers,
        spill_bytes=report.spill_bytes,
        opcodes=report.opcodes,
        main_loop=report.main_loop if kernel.spec.kind == "attn" else None,
    )


def _remove_others(folder: Path, keep: set[str]) -> None:
    for path in folder.iterdir():
        if path.is_file() and path.name not in keep:
            path.unlink()
