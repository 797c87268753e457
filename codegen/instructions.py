"""The table of docs/instructions.md: the instruction counts of each attention kernel's main loop. ``codegen check``
compares the table with the kernels.

The rows stand between two comments; the text around these is written by hand. A narrowed build updates its own rows and
leaves the others as they are.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from codegen.compiler import Report
from codegen.errors import UsageError
from codegen.files import write_if_changed
from codegen.matrix import Matrix, PlannedKernel
from codegen.project import Project
from sage_aot._kernels.manifest import MachineCode, MainLoop

HEADER = ("| kernel | registers | spilt bytes | matrix | other | other / matrix | rare |\n"
          "|---|---:|---:|---:|---:|---:|---:|\n")

_TABLE = re.compile(r"(<!-- table: [^\n]* -->\n)(.*?)(<!-- end of table -->)", re.DOTALL)
_ROW = re.compile(r"^\| `(\w+)` \|.*\n", re.MULTILINE)


def table(reports: Mapping[PlannedKernel, Report]) -> str:
    """The whole table for some kernels."""
    return HEADER + "".join(_rows(reports).values())


def instructions_problems(reports: Mapping[PlannedKernel, Report], matrix: Matrix, project: Project) -> list[str]:
    """One sentence where the page's table is not up to date, in a list; else an empty list."""
    if _read(project) == _updated(reports, matrix, project):
        return []
    return [f"{project.instructions.relative_to(project.root)}: expected the counts of these kernels, got others: "
            "look at python -m codegen census, then run python -m codegen check --update"]


def update_instructions(reports: Mapping[PlannedKernel, Report], matrix: Matrix, project: Project) -> None:
    """Bring the table up to date."""
    write_if_changed(project.instructions, _updated(reports, matrix, project).encode())


def _updated(reports: Mapping[PlannedKernel, Report], matrix: Matrix, project: Project) -> str:
    """The page with new rows for these kernels, its rows of other kernels, and no rows of kernels not in the matrix."""
    text = _read(project)
    found = _TABLE.search(text)
    if found is None:
        raise UsageError(f"{project.instructions.relative_to(project.root)}: expected a table between the comments "
                         "'<!-- table: ... -->' and '<!-- end of table -->', got none")
    names = {kernel.spec.name for kernel in matrix.kernels}
    kept = {row[1]: row[0] for row in _ROW.finditer(found[2]) if row[1] in names}
    rows = {**kept, **_rows(reports)}
    body = HEADER + "".join(row for _, row in sorted(rows.items()))
    return text[:found.end(1)] + body + text[found.start(3):]


def _read(project: Project) -> str:
    try:
        return project.instructions.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"expected the page {project.instructions}, got: {error.strerror}") from error


def _rows(reports: Mapping[PlannedKernel, Report]) -> dict[str, str]:
    return {kernel.spec.name: _row(kernel.spec.name, report.machine, report.main_loop)
            for kernel, report in reports.items() if report.machine and report.main_loop}


def _row(name: str, machine: MachineCode, loop: MainLoop) -> str:
    return (f"| `{name}` | {machine.registers} | {machine.spill_bytes} | {loop.matrix} | {loop.other} | "
            f"{loop.other / loop.matrix:.2f} | {loop.rare} |\n")
