"""The torch operators behind the public call: schemas, implementations, and fake implementations for tracers.

`sage_aot::attn` and its three forms (with the log-sum-exp, into a given tensor, both), likewise `sage_aot::attn_varlen`
and `sage_aot::attn_kv`, and `sage_aot::quantize_kv` run the kernels for CUDA tensors and the emulation for CPU tensors.
Everything that a tracer cannot follow (the environment, the manifest, caches, addresses) happens inside the operators.
All forms take the options by position, in the order of the table OPTIONS.
Registered through torch.library.Library, whose dispatch takes a third of the time of torch.library.custom_op.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Any, TypeVar

import torch

from sage_aot._call.pipeline import (
    Prepared,
    backend_of,
    lse_shape,
    plan_of,
    prepared,
    prepared_kv,
    prepared_stored,
)
from sage_aot._problem.check import (
    Problem,
    Sequences,
    Stored,
    check,
    check_kv,
    check_out,
    check_stored,
    heads_first,
)
from sage_aot._problem.derivatives import check_no_grad
from sage_aot._problem.options import Options, schema

LIBRARY: Any = torch.library.Library("sage_aot", "DEF")  # type: ignore[no-untyped-call]  # keeps the operators alive
_CONTIGUOUS = torch.contiguous_format
_Maybe = torch.Tensor | None
_T = TypeVar("_T")


# --- what runs --------------------------------------------------------------------------------------------------------

# Each form takes the tensors one by one: an object around them would cost a call a microsecond.


def _attn(q: torch.Tensor, k: _Maybe, v: _Maybe, key_mask: _Maybe, *options: Any,
          sequences: Sequences | None = None, stored: Stored | None = None) -> torch.Tensor:
    call = _prepared(q, k, v, key_mask, None, options, sequences, stored)
    out = torch.empty_like(q, memory_format=_CONTIGUOUS)
    call.run(q, k, v, out, None, key_mask, sequences, None if stored is None else stored.data)
    return out


def _attn_lse(q: torch.Tensor, k: _Maybe, v: _Maybe, key_mask: _Maybe, *options: Any,
              sequences: Sequences | None = None, stored: Stored | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    call = _prepared(q, k, v, key_mask, None, options, sequences, stored)
    out, lse = torch.empty_like(q, memory_format=_CONTIGUOUS), call.empty_lse(q)
    call.run(q, k, v, out, lse, key_mask, sequences, None if stored is None else stored.data)
    return out, lse


def _attn_out(q: torch.Tensor, k: _Maybe, v: _Maybe, key_mask: _Maybe, out: torch.Tensor, *options: Any,
              sequences: Sequences | None = None, stored: Stored | None = None) -> None:
    call = _prepared(q, k, v, key_mask, out, options, sequences, stored)
    call.run(q, k, v, out, None, key_mask, sequences, None if stored is None else stored.data)
    _count_write(out)


def _attn_lse_out(q: torch.Tensor, k: _Maybe, v: _Maybe, key_mask: _Maybe, out: torch.Tensor, *options: Any,
                  sequences: Sequences | None = None, stored: Stored | None = None) -> torch.Tensor:
    call = _prepared(q, k, v, key_mask, out, options, sequences, stored)
    lse = call.empty_lse(q)
    call.run(q, k, v, out, lse, key_mask, sequences, None if stored is None else stored.data)
    _count_write(out)
    return lse


def _prepared(q: torch.Tensor, k: _Maybe, v: _Maybe, key_mask: _Maybe, out: _Maybe, options: tuple[Any, ...],
              sequences: Sequences | None, stored: Stored | None) -> Prepared:
    if stored is not None:
        return prepared_stored(q, stored, out, options)
    assert k is not None and v is not None
    return prepared(q, k, v, key_mask, out, options, sequences)


def _count_write(out: torch.Tensor) -> None:
    """Count a write to `out`, so that a backward pass that saved the old values raises."""
    if not out.is_inference():
        torch.autograd.graph.increment_version(out)


def _quantize_kv(k: torch.Tensor, v: torch.Tensor, key_mask: torch.Tensor | None,
                 *options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    call = prepared_kv(k, v, key_mask, options)
    data = k.new_empty(call.kv_bytes, dtype=torch.uint8)
    call.run(None, k, v, None, None, key_mask, None, data)
    return data, _copied(k, call.problem)


def _copied(k: torch.Tensor, problem: Problem) -> torch.Tensor:
    """k heads first where a call with the quantized k will need it; else no elements."""
    if not problem.options.smooth_q:
        return k.new_empty(0)
    return heads_first(k, problem.options.layout).clone(memory_format=torch.contiguous_format)


# --- what a tracer sees: shapes, and the same errors ------------------------------------------------------------------


def _fake_attn(q: torch.Tensor, k: _Maybe, v: _Maybe, key_mask: _Maybe, *options: Any,
               sequences: Sequences | None = None, stored: Stored | None = None) -> torch.Tensor:
    _check(q, k, v, key_mask, None, options, sequences, stored)
    return torch.empty_like(q, memory_format=_CONTIGUOUS)


def _fake_attn_lse(q: torch.Tensor, k: _Maybe, v: _Maybe, key_mask: _Maybe, *options: Any,
                   sequences: Sequences | None = None,
                   stored: Stored | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    problem = _check(q, k, v, key_mask, None, options, sequences, stored)
    return torch.empty_like(q, memory_format=_CONTIGUOUS), _fake_lse(problem, q)


def _fake_attn_out(q: torch.Tensor, k: _Maybe, v: _Maybe, key_mask: _Maybe, out: torch.Tensor, *options: Any,
                   sequences: Sequences | None = None, stored: Stored | None = None) -> None:
    _check(q, k, v, key_mask, out, options, sequences, stored)


def _fake_attn_lse_out(q: torch.Tensor, k: _Maybe, v: _Maybe, key_mask: _Maybe, out: torch.Tensor, *options: Any,
                       sequences: Sequences | None = None, stored: Stored | None = None) -> torch.Tensor:
    return _fake_lse(_check(q, k, v, key_mask, out, options, sequences, stored), q)


def _check(q: torch.Tensor, k: _Maybe, v: _Maybe, key_mask: _Maybe, out: _Maybe, options: tuple[Any, ...],
           sequences: Sequences | None, stored: Stored | None) -> Problem:
    if stored is not None:
        problem = check_stored(q, stored, Options.from_schema(*options))
    else:
        assert k is not None and v is not None
        problem = check(q, k, v, Options.from_schema(*options), key_mask, sequences)
    if out is not None:
        check_out(out, q)
    check_no_grad(q=q, k=k, v=v, out=out)
    return problem


def _fake_lse(problem: Problem, q: torch.Tensor) -> torch.Tensor:
    return q.new_empty(lse_shape(problem), dtype=torch.float32)


def _fake_quantize_kv(k: torch.Tensor, v: torch.Tensor, key_mask: torch.Tensor | None,
                      *options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Asks for the kernels in use: the size of what they keep of k and v is theirs to say."""
    check_no_grad(k=k, v=v)
    problem, backend = check_kv(k, v, Options.from_schema(*options), key_mask), backend_of(k)
    size = 0 if problem.is_empty else backend.kv_bytes(plan_of(backend, problem, k.get_device()))
    return k.new_empty(size, dtype=torch.uint8), _copied(k, problem)


