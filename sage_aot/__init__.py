"""Quantized attention from precompiled kernels: SageAttention2 and SageAttention3 without a compiler.

Exports that need torch (those in _HOMES) are imported at their first use. Code generation, which has the standard
library only, can therefore import the modules that it shares with the runtime.
``import sage_aot`` registers the operators ``torch.ops.sage_aot`` where torch is imported, else right after torch is,
so that torch.export.load and torch.jit.load find them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from sage_aot._imports import is_being_imported, when_imported
from sage_aot._version import __version__
from sage_aot.errors import (
    ArgumentError,
    CalibrationWarning,
    CubinError,
    LaunchError,
    PtxWarning,
    SageAotError,
    UnsupportedError,
)

if TYPE_CHECKING:
    from sage_aot import sparse as sparse
    from sage_aot._call.api import attn, supports
    from sage_aot._call.kv import QuantizedKV, quantize_kv
    from sage_aot._call.masks import BlockMask, block_mask
    from sage_aot._call.sparse import Sparse
    from sage_aot._call.train import train_attn, train_attn_varlen
    from sage_aot._call.varlen import attn_varlen
    from sage_aot._tools.explain import explain
    from sage_aot._tools.info import info

__all__ = [
    "ArgumentError",
    "BlockMask",
    "CalibrationWarning",
    "CubinError",
    "LaunchError",
    "PtxWarning",
    "QuantizedKV",
    "SageAotError",
    "Sparse",
    "UnsupportedError",
    "__version__",
    "attn",
    "attn_varlen",
    "block_mask",
    "explain",
    "info",
    "quantize_kv",
    "supports",
    "train_attn",
    "train_attn_varlen",
]

_HOMES = {"QuantizedKV": "sage_aot._call.kv", "quantize_kv": "sage_aot._call.kv",
          "BlockMask": "sage_aot._call.masks", "block_mask": "sage_aot._call.masks",
          "Sparse": "sage_aot._call.sparse", "sparse": "sage_aot.sparse",
          "attn": "sage_aot._call.api", "attn_varlen": "sage_aot._call.varlen",
          "explain": "sage_aot._tools.explain", "info": "sage_aot._tools.info", "supports": "sage_aot._call.api",
          "train_attn": "sage_aot._call.train", "train_attn_varlen": "sage_aot._call.train"}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'sage_aot' has no attribute {name!r}")
    import_module("torch")  # before a module of the package is half imported
    _register()
    module = import_module(_HOMES[name])
    found = globals()[name] = module if _HOMES[name] == f"{__name__}.{name}" else getattr(module, name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _register() -> None:
    """Register the operators; not while one of their own modules imports torch, whose import does so in part."""
    if not is_being_imported("sage_aot._call", "sage_aot._problem"):
        import_module("sage_aot._call.train")


when_imported("torch", _register)
