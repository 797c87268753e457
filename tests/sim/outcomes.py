"""Outcomes of simulated calls, kept in codegen.cache by a hash of all that they follow from.

That is the compiled kernels and the engine, byte by byte; the Python that plans, makes and judges the calls; its
packages, the host compiler and this processor; and the calls themselves. A worker takes an outcome from the cache
instead of simulating. What it simulated it hands to the tests' process, which keeps it once its test has passed: a
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

from simbuild import build_engine, kernels_of
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

    def take(self) -> tuple[dict[str, bytes], int]:
        """Take what was simulated since the last time, and how often nothing had to be."""
        taken = self.made, self.recalled
        self.made, self.recalled = {}, 0
        return taken

    def _key(self, subject: Simulated, spec: AttnSpec, calls: Sequence[object]) -> str:
        libraries = (_digest(subject.build.library(name)) for name in sorted(kernels_of(spec)))
        decides = self.sources, *_settings(), _engine_digest(), *libraries, *map(repr, calls)
        return hashlib.sha256("\n".join(decides).encode()).hexdigest()


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
