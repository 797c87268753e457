"""Outcomes of simulated calls, kept in codegen.cache by a hash of all that they follow from.

That is the compiled kernels and the engine, byte by byte; the Python that plans, makes and judges the calls; its
packages, the host compiler and this processor; and the calls themselves. A worker takes an outcome from the cache
instead of simulating. Where kernels changed, it makes a call again only as far as it takes to see that what they write
is the same (courses.py). What it found it hands to the tests' process, which keeps it once its test has passed: a
failure is found anew each time.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from courses import AsBefore, Course, Step, Writings
from fuzz_cases import Case
from fuzz_checks import Verdict
from launches import digest_of
from simbuild import PROJECT, Build, build_engine, kernels_of
from simulated import Simulated

from codegen.cache import VARIABLE, Cache
from sage_aot._kernels.spec import AttnSpec


@dataclass
class Outcomes:
    """Outcomes of one worker. `sources`: stamp.sources_key() as it was when the session began; `repeat`: simulate
    whatever is kept."""

    sources: str
    repeat: bool = False
    made: dict[str, bytes] = field(default_factory=dict)  # by key, since the last take()
    recalled: int = 0  # since then
    writings: Writings = field(default_factory=Writings)

    def of(self, subject: Simulated, spec: AttnSpec, calls: Sequence[object], simulate: Callable[[], Any]) -> Any:
        """Result of `simulate` for these calls of a kernel, as JSON holds it. AssertionError where a kernel runs that
        is none of the attention kernel's: the key would not tell of its changes."""
        key, cache = self._key(subject, spec, calls), Cache.of_environment()
        if not self.repeat and (kept := cache.read(key)):
            self.recalled += 1
            return json.loads(kept[0])
        subject.launched.clear()
        found = simulate()
        foreign = subject.launched.difference(kernels_of(spec))
        assert not foreign, f"expected kernels of {spec.name}, got {', '.join(sorted(foreign))}: simbuild.kernels_of"
        self.made[key] = json.dumps(found).encode()
        return found

    def check(self, subject: Simulated, spec: AttnSpec, case: Case, seed: int, planted: int = 0) -> tuple[Verdict, str]:
        """`subject.check(case, seed)`, or what it found the last time, where every launch writes what it wrote then.
        `planted`: the bug that is switched on."""
        call = _sha256(self.sources, *_settings(), _engine_digest(), *_facts(subject.build, spec), repr((case, seed)))
        key = _sha256(call, os.path.relpath(subject.build.folder, PROJECT.build), str(planted))
        course, last = self._course(call, key, functools.partial(_code_of, subject.build, planted))
        if last is None or course.repeated:
            last = self._made_again(subject, case, seed, course) or last
            self.writings.learn(call, course.steps)
        self.made[key] = json.dumps({"steps": course.whole(), "found": last}).encode()
        verdict, digest = last
        return Verdict(**verdict), digest

    def _course(self, call: str, key: str, code_of: Callable[[str], str]) -> tuple[Course, Any]:
        """The course of a call to come, and what was found the last time."""
        kept = None if self.repeat else Cache.of_environment().read(key)
        if kept is None:
            return Course(code_of), None
        last = json.loads(kept[0])
        before = [Step(*step) for step in last["steps"]]
        return Course(code_of, before, self.writings.to_repeat(call, before, code_of)), last["found"]

    def take(self) -> tuple[dict[str, bytes], int]:
        """Take what was simulated since the last time, and how often nothing had to be."""
        taken = self.made, self.recalled
        self.made, self.recalled = {}, 0
        return taken

    @staticmethod
    def _made_again(subject: Simulated, case: Case, seed: int, course: Course) -> Any:
        """Outcome of now, as JSON holds it; None where it is that of the last time."""
        try:
            verdict, digest = subject.check(case, seed, course)
        except AsBefore:
            return None
        return vars(verdict), digest

    def _key(self, subject: Simulated, spec: AttnSpec, calls: Sequence[object]) -> str:
        libraries = (_digest(subject.build.library(name)) for name in sorted(kernels_of(spec)))
        return _sha256(self.sources, *_settings(), _engine_digest(), *libraries, *map(repr, calls))


def _sha256(*decides: str) -> str:
    return hashlib.sha256("\n".join(decides).encode()).hexdigest()


@functools.cache
def _facts(build: Build, spec: AttnSpec) -> list[str]:
    """All that the package reads of a kernel's calls in a build's manifest, and so decides by."""
    manifest = build.manifest
    return [repr(value) for value in (sorted(manifest.kernels), manifest.structs,
                                      [manifest.kernels[name] for name in kernels_of(spec)])]


def _code_of(build: Build, planted: int, kernel: str) -> str:
    """Digest of a kernel's library, and the bug that is switched on in it."""
    own = planted if planted and planted in build.switches(kernel) else 0
    return f"{digest_of(build.library(kernel))} {own}"


@functools.cache
def _engine_digest() -> str:
    """Digest of the engine that this process has loaded or will load."""
    return _digest(build_engine())


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _settings() -> list[str]:
    """The variables of the environment that the package reads."""
    return [f"{name}={value}" for name, value in sorted(os.environ.items())
            if name.startswith("SAGE_AOT_") and name != VARIABLE]