# --- registration -----------------------------------------------------------------------------------------------------


_TENSORS = "Tensor q, Tensor k, Tensor v, "
_DENSE = _TENSORS + "Tensor? key_mask, "
_VARLEN = _TENSORS + "Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k, "
_STORED = "Tensor q, Tensor kv, Tensor? k, SymInt[] shape, ScalarType dtype, bool has_key_mask, str quantizer, "
_OUT = "Tensor(a!) out, "


def _varlen(form: Callable[..., _T]) -> Callable[..., _T]:
    """A form of the operator that takes the arguments of _VARLEN in place of a key mask."""

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor,
            max_seqlen_q: int, max_seqlen_k: int, *others: Any) -> _T:
        sequences = Sequences(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        return form(q, k, v, None, *others, sequences=sequences)

    return run


def _stored(form: Callable[..., _T]) -> Callable[..., _T]:
    """A form of the operator that takes q and the arguments of _STORED."""

    def run(q: torch.Tensor, data: torch.Tensor, k: torch.Tensor | None, shape: Sequence[int], dtype: torch.dtype,
            has_key_mask: bool, quantizer: str, *others: Any) -> _T:
        return form(q, k, None, None, *others, stored=Stored(data, k, shape, dtype, has_key_mask, quantizer))

    return run


def register(name: str, given: str, returns: str, run: Callable[..., Any],
             fake: Callable[..., Any]) -> torch._ops.OpOverload[..., Any]:
    """Define an operator that takes tensors as `given` says and then the options."""
    # The stride order is fixed, so that a compiler keeps the last dimension contiguous.
    LIBRARY.define(f"{name}({given}{schema()}) -> {returns}",
                    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order))
    op: torch._ops.OpOverload[..., Any] = getattr(torch.ops.sage_aot, name).default
    for device in ("CUDA", "CPU"):
        LIBRARY.impl(name, run, device)
        LIBRARY.impl(name, _autocasting(op, device), f"Autocast{device}")
    torch.library.register_fake(f"sage_aot::{name}", fake, lib=LIBRARY)
    return op


