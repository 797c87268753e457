"""Targets, as compilers spell them: ``"sm_90"``, ``"sm_90a"``, for PTX ``"compute_80"``.

A target of machine code is a chip and a suffix. The matrix states the suffix, per row of tiles.
"""

from __future__ import annotations

import re

from codegen.errors import UsageError

_CHIP = re.compile(r"sm_\d{2,}", re.ASCII)
_SUFFIXED = re.compile(rf"({_CHIP.pattern})[a-z]", re.ASCII)


def chip_of(text: str) -> str:
    """The chip that a command names; kernels that need a suffix add it. UsageError for anything else."""
    if _CHIP.fullmatch(text):
        return text
    suffixed = _SUFFIXED.fullmatch(text)
    advice = f": pass {suffixed[1]}, kernels that need a suffix add it" if suffixed else ""
    raise UsageError(f"expected a chip such as sm_90, without a suffix, got {text!r}{advice}")


def is_ptx_target(target: str) -> bool:
    """True for a target that asks for PTX, which every later chip runs, and not for machine code."""
    return target.startswith("compute_")


def compiled_suffix(target: str) -> str:
    """Suffix of a kernel's file, once the kernel is compiled for a target."""
    return ".ptx" if is_ptx_target(target) else ".cubin"
