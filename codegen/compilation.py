"""One compilation: a folder of cubins, for their own targets or for a foreign target, by one toolchain.

The headers of a source are found by its #include lines, since NVRTC writes no dependency files.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from codegen import nvcc, nvdisasm, nvrtc
from codegen.compiler import REPORT_LAYOUT, Report
from codegen.errors import BuildError
from codegen.matrix import PlannedKernel
from codegen.project import Project
from codegen.render import source_path
from codegen.targets import compiled_suffix
from sage_aot._kernels.manifest import read_target, runs
from sage_aot._kernels.spec import capability_of, is_ptx, target_of


class Toolchain(Protocol):
    """A module around one compiler; its command line compiles one source."""

    FLAGS: tuple[str, ...]

    def version(self) -> str:
        """Name and version of the compiler that is installed; BuildError where there is none."""


TOOLCHAINS: dict[str, Toolchain] = {"nvrtc": nvrtc, "nvcc": nvcc}

_COMMAND_FILES = ("compiler.py", "census.py", "nvdisasm.py", "kernel_info.py", "targets.py")
"""Files of codegen, in addition to the toolchain's own, on which the outputs of a compile command depend."""

_COMMENT = re.compile(r"""//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|'(?:\\[^'\n]+|[^'\\\n])'""", re.DOTALL)
"""A comment of C++, or what may hold the characters of one: a string or a character."""

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*(["<])([^">]+)[">]', re.MULTILINE)


@dataclass(frozen=True)
class Compilation:
    """A compiler, its targets, and the project whose kernels it compiles."""

    project: Project
    toolchain: str = "nvrtc"
    retarget: str | None = None  # "sm_90": every kernel for this chip instead of its own

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
    def versions(self) -> str:
        """Names and versions of the tools that a compile command runs, a line each."""
        return f"{self.version}\n{nvdisasm.version()}\n"

    @property
    def command_files(self) -> list[Path]:
        """The files of codegen on which the outputs of a compile command depend; they hold its flags, too."""
        return [Path(__file__).with_name(name) for name in (f"{self.toolchain}.py", *_COMMAND_FILES)]

    @property
    def shippable(self) -> bool:
        """True where a wheel may hold these cubins. Retargeted cubins are for tests, cubins by nvcc for debugging."""
        return self.toolchain == "nvrtc" and self.retarget is None

    def target(self, kernel: PlannedKernel) -> str:
        """The target of a kernel, as compilers spell it: "sm_90a". PTX is never retargeted."""
        if is_ptx(kernel.spec.arch):
            return target_of(kernel.spec.arch)
        return (self.retarget or target_of(kernel.spec.arch)) + kernel.suffix

    def takes(self, kernel: PlannedKernel) -> bool:
        """True unless kernels are retargeted to a chip that lacks the instructions of this kernel's suffix."""
        if not self.retarget or not kernel.suffix:
            return True
        _, chip, _ = read_target(self.retarget)
        return runs(kernel.suffix, capability_of(kernel.spec.arch), chip)

    def compiled(self, kernel: PlannedKernel) -> Path:
        """Path of a kernel's cubin or PTX."""
        return self.folder / f"{kernel.spec.name}{compiled_suffix(self.target(kernel))}"

    def outputs(self, kernel: PlannedKernel) -> tuple[Path, Path]:
        """Paths of all that a compile command writes: the cubin or PTX, and the report on it."""
        return self.compiled(kernel), self.compiled(kernel).with_suffix(".json")

    def report(self, kernel: PlannedKernel) -> Report:
        """The report on a kernel, which must be compiled."""
        return Report.read(self.compiled(kernel))

    def cache_keys(self, kernels: tuple[PlannedKernel, ...]) -> dict[PlannedKernel, str]:
        """Per rendered kernel a sha256 of all that its outputs depend on. Where nvcc compiles, none has a key: nvcc
        reads headers of the host compiler, which nothing here names."""
        if self.toolchain == "nvcc":
            return {}
        command = hashlib.sha256(f"{self.versions}{REPORT_LAYOUT}".encode())
        for path in self.command_files:
            command.update(path.read_bytes())

        def key(kernel: PlannedKernel) -> str:
            digest = command.copy()
            digest.update("\n".join((self.source_sha256(kernel), *kernel.spec.entries)).encode())
            return digest.hexdigest()

        return {kernel: key(kernel) for kernel in kernels}

    def source_sha256(self, kernel: PlannedKernel) -> str:
        """sha256 of the compiler's input for a rendered kernel: each file with its name, less its comments, the target,
        the flags."""
        source, include = source_path(kernel, self.project), self.project.include
        files = {source.name: source, **{path.relative_to(include).as_posix(): path
                                         for path in headers_of(source, include)}}
        digest = hashlib.sha256("\n".join((self.target(kernel), *self.flags)).encode())
        for name, path in sorted(files.items()):
            data = without_comments(path.read_text(encoding="utf-8")).encode()
            digest.update(f"\n{name} {len(data)}\n".encode() + data)
        return digest.hexdigest()


def without_comments(text: str) -> str:
    """C++ less its comments, and less the blanks at the end of lines. Machine code has no lines of its source: it does
    not depend on these. A comment that ends in a backslash, which goes on in the next line, stays."""
    code = _COMMENT.sub(lambda found: " " if found[0][0] == "/" and found[0][-1] != "\\" else found[0], text)
    return "\n".join(line.rstrip() for line in code.splitlines() if line.strip())


def headers_of(source: Path, *folders: Path) -> set[Path]:
    """Every header of the include folders that a source includes, directly or not, each from the first folder that has
    it; BuildError for an unknown header."""
    found: set[Path] = set()
    pending = [source]
    while pending:
        file = pending.pop()
        for bracket, name in _INCLUDE.findall(file.read_text(encoding="utf-8")):
            header = next((folder / name for folder in folders if (folder / name).is_file()), None)
            if header and header not in found:
                found.add(header)
                pending.append(header)
            elif bracket == '"' and not header:
                raise BuildError(f"{file}: expected a header of {', '.join(map(str, folders))}, got {name!r}")
    return found
