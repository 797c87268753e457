"""Quantized attention from precompiled kernels, as a kernel of the Hugging Face hub.

The names of the package sage_aot; the functions of SageAttention, of which diffusers' backend ``sage_hub`` calls
``sageattn``; and two of FlashAttention, which transformers calls where its ``attn_implementation`` names this kernel.
"""

from __future__ import annotations

from sageattention.core import (
    sageattn,
    sageattn_qk_int8_pv_fp8_cuda,
    sageattn_qk_int8_pv_fp8_cuda_sm90,
    sageattn_qk_int8_pv_fp16_cuda,
    sageattn_qk_int8_pv_fp16_triton,
    sageattn_varlen,
)

from hub_package.flash_attn import flash_attn_func, flash_attn_varlen_func
from sage_aot._call.api import attn, supports
from sage_aot._call.kv import QuantizedKV, quantize_kv
from sage_aot._call.masks import BlockMask, block_mask
from sage_aot._call.train import train_attn, train_attn_varlen
from sage_aot._call.varlen import attn_varlen
from sage_aot._tools.explain import explain
from sage_aot._tools.info import info
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
from sage_aot.sparse import Sparse  # which makes `sparse` a name of this package, too

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
    "flash_attn_func",
    "flash_attn_varlen_func",
    "info",
    "quantize_kv",
    "sageattn",
    "sageattn_qk_int8_pv_fp16_cuda",
    "sageattn_qk_int8_pv_fp16_triton",
    "sageattn_qk_int8_pv_fp8_cuda",
    "sageattn_qk_int8_pv_fp8_cuda_sm90",
    "sageattn_varlen",
    "supports",
    "train_attn",
    "train_attn_varlen",
]
