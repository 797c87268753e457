"""One compilation: a folder of cubins, for their own targets or for a foreign target, by one toolchain.

This module finds the headers of a source by its #include lines, since NVRTC writes no dependency files.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from codegen import nvcc, nvrtc
from codegen.compiler import Report
from codegen.errors import BuildError
from codegen.matrix import PlannedKernel
from codegen.project import Project
from codegen.render import source_path
from sage_aot._kernels.spec import is_ptx, target_of


class Toolchain(Protocol):
    """A module around one compiler, whose command line compiles one source."""

    FLAGS: tuple[str, ...]

    def version(self) -> str:
        """Name and version of the compiler that is installed; BuildError where there is none."""


TOOLCHAINS: dict[str, Toolchain] = {"nvrtc": nvrtc, "nvcc": nvcc}

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*(["<])([^">]+)[">]', re.MULTILINE)


@dataclass(frozen=True)
class Compilation:
    """Which compiler, for which chip, in which project."""

    project: Project
    toolchain: str = "nvrtc"
    retarget: str | None = None  # "sm_90": every kernel for this chip in place of its own

    @property
    def folder(self) -> Path:
        return self.project.build / self.toolchain / (self.retarget or "own")

    @property
    def flags(self) -> tuple[str, ...]:
        return TOOLCHAINS[self.toolchain].FLAGS

    @property
    def version(self) -> str:
        """Name and version of the compiler that is installed."""
        return TOOLCHAINS[self.toolchain].version()

    @property
    def shippable(self) -> bool:
        """Whether a wheel may hold these cubins. Those for a foreign chip are for tests, those of nvcc to debug."""
        return self.toolchain == "nvrtc" and self.retarget is None

    def target(self, kernel: PlannedKernel) -> str:
        """What a kernel is compiled for, as compilers spell it. PTX is for every chip as it is."""
        if is_ptx(kernel.spec.arch):
            return target_of(kernel.spec.arch)
        return (self.retarget or target_of(kernel.spec.arch)) + kernel.how.suffix

    def compiled(self, kernel: PlannedKernel) -> Path:
        """The cubin, or the PTX."""
        return self.folder / f"{kernel.spec.name}.{'ptx' if is_ptx(kernel.spec.arch) else 'cubin'}"

    def report(self, kernel: PlannedKernel) -> Report:
        """What the compiler made of a kernel that is built."""
        return Report.read(self.compiled(kernel))

    def source_sha256(self, kernel: PlannedKernel) -> str:
        """Hash of all input of the compiler for a rendered kernel: each file by its name, the target and the flags."""
        source, include = source_path(kernel, self.project), self.project.include
        files = {source.name: source, **{path.relative_to(include).as_posix(): path
                                         for path in headers_of(source, include)}}
        digest = hashlib.sha256("\n".join((self.target(kernel), *self.flags)).encode())
        for name, path in sorted(files.items()):
            data = path.read_bytes()
            digest.update(f"\n{name} {len(data)}\n".encode() + data)
        return digest.hexdigest()


def headers_of(source: Path, include: Path) -> set[Path]:
    """Every header of the include folder that a source includes, directly or not; BuildError for unknown ones."""
    found: set[Path] = set()
    pending = [source]
    while pending:
        file = pending.pop()
        for bracket, name in _INCLUDE.findall(file.read_text(encoding="utf-8")):
            header = include / name
            if header.is_file() and header not in found:
                found.add(header)
                pending.append(header)
            elif bracket == '"' and not header.is_file():
                raise BuildError(f"{file}: expected a header of {include}, got {name!r}")
    return found