def cast_for_autocast(tensor: torch.Tensor, dtype: torch.dtype, kind: str) -> torch.Tensor:
    """The tensor as torch.autocast hands it over on devices of a kind."""
    castable = tensor.is_floating_point() and tensor.dtype != torch.float64 and tensor.device.type == kind
    return tensor.to(dtype) if castable else tensor


def _autocasting(op: torch._ops.OpOverload[..., Any], device: str) -> Callable[..., Any]:
    """Casts q, k and v to the dtype of torch.autocast, as scaled_dot_product_attention does, and calls the operator.
    What was quantized before stays as it is, and the copy of k that belongs to it."""
    kind = device.lower()
    casts = len([*takewhile(lambda argument: argument.name in ("q", "k", "v"), op._schema.arguments)])
    autocast = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, f"Autocast{device}"))

    def run(*arguments: Any) -> Any:
        dtype = torch.get_autocast_dtype(kind)
        with torch._C._ExcludeDispatchKeyGuard(autocast):
            return op(*(cast_for_autocast(tensor, dtype, kind) for tensor in arguments[:casts]), *arguments[casts:])

    return run


attn = register("attn", _DENSE, "Tensor", _attn, _fake_attn)
attn_lse = register("attn_lse", _DENSE, "(Tensor, Tensor)", _attn_lse, _fake_attn_lse)
attn_out = register("attn_out", _DENSE + _OUT, "()", _attn_out, _fake_attn_out)
attn_lse_out = register("attn_lse_out", _DENSE + _OUT, "Tensor", _attn_lse_out, _fake_attn_lse_out)
attn_varlen = register("attn_varlen", _VARLEN, "Tensor", _varlen(_attn), _varlen(_fake_attn))
attn_varlen_lse = register("attn_varlen_lse", _VARLEN, "(Tensor, Tensor)", _varlen(_attn_lse),
                           _varlen(_fake_attn_lse))
attn_varlen_out = register("attn_varlen_out", _VARLEN + _OUT, "()", _varlen(_attn_out), _varlen(_fake_attn_out))
attn_varlen_lse_out = register("attn_varlen_lse_out", _VARLEN + _OUT, "Tensor", _varlen(_attn_lse_out),
                               _varlen(_fake_attn_lse_out))
quantize_kv = register("quantize_kv", "Tensor k, Tensor v, Tensor? key_mask, ", "(Tensor, Tensor)", _quantize_kv,
                       _fake_quantize_kv)
attn_kv = register("attn_kv", _STORED, "Tensor", _stored(_attn), _stored(_fake_attn))
attn_kv_lse = register("attn_kv_lse", _STORED, "(Tensor, Tensor)", _stored(_attn_lse), _stored(_fake_attn_lse))
attn_kv_out = register("attn_kv_out", _STORED + _OUT, "()", _stored(_attn_out), _stored(_fake_attn_out))
attn_kv_lse_out = register("attn_kv_lse_out", _STORED + _OUT, "Tensor", _stored(_attn_lse_out),
                           _stored(_fake_attn_lse_out))
