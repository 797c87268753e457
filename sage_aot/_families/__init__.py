"""The instruction families: how an attention kernel multiplies, what its tiles may be, how it is launched and emulated.

A family is a folder here, an entry of ``families`` in build_matrix.yaml (the template of each kind of kernel that the
family has), and the main loop that its template includes. A kernel's record names its family; nothing guesses it.
This package imports the standard library only; a family's module ``emulation`` needs torch and is imported by
sage_aot/_backends/emulation alone.
"""

from __future__ import annotations

from sage_aot._families.base import Family
from sage_aot._families.mma import MMA
from sage_aot._families.wgmma import WGMMA

FAMILIES: dict[str, Family] = {family.name: family for family in (MMA, WGMMA)}
