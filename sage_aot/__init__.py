"""Quantized attention from precompiled kernels: SageAttention2 without a compiler.

Exports that need torch (those in _HOMES) are imported at their first use. Code generation, which has the standard
library only, can therefore import the modules that it shares with the runtime.
``from sage_aot import attn`` registers the operators ``torch.ops.sage_aot``, ``from sage_aot import train_attn`` those
of the backward pass too.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

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
    from sage_aot._call.api import attn, supports
    from sage_aot._call.kv import QuantizedKV, quantize_kv
    from sage_aot._call.train import train_attn
    from sage_aot._call.varlen import attn_varlen
    from sage_aot._tools.explain import explain
    from sage_aot._tools.info import info

__all__ = [
    "ArgumentError",
    "CalibrationWarning",
    "CubinError",
    "LaunchError",
    "PtxWarning",
    "QuantizedKV",
    "SageAotError",
    "UnsupportedError",
    "__version__",
    "attn",
    "attn_varlen",
    "explain",
    "info",
    "quantize_kv",
    "supports",
    "train_attn",
]

_HOMES = {"QuantizedKV": "sage_aot._call.kv", "quantize_kv": "sage_aot._call.kv",
          "attn": "sage_aot._call.api", "attn_varlen": "sage_aot._call.varlen",
          "explain": "sage_aot._tools.explain", "info": "sage_aot._tools.info", "supports": "sage_aot._call.api",
          "train_attn": "sage_aot._call.train"}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'sage_aot' has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
