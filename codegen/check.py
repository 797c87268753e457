"""The checks of ``python -m codegen check`` that need no compiled kernel: goldens and template names."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from codegen.errors import UsageError
from codegen.files import write_if_changed
from codegen.matrix import Matrix
from codegen.project import Project
from codegen.render import Renderer


def variable_problems(matrix: Matrix, project: Project) -> list[str]:
    """Names that a template uses but its kind is not given, or is given but does not use, a sentence each."""
    renderer = Renderer(project.templates)
    used = sorted({(kernel.spec.kind, kernel.how.template) for kernel in matrix.kernels})
    return [problem for kind, template in used for problem in renderer.variable_problems(kind, template)]


def golden_problems(matrix: Matrix, project: Project) -> list[str]:
    """Every golden that differs from what its kernel renders to now, or that there are no goldens."""
    goldens = list(_goldens(matrix, project))
    if not goldens:
        return [f"{project.golden.relative_to(project.root)}: expected goldens, got none: add an empty file "
                "named after a kernel, then run python -m codegen check --update"]
    return [f"{path.relative_to(project.root)}: expected what its kernel renders to, got another text: "
            "look at the difference, then run python -m codegen check --update"
            for path, text in goldens if path.read_bytes() != text]


def update_goldens(matrix: Matrix, project: Project) -> None:
    """Rewrite the goldens. An empty file named after a kernel becomes that kernel's golden."""
    for path, text in _goldens(matrix, project):
        write_if_changed(path, text)


def _goldens(matrix: Matrix, project: Project) -> Iterator[tuple[Path, bytes]]:
    """Each golden file with the text that it should hold."""
    kernels = {kernel.spec.name: kernel for kernel in matrix.kernels}
    renderer = Renderer(project.templates)
    for path in sorted(project.golden.glob("*.cu")):
        if path.stem not in kernels:
            raise UsageError(f"{path.relative_to(project.root)}: expected the name of a kernel, got {path.stem!r}: "
                             "remove the file or see python -m codegen list")
        yield path, renderer.render(kernels[path.stem]).encode()
