"""The kernels that a command is about: ``--arch`` and ``--only``."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase

from codegen.errors import UsageError
from codegen.matrix import Matrix, PlannedKernel
from sage_aot._kernels.spec import spec_of


@dataclass(frozen=True)
class Selection:
    """The kernels that a command asks for; an empty tuple asks for all."""

    archs: tuple[str, ...] = ()
    patterns: tuple[str, ...] = ()  # of names, as fnmatch reads them

    def names(self, names: list[str]) -> set[str]:
        """The names that the selection asks for; UsageError for an arch or a pattern that no name fits."""
        archs = {spec_of(name).arch for name in names}
        unknown = [arch for arch in self.archs if arch not in archs]
        if unknown:
            raise UsageError(f"expected an arch of {', '.join(sorted(archs))}, got {unknown[0]!r}")
        found = {name for name in names if not self.archs or spec_of(name).arch in self.archs}
        for pattern in self.patterns:
            if not any(fnmatchcase(name, pattern) for name in found):
                wider = "" if "*" in pattern else f"; it must fit the whole name, try '*{pattern}*'"
                raise UsageError(f"expected a pattern that fits a name, got {pattern!r}{wider}; "
                                 "python -m codegen list prints all names")
        return {name for name in found
                if not self.patterns or any(fnmatchcase(name, pattern) for pattern in self.patterns)}

    def kernels(self, matrix: Matrix) -> tuple[PlannedKernel, ...]:
        """The kernels that the selection asks for, and their companions: every attention kernel built can run."""
        names = self.names([kernel.spec.name for kernel in matrix.kernels])
        asked = [kernel for kernel in matrix.kernels if kernel.spec.name in names]
        names.update(companion for kernel in asked for companion in kernel.companions)
        return tuple(kernel for kernel in matrix.kernels if kernel.spec.name in names)
