"""Stamp of what the simulator's tests have shown already, by everything as it is now.

Planted bugs test the tests: which of them are caught follows from the files below, the host compiler and torch. Their
last whole run leaves a stamp in codegen.cache, whose key is a hash of those. Where there is none, outcomes.py tells
which of them are simulated again; its keys hold the hash of a part of the same files.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

import bugs
import hostcc
from simbuild import ROOT

from codegen.cache import Cache

_PACKAGES = "jinja2", "numpy", "torch", "tree-sitter", "tree-sitter-cpp"
_WATCHED = ("build_matrix.yaml", "codegen/*.py", "sage_aot/**/*.py", "templates/**/*", "tests/sim/**/*",
            "tests/conftest.py", "tests/gpu/fuzz*.py", "tests/gpu/layout.py", "tests/gpu/selection_checks.py",
            "tests/gpu/training_checks.py")
_UNWATCHED = ("sage_aot/_cli", *(f"sage_aot/integrations/{host}.py"
                                for host in ("comfyui", "diffusers", "distributed", "transformers")))
OF_OUTCOMES = ("build_matrix.yaml", "codegen/*.py", "sage_aot/**/*.py",
                *(f"tests/sim/{name}.py" for name in ("courses", "hostcc", "launches", "outcomes", "simbuild",
                                                      "simulated", "simulator", "symbols", "variants_on_cpu",
                                                      "workers")),
                "tests/gpu/fuzz_*.py", "tests/gpu/layout.py", "tests/gpu/selection_checks.py",
                "tests/gpu/training_checks.py")
_SUFFIXES = {".py", ".yaml", ".jinja", ".cuh", ".cu", ".cpp", ".h", ".json"}


@dataclass
class Planted:
    """The tests of planted bugs in a session; under the key as it was when the session began."""

    key: str = field(default_factory=lambda: key())
    passed: set[str] = field(default_factory=set)

    @property
    def passed_before(self) -> bool:
        """True where all tests of planted bugs passed in a run with this key."""
        return Cache.of_environment().restore(self.key, [])

    def finish(self) -> None:
        """Leave the stamp where all of them passed, on files that are still the same."""
        if len(self.passed) == bugs.TESTS and key() == self.key:
            Cache.of_environment().keep({self.key: []})


@dataclass
class Kept:
    """Outcomes of simulated calls (outcomes.py) behind those tests of a session that passed."""

    sources: str = field(default_factory=lambda: sources_key())  # as it was when the session began
    made: dict[str, bytes] = field(default_factory=dict)
    recalled: int = 0
    again: int = 0  # tests whose calls were made

    def passed(self, made: Mapping[str, bytes], recalled: int) -> None:
        """Note the outcomes behind one of them."""
        self.made.update(made)
        self.recalled += recalled
        self.again += bool(made)

    def finish(self) -> None:
        """Keep what was simulated, on files that are still the same."""
        if self.made and self.sources == sources_key():
            Cache.of_environment().keep({key: [outcome] for key, outcome in self.made.items()})


def key() -> str:
    """A sha256 of all on which it depends whether a planted bug is caught."""
    return _key(watched())


def sources_key() -> str:
    """A sha256 of all on which outcomes of simulated calls depend, except the calls and the compiled kernels."""
    return _key(watched(OF_OUTCOMES))


def _key(files: Iterable[Path]) -> str:
    tools = platform.python_version(), hostcc.identity(), *map(version, _PACKAGES)
    digest = hashlib.sha256("\n".join(tools).encode())
    for path in files:
        data = path.read_bytes()
        digest.update(f"\n{path.relative_to(ROOT).as_posix()} {len(data)}\n".encode() + data)
    return digest.hexdigest()


def watched(patterns: Iterable[str] = _WATCHED) -> Iterator[Path]:
    """The files of the source tree among them."""
    unwatched = tuple(ROOT / name for name in _UNWATCHED)
    for path in sorted(path for pattern in patterns for path in ROOT.glob(pattern)):
        if path.suffix in _SUFFIXES and not any(path.is_relative_to(other) for other in unwatched):
            yield path
