"""Sources → cubins with ninja: in parallel, and only what changed. :mod:`codegen.compilation` defines the inputs."""

from __future__ import annotations

import io
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from ninja import BIN_DIR
from ninja.ninja_syntax import Writer, escape

from codegen import nvdisasm
from codegen.compilation import Compilation, headers_of
from codegen.errors import BuildError
from codegen.files import write_if_changed
from codegen.matrix import PlannedKernel
from codegen.project import ROOT
from codegen.render import source_path

_COMMAND_FILES = ("compiler.py", "census.py", "nvdisasm.py", "kernel_info.py", "targets.py")
"""Files of codegen, beside the toolchain's own, on which the outputs of a compile command depend."""


def compile_all(kernels: tuple[PlannedKernel, ...], compilation: Compilation, jobs: int | None = None) -> None:
    """Bring the cubins of rendered kernels up to date; BuildError where one does not compile."""
    ninja_file = compilation.folder / "build.ninja"
    # The versions go into a file, so that another version of a tool rebuilds: ninja compares the times of files.
    versions = f"{compilation.version}\n{nvdisasm.version()}\n"
    write_if_changed(compilation.folder / "compiler.txt", versions.encode())
    write_if_changed(ninja_file, ninja_text(kernels, compilation).encode())
    command = [str(Path(BIN_DIR, "ninja")), "-f", str(ninja_file), *(["-j", str(jobs)] if jobs else [])]
    # In ROOT python -m finds codegen. ninja's progress goes to stderr: stdout is for the command's result.
    status = subprocess.run(command, cwd=ROOT, env=_environment(), stdout=sys.stderr, check=False).returncode
    if status != 0:
        raise BuildError(f"expected every kernel to compile, ninja exited with {status}: its output is above")


def ninja_text(kernels: tuple[PlannedKernel, ...], compilation: Compilation) -> str:
    """build.ninja: one edge per kernel, all paths absolute."""
    project, toolchain = compilation.project, compilation.toolchain
    text = io.StringIO()
    ninja = Writer(text, width=120)  # type: ignore[arg-type]  # its stub says a string; it writes to a file
    ninja.variable("ninja_required_version", "1.5")
    ninja.variable("builddir", str(compilation.folder))  # where ninja keeps its log
    ninja.rule("compile", f"{_quoted(_interpreter())} -m codegen.{toolchain} $in --target $target $entries "
                          f"--include {_quoted(project.include)} -o $out", description=f"{toolchain} $target $name")
    # The flags stand in the toolchain's module, whose file is an input: a change of the flags rebuilds.
    commands = [Path(__file__).with_name(name) for name in (f"{toolchain}.py", *_COMMAND_FILES)]
    for kernel in kernels:
        source, compiled = source_path(kernel, project), compilation.compiled(kernel)
        headers = sorted(headers_of(source, project.include))
        ninja.build([str(compiled)], "compile", [str(source)], implicit_outputs=[str(compiled.with_suffix(".json"))],
                    implicit=[str(path) for path in (*headers, *commands, compilation.folder / "compiler.txt")],
                    variables={"target": compilation.target(kernel), "name": kernel.spec.name,
                               "entries": " ".join(f"--entry {entry}" for entry in kernel.spec.entries)})
    return text.getvalue()


def _quoted(path: object) -> str:
    """A path in a command of build.ninja."""
    return escape(shlex.quote(str(path)))


def _interpreter() -> str:
    """The name of this Python in commands: `python` in all environments, since ninja rebuilds where a command changed.

    :func:`_environment` lets ninja find `python`. Where the folder of this Python has no such file, the name is the
    path of this Python."""
    plain = shutil.which("python", path=str(Path(sys.executable).parent))
    return "python" if plain and Path(plain).samefile(sys.executable) else sys.executable


def _environment() -> dict[str, str]:
    """The environment of ninja: the folder of this Python comes first on the PATH."""
    return {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"}
