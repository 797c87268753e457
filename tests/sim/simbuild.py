"""Sources of kernels, and the engine, → shared libraries, with ninja: in parallel, and only what changed and what
codegen.cache does not hold.

The compiler runs in the folder of the libraries, and every path that it is given is relative to that folder: a library
is the same in every checkout.

The include folder that kernels see is made of links: the headers of templates/include/sage, but for those of ptx/.
The meanings in include/sage/ptx replace these, so a wrapper without one is unknown to the compiler.
"""

from __future__ import annotations

import functools
import hashlib
import io
import os
import re
import shlex
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock
from hostcc import ENGINE_FLAGS, compiler, identity, kernel_flags
from ninja import BIN_DIR
from ninja.ninja_syntax import Writer, escape

from codegen.cache import Cache
from codegen.compilation import headers_of
from codegen.errors import BuildError
from codegen.files import write_if_changed
from codegen.kernel_info import KernelInfo, of_elf
from codegen.matrix import Matrix, PlannedKernel, read_matrix
from codegen.project import ROOT, Project
from codegen.render import render_all, source_path
from sage_aot._kernels.manifest import FILE_NAME, AttnRecord, KernelRecord, Manifest, records_by_name
from sage_aot._kernels.spec import OF_BACKWARD, SELECTION, AttnSpec, target_of
from sage_aot._launch.structs import vocabulary
from sage_aot._version import __version__

HERE = Path(__file__).parent
PROJECT = Project(ROOT, ROOT / "build" / "sim")
MEANINGS = HERE / "include"
ENGINE = HERE / "engine"
_ENTRY = ENGINE / "kernel_entry.cpp"
_SWITCH = re.compile(r"sim::planted\((\d+)\)")


class HostBuildError(Exception):
    """A kernel or the engine does not compile; the message is the compiler's."""


@dataclass(frozen=True)
class Source:
    """A library of kernels, and the file that defines them."""

    name: str
    path: Path
    entries: tuple[str, ...] = ()  # of the entry points those to compile; none: the one with the library's name


@dataclass(frozen=True)
class Build:
    """A folder of compiled kernels."""

    folder: Path

    @functools.cached_property
    def manifest(self) -> Manifest:
        return Manifest.read(self.folder)

    def library(self, name: str) -> Path:
        return self.folder / f"{name}.so"

    @functools.cache  # noqa: B019 - of a few folders
    def switches(self, name: str) -> frozenset[int]:
        """The planted bugs that a kernel of the matrix was compiled with (schemata.py)."""
        headers = headers_of(self.folder / "gen" / f"{name}.cu", self.folder / "include", MEANINGS)
        return frozenset(int(number) for header in headers for number in _SWITCH.findall(header.read_text()))


@functools.cache
def matrix() -> Matrix:
    """build_matrix.yaml of this tree, for copies of it too: they have their own headers only."""
    return read_matrix(PROJECT.matrix, PROJECT.templates)


def build_matrix(specs: Iterable[AttnSpec], project: Project = PROJECT, base: Build | None = None) -> Build:
    """Build these attention kernels of build_matrix.yaml and those that feed them, rendered as codegen renders them,
    with a manifest of them and of what this process built in the same folder before. `base`: a build of PROJECT to take
    those from whose headers are equal."""
    asked = _asked.setdefault(project.build, set())
    asked |= {spec.name for spec in specs}
    asked |= {name for kernel in matrix().kernels if kernel.spec.name in asked for name in _others(kernel)}
    kernels = [kernel for kernel in matrix().kernels if kernel.spec.name in asked]
    render_all(kernels, matrix(), project)
    sources = [Source(kernel.spec.name, source_path(kernel, project), kernel.spec.entries) for kernel in kernels]
    known = [source for source in sources if base and _is_known(source.path, project)]
    made = build([source for source in sources if source not in known], project.build, project.include)
    for source in known:
        _link(made.library(source.name), base.library(source.name))
    write_if_changed(made.folder / FILE_NAME, _manifest(kernels, made).to_text().encode())
    return made


