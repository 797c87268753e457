"""Planted bugs run where anything changed that decides whether they are caught, or where somebody asks for them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import bugs
import hostcc
import pytest
import stamp
from session import names_tests
from simbuild import ROOT
from stamp import Planted

IMPORTS = """
import json, sys
import test_mutations
print(json.dumps([module.__file__ for module in sys.modules.values() if getattr(module, "__file__", None)]))
"""


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SAGE_AOT_CACHE", str(tmp_path / "cache"))


def whole_run() -> Planted:
    return Planted(passed={f"test {i}" for i in range(bugs.TESTS)})


def test_a_whole_run_leaves_a_stamp():
    assert not Planted().passed_before
    whole_run().finish()
    assert Planted().passed_before


def test_no_other_run_does(monkeypatch):
    Planted(passed={f"test {i}" for i in range(bugs.TESTS - 1)}).finish()
    assert not Planted().passed_before
    changed = whole_run()
    with monkeypatch.context() as patch:
        patch.setattr(stamp, "key", lambda: "0" * 64)  # a file was edited while the tests ran
        changed.finish()
    assert not Planted().passed_before


@pytest.mark.parametrize("file", [
    "templates/include/sage/types.cuh", "templates/attn_mma.cu.jinja", "build_matrix.yaml", "codegen/render.py",
    "tests/sim/engine/sums.h", "tests/sim/include/sage/ptx/math.cuh", "tests/sim/mutations.py",
    "tests/gpu/fuzz_checks.py", "sage_aot/_backends/emulation/attention.py", "sage_aot/_launch/plan.py"])
def test_a_change_of_what_decides_runs_them(monkeypatch, file):
    whole_run().finish()
    assert ROOT / file in set(stamp.watched())
    read = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: read(path) + (b" " if path == ROOT / file else b""))
    assert not Planted().passed_before


def test_another_compiler_runs_them(monkeypatch):
    whole_run().finish()
    monkeypatch.setattr(hostcc, "identity", lambda: "another")
    assert not Planted().passed_before


def test_every_module_that_the_tests_import_is_watched():
    path = os.pathsep.join(str(ROOT / name) for name in ("", "tests/sim", "tests/gpu"))
    found = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, check=True,
                           env={**os.environ, "PYTHONPATH": path}).stdout
    own = {Path(file) for file in json.loads(found) if Path(file).is_relative_to(ROOT) and "site-packages" not in file}
    assert len(own) > 50 and own <= set(stamp.watched())


@pytest.mark.parametrize(("mark", "keyword", "arguments", "expected"), [
    ("", "", ["tests"], False), ("", "", [], False), ("planted", "", [], True), ("", "dropped", ["tests/sim"], True),
    ("", "", ["tests/sim/test_mutations.py::test_bug_is_caught[one]"], True),
    ("", "", ["tests/sim/test_every_kernel.py"], True), ("", "", ["/somewhere/sage.python/tests"], False)])
def test_who_asks_for_them_by_name(mark, keyword, arguments, expected):
    assert names_tests(mark, keyword, arguments) is expected


@pytest.mark.parametrize(("arguments", "runs"), [([], False), (["-m", "planted"], True)])
def test_they_run_where_somebody_asks_for_them(arguments, runs):
    whole_run().finish()
    found = subprocess.run([sys.executable, "-m", "pytest", "--collect-only", "-q", "tests/sim", *arguments], cwd=ROOT,
                           capture_output=True, text=True, check=True).stdout
    assert found.count("test_mutations.py::") == (bugs.TESTS if runs else 2)  # two tests plant nothing
    said = re.search(r"^(\d+) tests of planted bugs are left out: .*`-m planted` runs them\.$", found, re.MULTILINE)
    assert (said and int(said[1])) == (None if runs else bugs.TESTS)
