"""Files of tests that a run of pytest leaves out on a machine without a GPU, and the processes that run tests."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

TESTS = Path(__file__).parents[1]
OF_A_GPU = sorted((TESTS / "gpu").glob("test_*.py"))


@pytest.mark.parametrize("path", OF_A_GPU, ids=lambda path: path.stem)
def test_a_file_of_gpu_tests_can_be_read_where_its_tests_are_left_out(path, monkeypatch):
    monkeypatch.syspath_prepend(str(path.parent))
    spec = importlib.util.spec_from_file_location(f"read_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    marks = module.pytestmark if isinstance(module.pytestmark, list) else [module.pytestmark]
    assert pytest.mark.gpu.mark in [mark.mark for mark in marks]


def pytest_says(*arguments):
    """Output of pytest where torch sees no GPU."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    found = subprocess.run([sys.executable, "-m", "pytest", "--collect-only", "-q", *arguments], cwd=TESTS.parent,
                           env=environment, capture_output=True, text=True)
    return found.returncode, found.stdout + found.stderr


@pytest.mark.parametrize(("arguments", "expected"), [
    (["tests/gpu"], "no tests collected in"), (["tests/gpu/test_kv.py"], "no tests collected (")])
def test_gpu_tests_are_left_out_without_a_gpu(arguments, expected):
    status, said = pytest_says(*arguments)
    assert status == pytest.ExitCode.NO_TESTS_COLLECTED and expected in said


def test_gpu_tests_that_are_asked_for_are_an_error_without_a_gpu():
    status, said = pytest_says("-m", "gpu", "tests/gpu/test_kv.py")
    assert status == pytest.ExitCode.USAGE_ERROR and "`-m gpu` was asked for, but torch sees no CUDA device" in said


# --- processes --------------------------------------------------------------------------------------------------------

A_FOLDER = """
import os, pytest
from session import LINES

@pytest.fixture(scope="session", autouse=True)
def shared(request):
    yield
    request.config.stash[LINES] += [f"a line of {os.getpid()}", f"a line of {os.getpid()}"]
"""
TESTS_OF_A_FILE = """
import os, pytest

@pytest.mark.parametrize("number", range(4))
def test_of_a_number(number):
    print(f"[{__file__} in {os.getpid()}]")
    assert number < 4
"""


@pytest.fixture
def conftest(pytestconfig):
    return pytestconfig.pluginmanager.get_plugin(str(TESTS / "conftest.py"))


@pytest.mark.parametrize(("arguments", "maxfail", "processors", "expected"), [
    (["tests"], 0, 2, 2), (["tests/unit"], 0, 64, 4), (["tests"], 0, 1, 1), (["tests"], 1, 64, 0),
    (["tests/unit/test_mask.py"], 0, 2, 0)])
def test_how_many_processes_run_tests(conftest, monkeypatch, arguments, maxfail, processors, expected):
    monkeypatch.setattr(conftest, "no_gpu", lambda: "no GPU")
    monkeypatch.setenv("PYTEST_XDIST_AUTO_NUM_WORKERS", str(processors))
    option = SimpleNamespace(markexpr="", keyword="", maxfail=maxfail, numprocesses="auto")
    found = conftest.pytest_xdist_auto_num_workers(SimpleNamespace(option=option, args=arguments))
    assert found == expected


def test_pytests_own_process_runs_tests_on_a_machine_with_a_gpu(conftest, monkeypatch):
    monkeypatch.setattr(conftest, "no_gpu", lambda: None)
    option = SimpleNamespace(markexpr="", keyword="", maxfail=0, numprocesses="auto")
    assert conftest.pytest_xdist_auto_num_workers(SimpleNamespace(option=option, args=["tests"])) == 0


def test_processes_share_a_file_of_gpu_tests(conftest):
    """tests/gpu/test_attention.py has nine of ten tests of tests/gpu."""
    def parts(path):
        return {conftest._ByFile._split_scope(None, f"{path}::test_of_a_number[{i}]") for i in range(1000)}

    assert len(parts("tests/gpu/test_attention.py")) == conftest.GPU_PARTS
    assert parts("tests/gpu/test_attention.py").isdisjoint(parts("tests/gpu/test_kv.py"))
    assert len(parts("tests/unit/test_mask.py")) == 1


def test_a_process_runs_whole_files_and_says_its_lines(tmp_path):
    for name in ("conftest.py", "session.py", "../pyproject.toml"):
        shutil.copy(TESTS / name, tmp_path)
    for folder in ("sim", "unit"):
        (tmp_path / folder).mkdir()
        for name in ("one", "two"):
            (tmp_path / folder / f"test_{folder}_{name}.py").write_text(TESTS_OF_A_FILE)
    (tmp_path / "sim/conftest.py").write_text(A_FOLDER)
    said = subprocess.run([sys.executable, "-m", "pytest", "-n", "2", "-rP", "-p", "no:cacheprovider", str(tmp_path)],
                          cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert "16 passed" in said
    processes = {}
    for path, process in re.findall(r"^\[(\S+) in (\d+)\]$", said, re.MULTILINE):
        processes.setdefault(Path(path).relative_to(tmp_path).as_posix(), set()).add(process)
    assert len(processes) == 4 and all(len(found) == 1 for found in processes.values())
    assert processes["sim/test_sim_one.py"] == processes["sim/test_sim_two.py"]
    assert len(set().union(*processes.values())) == 2
    assert {*re.findall(r"^a line of (\d+)$", said, re.MULTILINE)} == processes["sim/test_sim_one.py"]
    assert said.count("a line of") == 1
