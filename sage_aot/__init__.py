"""Quantized attention from precompiled kernels: SageAttention2 without a compiler."""

from sage_aot._api import attn
from sage_aot._info import info
from sage_aot._version import __version__
from sage_aot.errors import ArgumentError, CubinError, LaunchError, SageAotError, UnsupportedError

__all__ = [
    "ArgumentError",
    "CubinError",
    "LaunchError",
    "SageAotError",
    "UnsupportedError",
    "__version__",
    "attn",
    "info",
]
