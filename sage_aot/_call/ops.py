"""The torch operators behind the public call: schemas, implementations, and fake implementations for tracers.

`sage_aot::attn` and its three forms (with the log-sum-exp, into a given tensor, both), and `sage_aot::attn_varlen` and
its three, run the kernels for CUDA tensors and the emulation for CPU tensors. Everything that a tracer cannot follow
(the environment, the manifest, caches, addresses) happens inside the operators. All forms take the options by position,
in the order of the table OPTIONS.
Registered through torch.library.Library, whose dispatch takes a third of the time of torch.library.custom_op.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from sage_aot._call.pipeline import lse_shape, prepared
from sage_aot._problem.check import Problem, Sequences, check, check_no_grad, check_out
from sage_aot._problem.options import Options, schema

_LIBRARY: Any = torch.library.Library("sage_aot", "DEF")  # type: ignore[no-untyped-call]  # keeps the operators alive
_CONTIGUOUS = torch.contiguous_format
_T = TypeVar("_T")


# --- what runs --------------------------------------------------------------------------------------------------------


def _attn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, key_mask: torch.Tensor | None, *options: Any,
          sequences: Sequences | None = None) -> torch.Tensor:
    call = prepared(q, k, v, key_mask, None, options, sequences)
    out = torch.empty_like(q, memory_format=_CONTIGUOUS)
    call.run(q, k, v, out, None, key_mask, sequences)
    return out


def _attn_lse(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, key_mask: torch.Tensor | None, *options: Any,
              sequences: Sequences | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    call = prepared(q, k, v, key_mask, None, options, sequences)
    out, lse = torch.empty_like(q, memory_format=_CONTIGUOUS), call.empty_lse(q)
    call.run(q, k, v, out, lse, key_mask, sequences)
    return out, lse


def _attn_out(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, key_mask: torch.Tensor | None, out: torch.Tensor,
              *options: Any, sequences: Sequences | None = None) -> None:
    prepared(q, k, v, key_mask, out, options, sequences).run(q, k, v, out, None, key_mask, sequences)
    _count_write(out)


def _attn_lse_out(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, key_mask: torch.Tensor | None, out: torch.Tensor,
                  *options: Any, sequences: Sequences | None = None) -> torch.Tensor:
    call = prepared(q, k, v, key_mask, out, options, sequences)
    lse = call.empty_lse(q)
    call.run(q, k, v, out, lse, key_mask, sequences)
    _count_write(out)
    return lse


def _count_write(out: torch.Tensor) -> None:
    """Count a write to `out`, so that a backward pass that saved the old values raises."""
    if not out.is_inference():
        torch.autograd.graph.increment_version(out)


# --- what a tracer sees: shapes, and the same errors ------------------------------------------------------------------


def _fake_attn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, key_mask: torch.Tensor | None, *options: Any,
               sequences: Sequences | None = None) -> torch.Tensor:
    _check(q, k, v, key_mask, None, options, sequences)
    return torch.empty_like(q, memory_format=_CONTIGUOUS)


def _fake_attn_lse(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, key_mask: torch.Tensor | None, *options: Any,
                   sequences: Sequences | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    problem = _check(q, k, v, key_mask, None, options, sequences)
    return torch.empty_like(q, memory_format=_CONTIGUOUS), _fake_lse(problem, q)


def _fake_attn_out(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, key_mask: torch.Tensor | None, out: torch.Tensor,
                   *options: Any, sequences: Sequences | None = None) -> None:
    _check(q, k, v, key_mask, out, options, sequences)


def _fake_attn_lse_out(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, key_mask: torch.Tensor | None,
                       out: torch.Tensor, *options: Any, sequences: Sequences | None = None) -> torch.Tensor:
    return _fake_lse(_check(q, k, v, key_mask, out, options, sequences), q)


def _fake_lse(problem: Problem, q: torch.Tensor) -> torch.Tensor:
    return q.new_empty(lse_shape(problem), dtype=torch.float32)


def _check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, key_mask: torch.Tensor | None, out: torch.Tensor | None,
           options: tuple[Any, ...], sequences: Sequences | None = None) -> Problem:
    problem = check(q, k, v, Options.from_schema(*options), key_mask, sequences)
    if out is not None:
        check_out(out, q)
    check_no_grad(q=q, k=k, v=v, out=out)
    return problem


# --- registration -----------------------------------------------------------------------------------------------------


_DENSE = "Tensor? key_mask, "
_VARLEN = "Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k, "
_OUT = "Tensor(a!) out, "


def _varlen(form: Callable[..., _T]) -> Callable[..., _T]:
    """A form of the operator that takes the arguments of _VARLEN in place of a key mask."""

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor,
            max_seqlen_q: int, max_seqlen_k: int, *others: Any) -> _T:
        return form(q, k, v, None, *others,
                    sequences=Sequences(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k))

    return run


def _register(name: str, given: str, returns: str, run: Callable[..., Any],
              fake: Callable[..., Any]) -> torch._ops.OpOverload[..., Any]:
    # The stride order is fixed, so that a compiler keeps the last dimension contiguous.
    _LIBRARY.define(f"{name}(Tensor q, Tensor k, Tensor v, {given}{schema()}) -> {returns}",
                    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order))
    op: torch._ops.OpOverload[..., Any] = getattr(torch.ops.sage_aot, name).default
    for device in ("CUDA", "CPU"):
        _LIBRARY.impl(name, run, device)
        _LIBRARY.impl(name, _autocasting(op, device), f"Autocast{device}")
    torch.library.register_fake(f"sage_aot::{name}", fake, lib=_LIBRARY)
    return op


def cast_for_autocast(tensor: torch.Tensor, dtype: torch.dtype, kind: str) -> torch.Tensor:
    """The tensor as torch.autocast hands it over on devices of a kind."""
    castable = tensor.is_floating_point() and tensor.dtype != torch.float64 and tensor.device.type == kind
    return tensor.to(dtype) if castable else tensor


def _autocasting(op: torch._ops.OpOverload[..., Any], device: str) -> Callable[..., Any]:
    """Casts q, k and v to the dtype of torch.autocast, as scaled_dot_product_attention does, and calls the operator."""
    kind = device.lower()
    autocast = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, f"Autocast{device}"))

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *others: Any) -> Any:
        dtype = torch.get_autocast_dtype(kind)
        with torch._C._ExcludeDispatchKeyGuard(autocast):
            return op(*(cast_for_autocast(tensor, dtype, kind) for tensor in (q, k, v)), *others)

    return run


attn = _register("attn", _DENSE, "Tensor", _attn, _fake_attn)
attn_lse = _register("attn_lse", _DENSE, "(Tensor, Tensor)", _attn_lse, _fake_attn_lse)
attn_out = _register("attn_out", _DENSE + _OUT, "()", _attn_out, _fake_attn_out)
attn_lse_out = _register("attn_lse_out", _DENSE + _OUT, "Tensor", _attn_lse_out, _fake_attn_lse_out)
attn_varlen = _register("attn_varlen", _VARLEN, "Tensor", _varlen(_attn), _varlen(_fake_attn))
attn_varlen_lse = _register("attn_varlen_lse", _VARLEN, "(Tensor, Tensor)", _varlen(_attn_lse),
                            _varlen(_fake_attn_lse))
attn_varlen_out = _register("attn_varlen_out", _VARLEN + _OUT, "()", _varlen(_attn_out), _varlen(_fake_attn_out))
attn_varlen_lse_out = _register("attn_varlen_lse_out", _VARLEN + _OUT, "Tensor", _varlen(_attn_lse_out),
                                _varlen(_fake_attn_lse_out))
