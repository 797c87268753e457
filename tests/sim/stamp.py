"""Whether the planted bugs were all caught already, by everything as it is now.

Planted bugs test the tests: which of them are caught follows from the files below, the host compiler and torch. Their
last whole run leaves a stamp in codegen.cache, whose key is a hash of those.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

import bugs
import hostcc
from simbuild import ROOT

from codegen.cache import Cache

_PACKAGES = "jinja2", "numpy", "torch", "tree-sitter", "tree-sitter-cpp"
_WATCHED = ("build_matrix.yaml", "codegen/*.py", "sage_aot/**/*.py", "templates/**/*", "tests/sim/**/*",
            "tests/conftest.py", "tests/gpu/fuzz*.py", "tests/gpu/layout.py", "tests/gpu/training_checks.py")
_UNWATCHED = ("sage_aot/integrations", "sage_aot/_cli")
_SUFFIXES = {".py", ".yaml", ".jinja", ".cuh", ".cu", ".cpp", ".h"}


@dataclass
class Planted:
    """The tests of planted bugs in a session; under the key as it was when the session began."""

    key: str = field(default_factory=lambda: key())
    passed: set[str] = field(default_factory=set)
    left_out: int = 0

    @property
    def passed_before(self) -> bool:
        """Whether all of them passed in a run with this key."""
        return Cache.of_environment().restore(self.key, [])

    def finish(self) -> None:
        """Leave the stamp where all of them passed, on files that are still the same."""
        if len(self.passed) == bugs.TESTS and key() == self.key:
            Cache.of_environment().keep({self.key: []})


def asked_by_name(mark: str, keyword: str, arguments: Iterable[str]) -> bool:
    """Whether a command line of pytest asks for tests by more than their folder: by -m, -k or the file."""
    return bool(mark or keyword or any("test_mutations" in argument for argument in arguments))


def key() -> str:
    """A sha256 of all on which it depends whether a planted bug is caught."""
    tools = platform.python_version(), hostcc.identity(), *map(version, _PACKAGES)
    digest = hashlib.sha256("\n".join(tools).encode())
    for path in watched():
        data = path.read_bytes()
        digest.update(f"\n{path.relative_to(ROOT).as_posix()} {len(data)}\n".encode() + data)
    return digest.hexdigest()


def watched() -> Iterator[Path]:
    """The files of the source tree among them."""
    unwatched = tuple(ROOT / name for name in _UNWATCHED)
    for path in sorted(path for pattern in _WATCHED for path in ROOT.glob(pattern)):
        if path.suffix in _SUFFIXES and not any(path.is_relative_to(other) for other in unwatched):
            yield path
