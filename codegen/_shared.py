"""What codegen shares with the sage_aot package, imported without running ``sage_aot/__init__.py``.

That file imports torch, which a build environment does not have and code generation does not need; the modules below
need the standard library only. They are loaded under their real names, so a process that also imports sage_aot sees
one ``KernelSpec``, not two.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent
"""The folder that holds codegen/ and sage_aot/."""


@contextmanager
def _package_without_init() -> Iterator[None]:
    """Let a bare package stand in for sage_aot; it goes away again, so that a later ``import sage_aot`` is the real."""
    if "sage_aot" in sys.modules:
        yield
        return
    bare = ModuleType("sage_aot")
    bare.__path__ = [str(ROOT / "sage_aot")]
    sys.modules["sage_aot"] = bare
    try:
        yield
    finally:
        del sys.modules["sage_aot"]


with _package_without_init():
    from sage_aot._manifest import FILE_NAME, Arch, KernelRecord, MainLoop, Manifest
    from sage_aot._params import FIELDS, STRUCT_OF, layout_digest, offsets
    from sage_aot._spec import (AXES, IN_FLIGHT, KIND_AXES, KINDS, SIZES, VECTOR, KernelSpec, Tile, capability_of,
                                is_ptx, target_of)
    from sage_aot._version import __version__

__all__ = ["AXES", "FIELDS", "FILE_NAME", "IN_FLIGHT", "KINDS", "KIND_AXES", "ROOT", "SIZES", "STRUCT_OF", "VECTOR",
           "Arch", "KernelRecord", "KernelSpec", "MainLoop", "Manifest", "Tile", "__version__", "capability_of",
           "is_ptx", "layout_digest", "offsets", "target_of"]
