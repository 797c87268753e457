"""Tests of kernels that a narrowed build lacks are left out, counted and told; under CI they fail."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from sage_aot._call.backends import default_library
from sage_aot._kernels.manifest import records_by_name

TESTS = '''
import pytest, sage_aot, torch
from sage_aot._call.backends import default_library

Q = torch.randn(1, 1, 8, 64)

def test_of_a_kernel_that_is_built():
    sage_aot.attn(Q, Q, Q)

@pytest.mark.parametrize("arch", ["sm80", "sm89"])
def test_of_an_arch_in_the_environment(monkeypatch, arch):
    monkeypatch.setenv("SAGE_AOT_EMULATE", arch)
    sage_aot.attn(Q, Q, Q)

def test_that_looks_up():
    assert default_library().manifest.attention("sm90")

@pytest.mark.kernels("sm120")
def test_that_is_marked():
    assert any(record.spec.arch == "sm120" for record in default_library().manifest.every_attention())

@pytest.mark.kernels("sm89")
@pytest.mark.parametrize("arch", ["sm80"])
def test_that_is_wrong(arch):
    assert default_library().manifest.attention("sm89") == ()

def test_that_wants_what_no_kernel_of_the_build_has():
    sage_aot.attn(Q, Q, Q, qk="nvfp4")
'''


@pytest.fixture
def run(tmp_path):
    """Runs TESTS on the records of sm89 alone; returns what pytest prints, and the outcomes by their number."""
    whole = default_library().manifest
    kept = [record for record in whole.kernels.values() if record.spec.arch == "sm89"]
    narrowed = dataclasses.replace(whole, complete=False, kernels=records_by_name(kept))
    (tmp_path / "manifest.json").write_bytes(narrowed.to_text().encode())
    for name in ("conftest.py", "session.py", "../pyproject.toml"):
        shutil.copy(Path(__file__).parents[1] / name, tmp_path)
    (tmp_path / "test_some.py").write_text(TESTS)

    def run(*arguments: str, **environment: str) -> tuple[str, dict[str, int]]:
        variables = {name: value for name, value in os.environ.items() if name != "CI"}
        found = subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path),
                                *arguments],
                               capture_output=True, text=True, check=False,
                               env={**variables, "SAGE_AOT_KERNELS": str(tmp_path), **environment})
        outcomes = re.findall(r"(\d+) (passed|failed|skipped)", found.stdout.splitlines()[-1])
        return found.stdout, {outcome: int(count) for count, outcome in outcomes}

    return run


def test_what_needs_another_arch_is_left_out_and_told(run):
    said, outcomes = run()
    assert outcomes == {"passed": 2, "failed": 2, "skipped": 3}, said
    assert [name for name in ("test_that_is_wrong", "test_that_wants") if f"::{name}" in said] == [
        "test_that_is_wrong", "test_that_wants"]
    line, = re.findall(r"^3 tests are left out: they need kernels that a build of sm89 alone lacks \((.*)\)\. "
                       r"`python -m codegen build` builds all\.$", said, re.MULTILINE)
    assert set(line.split(", ")) == {"1 of sm80", "1 of sm90", "1 of sm120"}


def test_under_ci_nothing_is(run):
    said, outcomes = run("-n", "0", CI="true")
    assert outcomes == {"passed": 2, "failed": 5} and "left out" not in said