def kernels_of(spec: AttnSpec) -> list[str]:
    """An attention kernel, those of its calls, and those of their backward passes."""
    kernel = next(kernel for kernel in matrix().kernels if kernel.spec == spec)
    return [spec.name, *_others(kernel)]


def _others(kernel: PlannedKernel) -> list[str]:
    if not isinstance(kernel.spec, AttnSpec):
        return []
    apart = [*(OF_BACKWARD if kernel.spec.trains else ()), *(SELECTION if kernel.spec.mask == "sparse" else ())]
    own = [kernel.spec.companion(kind).name for kind in apart]
    built = {other.spec.name for other in matrix().kernels}
    return [*kernel.companions, *(name for name in own if name in built)]


_asked: dict[Path, set[str]] = {}
"""Per folder the kernels that were built there in this process."""


def _is_known(source: Path, project: Project) -> bool:
    """True where a kernel's headers are those of PROJECT."""
    names = (header.relative_to(project.include) for header in headers_of(source, project.include))
    return all((project.include / name).read_bytes() == (PROJECT.include / name).read_bytes() for name in names)


def _manifest(kernels: list[PlannedKernel], made: Build) -> Manifest:
    """Manifest as far as launching and emulating go; the kernels say the rest themselves, as they do in cubins."""
    infos = {kernel: of_elf(made.library(kernel.spec.name).read_bytes()) for kernel in kernels}
    return Manifest(version=__version__, flags=kernel_flags(), retarget=None, vocabulary=vocabulary(), complete=False,
                    archs=matrix().archs, structs={info.params: info.layout for info in infos.values()},
                    kernels=records_by_name(_record(kernel, info) for kernel, info in infos.items()))


def _record(kernel: PlannedKernel, info: KernelInfo) -> KernelRecord:
    record = KernelRecord(
        spec=kernel.spec, family=kernel.family, file=f"{kernel.spec.name}.so", sha256="",
        target=target_of(kernel.spec.arch), least_driver=0, params=info.params, facts=info.facts, opcodes={},
        machine=None, compiler=" ".join(compiler()), source_sha256="")
    if not isinstance(kernel.spec, AttnSpec):
        return record
    return AttnRecord(**vars(record), tile=kernel.tile, companions=kernel.companions, main_loop=None)


def build(sources: Iterable[Source], folder: Path, headers: Path = PROJECT.include) -> Build:
    """Bring kernels up to date, on these headers; HostBuildError where one does not compile."""
    _link_headers(headers, folder / "include")
    _bring(folder, [_library_of(source, folder) for source in sources])
    return Build(folder)


def build_engine() -> Path:
    """Bring the engine up to date; it is the same for all kernels."""
    folder = PROJECT.build / "engine"
    sources = tuple(sorted(path for path in ENGINE.glob("*.cpp") if path != _ENTRY))
    flags = (*ENGINE_FLAGS, f"-I{_relative(MEANINGS, folder)}")
    _bring(folder, [_Library(folder / "engine.so", sources, sources, (ENGINE, MEANINGS), flags)])
    return folder / "engine.so"


@dataclass(frozen=True)
class _Library:
    """A shared library, and what the compiler makes it from."""

    path: Path
    units: tuple[Path, ...]  # translation units
    read: tuple[Path, ...]  # files that the compiler reads, in addition to the headers that they include
    include: tuple[Path, ...]  # where it finds those
    flags: tuple[str, ...]

    def key(self) -> str:
        """A sha256 of all that the library depends on."""
        digest = hashlib.sha256("\n".join((identity(), *self.flags, *_link_command()[1:])).encode())
        files = {*self.units, *self.read}.union(*(headers_of(file, *self.include) for file in self.read))
        for name, path in sorted((_relative(path, self.path.parent), path) for path in files):
            data = path.read_bytes()
            digest.update(f"\n{name} {len(data)}\n".encode() + data)
        return digest.hexdigest()


