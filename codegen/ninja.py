"""Sources → cubins with ninja: in parallel, and only what changed.

A :class:`Compilation` is one folder of cubins: own targets or a foreign one, by one toolchain. NVRTC writes no
dependency files, so the headers that a source includes are found here, by reading the #include lines.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from ninja import BIN_DIR
from ninja.ninja_syntax import Writer, escape

from codegen import nvcc, nvdisasm, nvrtc
from codegen._shared import ROOT, is_ptx, target_of
from codegen.compiler import Report
from codegen.errors import BuildError
from codegen.files import write_if_changed
from codegen.matrix import PlannedKernel
from codegen.project import Project
from codegen.render import source_path

TOOLCHAINS = {"nvrtc": nvrtc, "nvcc": nvcc}
"""Modules with FLAGS, version() and a command line that compiles one source."""

_COMMAND_FILES = ("compiler.py", "census.py", "nvdisasm.py")
"""What decides about the outputs of a compile command beside the toolchain's own file."""

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
        return (self.retarget or target_of(kernel.spec.arch)) + kernel.suffix

    def compiled(self, kernel: PlannedKernel) -> Path:
        """The cubin, or the PTX."""
        return self.folder / f"{kernel.spec.name}.{'ptx' if is_ptx(kernel.spec.arch) else 'cubin'}"

    def report(self, kernel: PlannedKernel) -> Report:
        """What the compiler made of a kernel that is built."""
        return Report.read(self.compiled(kernel))

    def source_sha256(self, kernel: PlannedKernel) -> str:
        """Of all that the compiler is given for a rendered kernel: each file by its name, the target and the flags."""
        source, include = source_path(kernel, self.project), self.project.include
        files = {source.name: source, **{path.relative_to(include).as_posix(): path
                                         for path in headers_of(source, include)}}
        digest = hashlib.sha256("\n".join((self.target(kernel), *self.flags)).encode())
        for name, path in sorted(files.items()):
            data = path.read_bytes()
            digest.update(f"\n{name} {len(data)}\n".encode() + data)
        return digest.hexdigest()


def compile_all(kernels: tuple[PlannedKernel, ...], compilation: Compilation, jobs: int | None = None) -> None:
    """Bring the cubins of rendered kernels up to date; BuildError where one does not compile."""
    ninja_file = compilation.folder / "build.ninja"
    # A file, so that another version of a tool rebuilds: ninja compares times, and the flags stay the same.
    versions = f"{compilation.version}\n{nvdisasm.version()}\n"
    write_if_changed(compilation.folder / "compiler.txt", versions.encode())
    write_if_changed(ninja_file, ninja_text(kernels, compilation).encode())
    command = [str(Path(BIN_DIR, "ninja")), "-f", str(ninja_file), *(["-j", str(jobs)] if jobs else [])]
    # In ROOT python -m finds codegen; progress is no part of what a command prints.
    status = subprocess.run(command, cwd=ROOT, env=_environment(), stdout=sys.stderr, check=False).returncode
    if status != 0:
        raise BuildError(f"expected every kernel to compile, ninja exited with {status}: its output is above")


def ninja_text(kernels: tuple[PlannedKernel, ...], compilation: Compilation) -> str:
    """build.ninja: one edge per kernel, all paths absolute."""
    project, toolchain = compilation.project, compilation.toolchain
    text = io.StringIO()
    ninja = Writer(text, width=120)
    ninja.variable("ninja_required_version", "1.5")
    ninja.variable("builddir", str(compilation.folder))  # of ninja's log
    ninja.rule("compile", f"{_quoted(_interpreter())} -m codegen.{toolchain} $in --target $target "
                          f"--include {_quoted(project.include)} -o $out", description=f"{toolchain} $target $name")
    # The flags stand in the toolchain's module, so a change of them rebuilds as a change of that file.
    commands = [Path(__file__).with_name(name) for name in (f"{toolchain}.py", *_COMMAND_FILES)]
    for kernel in kernels:
        source, compiled = source_path(kernel, project), compilation.compiled(kernel)
        headers = sorted(headers_of(source, project.include))
        ninja.build(str(compiled), "compile", str(source), implicit_outputs=[str(compiled.with_suffix(".json"))],
                    implicit=[str(path) for path in (*headers, *commands, compilation.folder / "compiler.txt")],
                    variables={"target": compilation.target(kernel), "name": kernel.spec.name})
    return text.getvalue()


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


def _quoted(path: object) -> str:
    """A path in a command of build.ninja."""
    return escape(shlex.quote(str(path)))


def _interpreter() -> str:
    """This Python in a command: by a name that all environments have, as ninja rebuilds what another command made.

    :func:`_environment` lets ninja find it; where no `python` stands beside this one it is named by its path.
    """
    plain = shutil.which("python", path=str(Path(sys.executable).parent))
    return "python" if plain and Path(plain).samefile(sys.executable) else sys.executable


def _environment() -> dict[str, str]:
    """Of ninja: the folder of this Python comes first on the PATH."""
    return {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"}
