"""Sources → cubins with ninja: in parallel, and only what changed and what :mod:`codegen.cache` does not hold.

:mod:`codegen.compilation` defines the inputs.
"""

from __future__ import annotations

import io
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from ninja import BIN_DIR
from ninja.ninja_syntax import Writer, escape

from codegen.cache import Cache
from codegen.compilation import Compilation, headers_of
from codegen.errors import BuildError
from codegen.files import write_if_changed
from codegen.matrix import PlannedKernel
from codegen.project import ROOT
from codegen.render import source_path


def compile_all(kernels: tuple[PlannedKernel, ...], compilation: Compilation, jobs: int | None = None) -> None:
    """Bring the cubins of rendered kernels up to date; BuildError where one does not compile."""
    cache, keys = Cache.of_environment(), compilation.cache_keys(kernels)
    kept = {kernel for kernel, key in keys.items() if cache.restore(key, compilation.outputs(kernel))}
    if kept:
        print(f"{len(kept)} of {len(kernels)} kernels from {cache.folder}, compiled before", file=sys.stderr)
    others = tuple(kernel for kernel in kernels if kernel not in kept)
    if others:
        _run_ninja(others, compilation, keys, jobs)
        made = {kernel: [path.read_bytes() for path in compilation.outputs(kernel)] for kernel in others}
        # A file that changed meanwhile changed a key: under neither is it known what the compiler read.
        cache.keep({key: made[kernel] for kernel, key in compilation.cache_keys(others).items() if key == keys[kernel]})


def _run_ninja(kernels: tuple[PlannedKernel, ...], compilation: Compilation, keys: Mapping[PlannedKernel, str],
               jobs: int | None) -> None:
    ninja_file = compilation.folder / "build.ninja"
    # The versions go into a file, so that another version of a tool rebuilds: ninja compares the times of files.
    write_if_changed(compilation.folder / "compiler.txt", compilation.versions.encode())
    write_if_changed(ninja_file, ninja_text(kernels, compilation, keys).encode())
    command = [str(Path(BIN_DIR, "ninja")), "-f", str(ninja_file), *(["-j", str(jobs)] if jobs else [])]
    # In ROOT python -m finds codegen. ninja's progress goes to stderr: stdout is for the command's result.
    status = subprocess.run(command, cwd=ROOT, env=_environment(), stdout=sys.stderr, check=False).returncode
    if status != 0:
        raise BuildError(f"expected every kernel to compile, ninja exited with {status}: its output is above")


def ninja_text(kernels: tuple[PlannedKernel, ...], compilation: Compilation,
               keys: Mapping[PlannedKernel, str]) -> str:
    """build.ninja: one edge per batch of kernels, all paths absolute. A command ends with its kernels' keys, as a
    comment: ninja rebuilds where a command changed, though the times of files may not tell."""
    project, toolchain = compilation.project, compilation.toolchain
    text = io.StringIO()
    ninja = Writer(text, width=120)  # type: ignore[arg-type]  # its stub says a string; it writes to a file
    ninja.variable("ninja_required_version", "1.5")
    ninja.variable("builddir", str(compilation.folder))  # where ninja keeps its log
    command = f"{_quoted(_interpreter())} -m codegen.{toolchain} --target $target $kernels"
    ninja.rule("compile", f"{command} --include {_quoted(project.include)} -o {_quoted(compilation.folder)} # $keys",
               description=f"{toolchain} $target $names")
    for batch in _batches(kernels, compilation):
        sources, outputs = [source_path(kernel, project) for kernel in batch], map(compilation.outputs, batch)
        compiled, reports = zip(*outputs)
        headers = sorted(set().union(*(headers_of(source, project.include) for source in sources)))
        ninja.build([str(path) for path in compiled], "compile", [str(source) for source in sources],
                    implicit_outputs=[str(path) for path in reports],
                    implicit=[str(path) for path in (*headers, *compilation.command_files,
                                                     compilation.folder / "compiler.txt")],
                    variables={"target": compilation.target(batch[0]),
                               "names": " ".join(kernel.spec.name for kernel in batch),
                               "keys": " ".join(keys.get(kernel, "") for kernel in batch),
                               "kernels": " ".join(f"--kernel {_quoted(source)} {' '.join(kernel.spec.entries)}".strip()
                                                   for kernel, source in zip(batch, sources))})
    return text.getvalue()


_BATCH = 6
"""Kernels that one command compiles: so many that to start it takes little compared with them, so few that every
processor has work to the end."""


def _batches(kernels: tuple[PlannedKernel, ...], compilation: Compilation) -> Iterator[list[PlannedKernel]]:
    """Kernels of one kind for one target: they read the same headers. Quantizers take the longest and come first."""
    alike: dict[tuple[str, str], list[PlannedKernel]] = {}
    for kernel in sorted(kernels, key=lambda kernel: kernel.spec.kind != "quant"):
        alike.setdefault((kernel.spec.kind, compilation.target(kernel)), []).append(kernel)
    for found in alike.values():
        yield from (found[first:first + _BATCH] for first in range(0, len(found), _BATCH))


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
