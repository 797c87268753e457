"""From a caller's arguments to a :class:`Problem`: every check, and nothing that touches a device."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from sage_aot._spec import AXES
from sage_aot.errors import ArgumentError

DTYPES = {torch.float16: "f16", torch.bfloat16: "bf16"}
LAYOUTS = {"HND": "[batch, heads, seq, headdim]", "NHD": "[batch, seq, heads, headdim]"}
MAX_HEADDIM = max(AXES["headdim"])
MAX_SCALE = 1e6
"""Kernels keep scores and their scales in float32, and take no score below −1e30 for one that they saw."""


@dataclass(frozen=True)
class Problem:
    """What one call computes, apart from the tensors themselves."""

    batch: int
    num_q_heads: int
    num_kv_heads: int
    seqlen_q: int
    seqlen_kv: int
    headdim: int  # of the tensors; kernels pad it to one of theirs
    dtype: str  # "f16" or "bf16", of q, k, v and the output
    is_causal: bool
    softmax_scale: float
    qk_bits: int  # of the quantized q and k: 8 or 4
    smooth_q: bool  # which of them have their mean subtracted before they are quantized
    smooth_k: bool
    smooth_v: bool
    pv_accum: str  # how P·V adds up: a value of the axis, or "auto" for that of the chosen kernels


def check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, is_causal: bool = False, scale: float | None = None,
          layout: str = "HND", qk_bits: int | str = "auto", smooth_q: bool | str = "auto", smooth_k: bool = True,
          smooth_v: bool = False, pv_accum: str = "auto") -> Problem:
    """The problem that these arguments pose; ArgumentError where they pose none."""
    if not isinstance(layout, str) or layout not in LAYOUTS:
        raise ArgumentError(f"layout: expected 'HND' {LAYOUTS['HND']} or 'NHD' {LAYOUTS['NHD']}, got {layout!r}")
    _check_flags(is_causal=is_causal, smooth_k=smooth_k, smooth_v=smooth_v)
    bits = _qk_bits(qk_bits)
    if not isinstance(pv_accum, str) or pv_accum not in ("auto", *AXES["pv_accum"]):
        raise ArgumentError(f"pv_accum: expected 'auto' or one of {AXES['pv_accum']}, got {pv_accum!r}")
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        _check_tensor(name, tensor, layout)
    _check_alike(q, k, v)
    batch, num_q_heads, seqlen_q, headdim = heads_first(q, layout).shape
    kv_batch, num_kv_heads, seqlen_kv, _ = heads_first(k, layout).shape
    if k.shape != v.shape:
        raise ArgumentError(f"k and v must have one shape, got {tuple(k.shape)} and {tuple(v.shape)}; each key has one "
                            f"value, and where head dims differ, pad the smaller with zeros")
    if kv_batch != batch:
        raise ArgumentError(f"q, k and v must have one batch size, got {batch} for q and {kv_batch} for k and v; "
                            f"expand a batch of one, which copies nothing")
    if k.shape[-1] != headdim:
        raise ArgumentError(f"q, k and v must have one head dim, got {headdim} for q and {k.shape[-1]} for k and v; "
                            f"pad the smaller with zeros and pass the scale, which depends on it")
    if num_q_heads and (not num_kv_heads or num_q_heads % num_kv_heads):
        other = next(name for name in LAYOUTS if name != layout)
        raise ArgumentError(f"the heads of q must be a multiple of those of k and v, got {num_q_heads} and "
                            f"{num_kv_heads} in layout {layout!r}; for tensors {LAYOUTS[other]} pass layout={other!r}, "
                            f"else repeat heads of k and v")
    return Problem(batch, num_q_heads, num_kv_heads, seqlen_q, seqlen_kv, headdim, DTYPES[q.dtype], is_causal,
                   _softmax_scale(scale, headdim), bits, _smooth_q(smooth_q, bits), smooth_k, smooth_v, pv_accum)


def check_out(out: torch.Tensor, q: torch.Tensor) -> None:
    """ArgumentError unless `out` can hold the attention of `q`."""
    if not isinstance(out, torch.Tensor):
        raise ArgumentError(f"out: expected a tensor like q, got {type(out).__name__}; make one with "
                            f"torch.empty_like(q)")
    if (out.shape, out.dtype, out.device) != (q.shape, q.dtype, q.device):
        raise ArgumentError(f"out: expected shape, dtype and device of q, {_describe(q)}, got {_describe(out)}; make "
                            f"one with torch.empty_like(q)")
    _check_last_stride("out", out)
    if any(size > 1 and stride == 0 for size, stride in zip(out.shape, out.stride())):
        raise ArgumentError(f"out: its elements must not share memory, got strides {out.stride()}; pass a tensor that "
                            f"was not expanded")


def heads_first(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """The same memory as [batch, heads, seq, headdim]."""
    return tensor if layout == "HND" else tensor.transpose(1, 2)


def _check_flags(**flags: object) -> None:
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise ArgumentError(f"{name}: expected True or False, got {value!r}")


def _check_tensor(name: str, tensor: torch.Tensor, layout: str) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise ArgumentError(f"{name}: expected a torch.Tensor, got {type(tensor).__name__}; make one with "
                            f"torch.as_tensor({name})")
    if tensor.dim() != 4:
        raise ArgumentError(f"{name}: expected four dimensions {LAYOUTS[layout]}, got shape {tuple(tensor.shape)}; add "
                            f"those of size one with {name}.unsqueeze(dim), split a fused one with {name}.unflatten")
    if tensor.dtype not in DTYPES:
        raise ArgumentError(f"{name}: expected torch.float16 or torch.bfloat16, got {tensor.dtype}; convert it with "
                            f"{name}.to(torch.bfloat16)")
    if not 1 <= tensor.shape[-1] <= MAX_HEADDIM:
        raise ArgumentError(f"{name}: expected a head dim from 1 to {MAX_HEADDIM}, got {tensor.shape[-1]}; for others "
                            f"call torch.nn.functional.scaled_dot_product_attention")
    _check_last_stride(name, tensor)
    if tensor.requires_grad and torch.is_grad_enabled():
        raise ArgumentError(f"{name} requires grad, and attn has no backward pass; call it under torch.no_grad() or "
                            f"torch.inference_mode(), or pass {name}.detach()")


def _check_last_stride(name: str, tensor: torch.Tensor) -> None:
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ArgumentError(f"{name}: expected a contiguous last dimension, got strides {tensor.stride()}; pass "
                            f"{name}.contiguous()")


def _check_alike(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    for name, tensor in (("k", k), ("v", v)):
        if tensor.dtype != q.dtype:
            raise ArgumentError(f"q, k and v must have one dtype, got {q.dtype} for q and {tensor.dtype} for {name}; "
                                f"pass {name}.to(q.dtype)")
        if tensor.device != q.device:
            raise ArgumentError(f"q, k and v must be on one device, got {q.device} for q and {tensor.device} for "
                                f"{name}; pass {name}.to(q.device)")


def _qk_bits(qk_bits: int | str) -> int:
    """4 bits visibly hurt some models, so "auto" means 8."""
    if not isinstance(qk_bits, (int, str)) or isinstance(qk_bits, bool) or qk_bits not in ("auto", *AXES["qk"]):
        raise ArgumentError(f"qk_bits: expected 'auto', 8 or 4, got {qk_bits!r}")
    return 8 if qk_bits == "auto" else qk_bits


def _smooth_q(smooth_q: bool | str, qk_bits: int) -> bool:
    """At 8 bits smoothing Q gains less than it costs."""
    if not isinstance(smooth_q, bool) and not (isinstance(smooth_q, str) and smooth_q == "auto"):
        raise ArgumentError(f"smooth_q: expected 'auto', True or False, got {smooth_q!r}")
    return qk_bits == 4 if smooth_q == "auto" else smooth_q


def _softmax_scale(scale: float | None, headdim: int) -> float:
    if scale is None:
        return 1.0 / math.sqrt(headdim)
    if isinstance(scale, bool) or not isinstance(scale, (int, float)) or not abs(scale) <= MAX_SCALE:
        raise ArgumentError(f"scale: expected a finite Python number of at most ±{MAX_SCALE:g}, or None for "
                            f"1 / sqrt(headdim), got {scale!r}; for a tensor pass scale.item()")
    return float(scale)


def _describe(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)} {tensor.dtype} on {tensor.device}"
