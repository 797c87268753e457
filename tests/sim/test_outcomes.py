"""Calls that were simulated are not simulated again, unless something changed that decides what comes of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import outcomes
import pytest
import stamp
from outcomes import Outcomes
from simbuild import ROOT, Build, kernels_of
from simulated import Simulated
from stamp import Kept
from variants_on_cpu import variant
from workers import Timed

SPEC = variant("sm80_d64_qkint8_pvf16_accf32_full_vraw_qraw")
OTHER = variant("sm80_d64_qkint8_pvf16_accf32_causal_vraw_qraw")
CALLS = ["a call", "a call in another order"]
PASSED = [[{"variant": SPEC.name, "worst": {"output": 0.5}, "failure": None}, "digest"]]

MODULES = """
import json, sys
import workers, variants_on_cpu
print(json.dumps([module.__file__ for module in sys.modules.values() if getattr(module, "__file__", None)]))
"""


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SAGE_AOT_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def subject(tmp_path, monkeypatch) -> Simulated:
    """Kernels that are files of any content."""
    def made(self: Any, build: Build) -> None:
        self.build, self.launched = build, set()

    monkeypatch.setattr(Simulated, "__init__", made)
    monkeypatch.setattr(outcomes, "_engine_digest", lambda: "engine")
    build = Build(tmp_path)
    for name in {*kernels_of(SPEC), *kernels_of(OTHER)}:
        build.library(name).write_text(name)
    return Simulated(build)


def kept(subject: Simulated) -> None:
    """A session in which CALLS of SPEC are simulated, in a test that passes."""
    worker, session = Outcomes("sources"), Kept()
    assert worker.of(subject, SPEC, CALLS, lambda: PASSED) == PASSED
    session.passed(*worker.take())
    session.finish()


def simulates(subject: Simulated, worker: Outcomes | None = None, spec=SPEC, calls=CALLS) -> bool:
    """True where another session simulates these calls."""
    ran = []
    found = (worker or Outcomes("sources")).of(subject, spec, calls, lambda: ran.append(1) or PASSED)
    assert found == PASSED
    return bool(ran)


def test_what_passed_is_not_repeated(subject):
    assert simulates(subject)
    kept(subject)
    assert not simulates(subject)
    assert simulates(subject, Outcomes("sources", repeat=True))


@pytest.mark.parametrize("kernel", kernels_of(SPEC))
def test_another_kernel_is_simulated(subject, kernel):
    kept(subject)
    subject.build.library(kernel).write_text("compiled from a header that changed")
    assert simulates(subject)


def test_another_kernels_change_is_not(subject):
    kept(subject)
    subject.build.library(OTHER.name).write_text("compiled from a header that changed")
    assert not simulates(subject)


@pytest.mark.parametrize("calls", [CALLS[:1], [*CALLS, "one more"], CALLS[::-1], [1, *CALLS]])
def test_other_calls_are_simulated(subject, calls):
    kept(subject)
    assert simulates(subject, calls=calls)


def test_whatever_else_decides(subject, monkeypatch):
    kept(subject)
    assert simulates(subject, Outcomes("other sources"))
    assert simulates(subject, spec=OTHER)
    for variable in ("SAGE_AOT_EMULATE", "SAGE_AOT_KERNELS"):
        with monkeypatch.context() as patch:
            patch.setenv(variable, "other")
            assert simulates(subject)
    monkeypatch.setattr(outcomes, "_engine_digest", lambda: "another engine")
    assert simulates(subject)


def test_a_kernel_that_the_key_does_not_know_is_an_error(subject):
    with pytest.raises(AssertionError, match=f"expected kernels of {SPEC.name}, got sage_other"):
        Outcomes("sources").of(subject, SPEC, CALLS, lambda: subject.launched.add("sage_other"))


def test_nothing_is_kept_where_a_file_changed_meanwhile(subject, monkeypatch):
    worker, session = Outcomes("sources"), Kept()
    worker.of(subject, SPEC, CALLS, lambda: PASSED)
    session.passed(*worker.take())
    monkeypatch.setattr(stamp, "sources_key", lambda: "0" * 64)
    session.finish()
    assert simulates(subject)


@pytest.mark.parametrize("file", ["build_matrix.yaml", "codegen/render.py", "tests/gpu/fuzz_checks.py",
                                  "sage_aot/_backends/emulation/attention.py", "tests/sim/simulator.py"])
def test_a_change_of_a_source_changes_their_key(monkeypatch, file):
    before, read = stamp.sources_key(), Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: read(path) + (b" " if path == ROOT / file else b""))
    assert stamp.sources_key() != before


@pytest.mark.parametrize(("when", "passed", "expected"), [
    ("call", True, {"key": b"outcome"}), ("call", False, {}), ("setup", True, {})])
def test_the_outcome_of_a_test_is_kept_where_it_passes(pytestconfig, when, passed, expected):
    hooks = pytestconfig.pluginmanager.get_plugin(str(Path(__file__).with_name("conftest.py")))
    kept, of_session, of_test = Kept("sources"), pytest.Stash(), pytest.Stash()
    of_session[hooks._KEPT], of_test[hooks._TIMED] = kept, Timed(PASSED, 0.0, 0.0, {"key": b"outcome"}, 0)
    item = SimpleNamespace(config=SimpleNamespace(stash=of_session), stash=of_test,
                           get_closest_marker=lambda name: None)
    hook = hooks.pytest_runtest_makereport(item, SimpleNamespace(when=when))
    next(hook)
    with pytest.raises(StopIteration):
        hook.send(SimpleNamespace(passed=passed))
    assert kept.made == expected


def test_every_module_of_a_worker_is_watched():
    path = os.pathsep.join(str(ROOT / name) for name in ("", "tests/sim", "tests/gpu"))
    found = subprocess.run([sys.executable, "-c", MODULES], capture_output=True, text=True, check=True,
                           env={**os.environ, "PYTHONPATH": path}).stdout
    own = {Path(file) for file in json.loads(found) if Path(file).is_relative_to(ROOT) and "site-packages" not in file}
    assert len(own) > 40 and own <= set(stamp.watched(stamp.OF_OUTCOMES))