def _library_of(source: Source, folder: Path) -> _Library:
    include = source.path.parent, folder / "include", MEANINGS
    entries = " ".join(f"SIM_ENTRY({entry})" for entry in source.entries or (source.name,))
    flags = (*kernel_flags(), *(f"-I{_relative(path, folder)}" for path in include[1:]),
             "-include", _relative(source.path, folder), f"-DSIM_ENTRIES={entries}")
    read = MEANINGS / "cuda_builtins.h", source.path
    return _Library(folder / f"{source.name}.so", (_ENTRY,), read, include, flags)


def _relative(path: Path, folder: Path) -> str:
    return os.path.relpath(path, folder)


def _bring(folder: Path, libraries: list[_Library]) -> None:
    """Bring libraries of a folder up to date, in one process at a time: the tests' own and each of the workers bring
    the engine up to date."""
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / "lock"):
        cache = Cache.of_environment()
        try:
            keys = {library.path: library.key() for library in libraries}
        except BuildError as error:
            raise HostBuildError(str(error)) from error
        others = [library for library in libraries if not cache.restore(keys[library.path], [library.path])]
        if others:
            _run_ninja(folder, _ninja_text(others, folder, keys))
        made = {library: [library.path.read_bytes()] for library in others}
        cache.keep({keys[library.path]: blobs for library, blobs in made.items()
                    if library.key() == keys[library.path]})  # else a file changed while the compiler read it


def _run_ninja(folder: Path, text: str) -> None:
    write_if_changed(folder / "build.ninja", text.encode())
    found = subprocess.run([str(Path(BIN_DIR, "ninja")), "-k", "0"], cwd=folder, capture_output=True, text=True,
                           check=False)
    if found.returncode:
        raise HostBuildError(found.stdout + found.stderr)


def _link_headers(headers: Path, include: Path) -> None:
    """The tree that kernels include: the real headers, but meanings in the place of instructions."""
    for path in headers.rglob("*.cuh"):
        name = path.relative_to(headers)
        _link(include / name, _meanings(name) if path.parent.name == "ptx" else path)


def _meanings(name: Path) -> Path:
    """Header with the meanings of a header's wrappers; without any, each of them is unknown by name."""
    return MEANINGS / name if (MEANINGS / name).exists() else MEANINGS / "no_meanings.cuh"


def _link(link: Path, target: Path) -> None:
    link.parent.mkdir(parents=True, exist_ok=True)
    if link.is_symlink() and link.readlink() == target:
        return
    link.unlink(missing_ok=True)
    link.symlink_to(target)


def _ninja_text(libraries: Iterable[_Library], folder: Path, keys: Mapping[Path, str]) -> str:
    """build.ninja; a command ends with the library's key, as that of a cubin does (codegen/ninja.py)."""
    text = io.StringIO()
    ninja = Writer(text, width=120)
    # Places in debug information are relative to the library's folder, whatever its path: symbols.py.
    ninja.rule("object", _quoted(*compiler(), f"-fdebug-prefix-map={folder}=.")
               + " $flags -MMD -MF $out.d -MT $out -c $in -o $out # $key", depfile="$out.d", deps="gcc",
               description="$out")
    ninja.rule("library", f"{_quoted(*_link_command())} $in -o $out", description="$out")
    for library in libraries:
        objects = [f"{library.path.stem}.{unit.stem}.o" for unit in library.units]
        for unit, name in zip(library.units, objects):
            ninja.build(name, "object", _relative(unit, folder),
                        variables={"flags": _quoted(*library.flags), "key": keys[library.path]})
        ninja.build(library.path.name, "library", objects)
    return text.getvalue()


def _link_command() -> tuple[str, ...]:
    """Command that links without the run-time libraries of the sanitizers, for which the engine stands: no -fsanitize,
    and -O2, or else zig brings one unasked."""
    return *compiler(), "-shared", "-O2", "-Wl,-z,now"


def _quoted(*words: str) -> str:
    return escape(shlex.join(words))
