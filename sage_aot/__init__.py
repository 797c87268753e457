"""Quantized attention from precompiled kernels: SageAttention2 without a compiler."""

from sage_aot._api import attn
from sage_aot._explain import explain
from sage_aot._info import info
from sage_aot._version import __version__
from sage_aot.errors import ArgumentError, CubinError, LaunchError, PtxWarning, SageAotError, UnsupportedError

__all__ = [
    "ArgumentError",
    "CubinError",
    "LaunchError",
    "PtxWarning",
    "SageAotError",
    "UnsupportedError",
    "__version__",
    "attn",
    "explain",
    "info",
]
