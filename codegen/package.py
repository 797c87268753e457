"""Compiled kernels → a folder that the runtime reads: the cubins and PTX, manifest.json, and nothing else.

All checks come before the first write, so a build that fails them leaves no folder.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from codegen.budget import Reports
from codegen.compilation import Compilation
from codegen.compiler import Report
from codegen.errors import UsageError
from codegen.files import write_if_changed
from codegen.kernel_info import of_elf, of_ptx
from codegen.matrix import Matrix, PlannedKernel
from sage_aot._kernels.manifest import FILE_NAME, AttnRecord, KernelRecord, Manifest, records_by_name
from sage_aot._kernels.spec import AttnSpec
from sage_aot._launch.structs import vocabulary
from sage_aot._version import __version__


def write_package(reports: Reports, matrix: Matrix, compilation: Compilation, out: Path) -> Manifest:
    """Make a folder hold exactly these compiled kernels; the caller has judged them. Return the folder's manifest."""
    codes = {kernel: compilation.compiled(kernel).read_bytes() for kernel in reports}
    records = [_record(kernel, matrix, compilation, reports[kernel], code) for kernel, code in codes.items()]
    manifest = _manifest(records, reports, matrix, compilation)
    for record, code in zip(records, codes.values()):
        write_if_changed(out / record.file, code)
    write_if_changed(out / FILE_NAME, manifest.to_text().encode())  # after the files, whose hashes it names
    _remove_others(out, {FILE_NAME, *(record.file for record in records)})
    return manifest


def package_problems(matrix: Matrix, compilation: Compilation, folder: Path) -> list[str]:
    """Differences between a folder and the result of building the whole matrix, a sentence each. Nothing is compiled,
    but the sources must be rendered. The same source is taken to compile to the same file."""
    try:
        manifest = Manifest.read(folder)
    except (OSError, ValueError) as error:
        return [f"expected the kernels of this source tree in {folder}, got none: {error}"]
    kernels = {kernel.spec.name: kernel for kernel in matrix.kernels}
    headers = {"version": __version__, "vocabulary": vocabulary(), "flags": compilation.flags,
               "retarget": None, "complete": True, "archs": matrix.archs}
    problems = [f"{FILE_NAME}: expected {name} {expected!r}, got {getattr(manifest, name)!r}"
                for name, expected in headers.items() if getattr(manifest, name) != expected]
    problems += [f"{name}: expected it in {folder}, got none" for name in sorted(kernels)
                 if name not in manifest.kernels]
    known = {FILE_NAME, *(record.file for record in manifest.kernels.values())}
    problems += [f"{path.name}: expected what {FILE_NAME} names in {folder}, got another file"
                 for path in sorted(folder.iterdir()) if path.name not in known]
    for name, record in sorted(manifest.kernels.items()):
        problems += [f"{name}: {problem}" for problem in (
            _record_problems(record, kernels[name], compilation, folder) if name in kernels
            else ["expected a kernel of the build matrix, got another"])]
    return problems


def _record_problems(record: KernelRecord, kernel: PlannedKernel, compilation: Compilation, folder: Path) -> list[str]:
    """The entries of a record that do not follow from this source tree and the file that the record names."""
    path = folder / record.file
    found = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "no such file"
    expected: dict[str, object] = {
        "compiler": compilation.version, "source_sha256": compilation.source_sha256(kernel), "sha256": found,
        "target": compilation.target(kernel), "file": compilation.compiled(kernel).name, "family": kernel.family}
    if isinstance(kernel.spec, AttnSpec):
        expected |= {"tile": kernel.tile, "companions": kernel.companions}
    if found == record.sha256:  # else the file may be damaged, and is not read
        info = of_ptx(path.read_text()) if record.is_ptx else of_elf(path.read_bytes())
        expected |= {"params": info.params, "facts": info.facts}
    return [f"expected {field} {value!r}, got {getattr(record, field, None)!r}"
            for field, value in expected.items() if getattr(record, field, None) != value]


def check_out(out: Path) -> None:
    """UsageError for a folder with other files than kernels, which :func:`write_package` would remove."""
    if not out.exists() or (out / FILE_NAME).is_file():
        return
    if not out.is_dir():
        raise UsageError(f"expected a folder to write kernels to, got the file {out}")
    foreign = sorted(path.name for path in out.iterdir() if path.suffix not in (".cubin", ".ptx", ".tmp"))
    if foreign:
        raise UsageError(f"expected an empty folder or one with a {FILE_NAME}, got {out} with {foreign[0]} in it")


def _manifest(records: list[KernelRecord], reports: Reports, matrix: Matrix, compilation: Compilation) -> Manifest:
    built = {record.spec.arch for record in records}
    return Manifest(
        version=__version__,
        flags=compilation.flags,
        retarget=compilation.retarget,
        vocabulary=vocabulary(),
        complete=len(records) == len(matrix.kernels),
        archs={name: arch for name, arch in matrix.archs.items() if name in built},
        structs={report.info.params: report.info.layout for report in reports.values()},
        kernels=records_by_name(records),
    )


def _record(kernel: PlannedKernel, matrix: Matrix, compilation: Compilation, report: Report,
            code: bytes) -> KernelRecord:
    record = KernelRecord(
        spec=kernel.spec,
        family=kernel.family,
        file=compilation.compiled(kernel).name,
        sha256=hashlib.sha256(code).hexdigest(),
        target=compilation.target(kernel),
        least_driver=matrix.archs[kernel.spec.arch].least_driver,
        params=report.info.params,
        facts=report.info.facts,
        opcodes=report.opcodes,
        machine=report.machine,
        compiler=report.compiler,
        source_sha256=compilation.source_sha256(kernel),
    )
    if not isinstance(kernel.spec, AttnSpec):
        return record
    return AttnRecord(**{**vars(record), "spec": kernel.spec, "tile": kernel.tile, "companions": kernel.companions,
                         "main_loop": report.main_loop})


def _remove_others(folder: Path, keep: set[str]) -> None:
    for path in folder.iterdir():
        if path.is_file() and path.name not in keep:
            path.unlink()
