"""Choice of the compiler, and what is said where there is none."""

from __future__ import annotations

import importlib.util
import shutil
import sys

import hostcc
import pytest

ZIG = (sys.executable, "-m", "ziglang", "c++")


@pytest.fixture
def machine(monkeypatch):
    """Makes a machine with these programs, and perhaps the package ziglang."""
    def make(*programs: str, ziglang: bool = False, cxx: str | None = None) -> None:
        monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}" if name in programs else None)
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if ziglang else None)
        monkeypatch.delenv("CXX", raising=False)
        if cxx:
            monkeypatch.setenv("CXX", cxx)

    hostcc.compiler.cache_clear()
    yield make
    monkeypatch.undo()
    hostcc.compiler.cache_clear()


@pytest.mark.parametrize(("programs", "ziglang", "cxx", "expected"), [
    (("g++", "clang++"), True, None, ("g++",)),
    (("clang++",), True, None, ("clang++",)),
    (("g++", "clang++-18"), False, "clang++-18 -m64", ("clang++-18", "-m64")),
    (("g++",), False, "icpx", ("g++",)),
    ((), True, None, ZIG),
])
def test_first_of_those_there_are(machine, programs, ziglang, cxx, expected):
    machine(*programs, ziglang=ziglang, cxx=cxx)
    assert hostcc.compiler() == expected


def test_no_compiler(machine):
    machine()
    with pytest.raises(RuntimeError, match=r"install g\+\+ or clang\+\+, set CXX, or `pip install ziglang`"):
        hostcc.compiler()
