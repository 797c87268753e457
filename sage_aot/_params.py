"""The structs that kernels take by value, packed as templates/include/sage/params.cuh declares them.

A unit test compares every offset here with the header's own assertions.
"""

from __future__ import annotations

import hashlib
import struct

_TENSOR = "Qqqq"  # data, strides of batch, head, row in elements

FIELDS = {
    "StatsParams": (
        ("k", _TENSOR), ("v", _TENSOR), ("k_stats", "Q"), ("v_stats", "Q"), ("k_mean", "Q"), ("v_mean", "Q"),
        ("v_amax", "Q"), ("v_finite", "Q"), ("k_finite", "Q"), ("taken", "Q"), ("num_kv_heads", "i"),
        ("seqlen_kv", "i"), ("headdim", "i"), ("chunk_rows", "i"), ("num_chunks", "i"), ("dtype", "i"),
        ("aligned", "i"), ("smooth_k", "i"), ("smooth_v", "i"), ("merge", "i"),
    ),
    "QuantParams": (
        ("q", _TENSOR), ("k", _TENSOR), ("v", _TENSOR), ("k_mean", "Q"), ("v_mean", "Q"), ("v_amax", "Q"),
        ("v_finite", "Q"), ("q_hat", "Q"), ("kv_hat", "Q"), ("q_scale", "Q"), ("q_mean", "Q"), ("v_scale", "Q"),
        ("k_finite", "Q"), ("row_bias", "Q"), ("batch", "i"), ("num_q_heads", "i"), ("num_kv_heads", "i"),
        ("seqlen_q", "i"), ("seqlen_kv", "i"), ("headdim", "i"), ("q_tiles", "i"), ("kv_tiles", "i"),
        ("softmax_scale_log2", "f"), ("dtype", "i"), ("aligned", "i"), ("smooth_q", "i"), ("smooth_v", "i"),
        ("v_limit", "f"),
    ),
    "DeltaParams": (
        ("k", _TENSOR), ("q_mean", "Q"), ("k_mean", "Q"), ("delta_s", "Q"), ("first_head", "i"), ("num_heads", "i"),
        ("num_q_heads", "i"), ("num_kv_heads", "i"), ("seqlen_q", "i"), ("seqlen_kv", "i"), ("headdim", "i"),
        ("q_tiles", "i"), ("columns", "i"), ("dtype", "i"), ("aligned", "i"), ("block_m", "i"), ("block_n", "i"),
        ("is_causal", "i"),
    ),
    "AttnParams": (
        ("q_hat", "Q"), ("kv_hat", "Q"), ("q_scale", "Q"), ("v_scale", "Q"), ("v_mean", "Q"),
        ("k_finite", "Q"), ("v_finite", "Q"), ("row_bias", "Q"), ("delta_s", "Q"), ("out", _TENSOR), ("lse", "Q"),
        ("taken", "Q"), ("first_head", "i"), ("num_q_heads", "i"), ("num_kv_heads", "i"), ("seqlen_q", "i"),
        ("seqlen_kv", "i"), ("headdim", "i"), ("q_tiles", "i"), ("kv_tiles", "i"), ("dtype", "i"), ("num_heads", "i"),
    ),
}
"""Per struct, its fields in order with their :mod:`struct` codes."""

STRUCT_OF = {"stats": "StatsParams", "quant": "QuantParams", "delta": "DeltaParams", "attn": "AttnParams"}
"""Per kind of kernel, the struct that it takes."""

DTYPE_CODES = {"f16": 0, "bf16": 1}

_STRUCTS = {name: struct.Struct("<" + "".join(code for _, code in fields)) for name, fields in FIELDS.items()}


def pack(name: str, *values: object) -> bytes:
    """One struct from the values of its fields, in order; a tensor is four of them."""
    return _STRUCTS[name].pack(*values)


def layout_digest() -> str:
    """Names all structs in 16 hex digits. A kernel folder of another digest was built for other structs."""
    return hashlib.sha256(repr(FIELDS).encode()).hexdigest()[:16]


def offsets(name: str) -> dict[str, int]:
    """Byte offset of every field, and the struct's size under the key ``"sizeof"``."""
    result, position = {}, 0
    for field, code in FIELDS[name]:
        result[field] = position
        position += struct.calcsize("<" + code)
    return {**result, "sizeof": position}
