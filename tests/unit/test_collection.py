"""Files of tests that a run of pytest leaves out on a machine without a GPU."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

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
