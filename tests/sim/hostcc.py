"""The host compiler: which one, and how it compiles the engine and a kernel."""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import subprocess
import sys

_COMMON = ("-std=c++20", "-march=native", "-g1", "-fPIC", "-fno-exceptions", "-Wall")

ENGINE_FLAGS = (*_COMMON, "-O3", "-Wextra", "-ffp-contract=off", "-fno-semantic-interposition")

KERNEL_FLAGS = (
    *_COMMON, "-O1", "-x", "c++", "-include", "cuda_builtins.h", "-fno-strict-aliasing", "-Wno-unknown-pragmas",
    "-ffp-contract=fast",  # as nvcc: a * b + c is one FMA
    "-fsanitize=thread", "-fsanitize=alignment,bounds",  # what engine/access.cpp takes in
    "-ftrivial-auto-var-init=pattern",  # a register that nobody wrote holds -1.7e38, not what was left on the stack
)

_GCC_FLAGS = (
    "-fexpensive-optimizations",  # only then does -O1 make FMAs; -Og never does
    "-fno-tree-loop-distribute-patterns",  # makes memcpy of a loop, of which the engine would see nothing
    "--param=tsan-instrument-func-entry-exit=0",
)
_CLANG_FLAGS = (
    "-mllvm", "-tsan-instrument-func-entry-exit=0",
    "-mllvm", "-tsan-instrument-read-before-write",  # else a += b counts as a write only
    "-mllvm", "-pragma-unroll-threshold=1",  # compiles faster, and computes the same
    "-fno-sanitize=local-bounds", "-fno-sanitize-trap=alignment,bounds", "-fsanitize-recover=alignment,bounds",
    "-Wno-pass-failed",
)


@functools.cache
def compiler() -> tuple[str, ...]:
    """The command of the first C++ compiler there is: $CXX, g++, clang++, else that of the package ziglang."""
    for name in (os.environ.get("CXX"), "g++", "clang++"):
        if name and shutil.which(name.split()[0]):
            return tuple(name.split())
    if importlib.util.find_spec("ziglang"):
        return sys.executable, "-m", "ziglang", "c++"
    raise RuntimeError("the simulator needs a C++20 compiler: install g++ or clang++, set CXX, or `pip install "
                       "ziglang`")


@functools.cache
def is_clang() -> bool:
    """True where the compiler is clang, under whatever name; False where it is GCC."""
    return "clang" in _said([*compiler(), "--version"])


@functools.cache
def identity() -> str:
    """Facts that the compiler's output depends on: its options and version, the versions of both libraries, of the
    assembler and of the linker, and this processor."""
    macros = [*compiler(), "-std=c++20", "-march=native", "-x", "c++", "-include", "version", "-dM", "-E", os.devnull]
    return "\n".join((*compiler()[1:], _said(macros), _said([*compiler(), "--version"]),
                      *(_said([tool, "--version"]) for tool in ("as", "ld") if shutil.which(tool))))


def _said(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def kernel_flags() -> tuple[str, ...]:
    return KERNEL_FLAGS + (_CLANG_FLAGS if is_clang() else _GCC_FLAGS)
