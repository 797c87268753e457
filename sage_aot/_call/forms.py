"""The common part of the public calls: their arguments as one thing, and the operator that takes it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from sage_aot._call.kv import QuantizedKV, asked_with, check_not_with_sequences
from sage_aot._call.masks import masks_of_call, shown_alone
from sage_aot._call.ops import FORMS, dtype_in_operators
from sage_aot._call.signatures import SIGNATURES
from sage_aot._problem.arguments import (
    check_device,
    check_no_layout,
    check_optional_are,
    check_out,
    check_resolved,
    check_return_lse,
    check_tensors_are,
    max_seqlens_of,
)
from sage_aot._problem.derivatives import check_no_derivative, check_no_grad, has_no_rule_for_writes, is_transformed
from sage_aot._problem.given import Given, Stored
from sage_aot._problem.mask import rows_see_alike
from sage_aot._problem.options import Asked, for_schema, for_tracer, smooths_q
from sage_aot._problem.problem import Problem, heads_first, is_static
from sage_aot._problem.tensors import LISTED, TENSORS, Kind, check_taken, taken_by
from sage_aot.errors import ArgumentError

Result = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
"""The output; or the output and the log-sum-exp."""


PublicCall = tuple[Kind, tuple[Any, ...], Asked]
"""A public call: its kind, the arguments that its operators take in front of `out`, of which q is the first, and its
options. A plain tuple, which takes less host time than a NamedTuple."""


def given_to(call: PublicCall) -> Given:
    """The arguments of a call by name."""
    kind, arguments, _ = call
    return SIGNATURES[kind].read(arguments)


# --- arguments as one thing -------------------------------------------------------------------------------------------


def call_of_attn(q: Any, k: Any, v: Any, asked: Asked, *, key_mask: Any, sinks: Any, attn_mask: Any,
                 block_mask: Any) -> PublicCall:
    """The call of attn with these arguments. Raises ArgumentError for masks that do not fit q and k, and for what the
    operators' schemas would refuse with torch's own errors; the operators check the rest."""
    if attn_mask is not None or block_mask is not None:
        key_mask, attn_mask, block_mask = masks_of_call(q, k, asked.layout, key_mask, attn_mask, block_mask)
    optional = key_mask, sinks, attn_mask, block_mask  # in the order of TENSORS
    if isinstance(k, QuantizedKV):
        check_tensors_are(q=q)
        taken = _taken("stored", dict(zip(TENSORS, optional)))
        return "stored", (*k.arguments(q), *taken), asked_with(k, v, asked)
    check_qkv(q, k, v)
    for tensor in optional:
        if tensor is not None and not isinstance(tensor, torch.Tensor):
            check_optional_are(**dict(zip(TENSORS, optional)))  # raises
    return "dense", (q, k, v, *optional), asked


def with_shown_keys(call: PublicCall) -> PublicCall:
    """A call of attn whose keys that a key mask hides hold what shown ones hold, where the call keeps them for the sake
    of a mask that differs by query or head."""
    kind, arguments, asked = call
    given = given_to(call)
    if kind != "dense" or given.key_mask is None or not any(name in LISTED for name in given.optional):
        return call
    k, v = shown_alone(given.k, given.v, given.key_mask, asked.layout)
    return kind, (given.q, k, v, *arguments[3:]), asked


def call_of_attn_varlen(q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: Any,
                        max_seqlen_k: Any, asked: Asked, kind: Kind = "varlen", **optional: Any) -> PublicCall:
    """The call of attn_varlen with these arguments, likewise, or of train_attn_varlen. `asked.layout` must be the
    default, since tensors [tokens, heads, headdim] have no other."""
    check_not_with_sequences(k)
    check_tensors_are(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    max_seqlens = max_seqlens_of(max_seqlen_q, max_seqlen_k)
    check_no_layout(asked.layout)
    check_qkv(q, k, v)
    return kind, (q, k, v, cu_seqlens_q, cu_seqlens_k, *max_seqlens, *_taken(kind, optional)), asked


def _taken(kind: Kind, optional: dict[str, Any]) -> list[torch.Tensor | None]:
    """The optional tensors that calls of a kind take. Raises ArgumentError for others, and for what is no tensor."""
    check_taken(kind, **optional)
    check_optional_are(**optional)
    return [optional.get(name) for name in taken_by(kind)]


def check_qkv(q: Any, k: Any, v: Any) -> None:
    """Raise ArgumentError for an argument that is not a tensor."""
    if isinstance(q, torch.Tensor) and isinstance(k, torch.Tensor) and isinstance(v, torch.Tensor):
        return
    if isinstance(k, QuantizedKV):
        raise ArgumentError("k: expected a tensor, got a QuantizedKV, which attn alone takes; pass the k and v that it "
                            "was made of")
    check_tensors_are(q=q, k=k)
    if v is None:
        raise ArgumentError("v: expected a tensor with k, got None; pass v, or instead of k and v what quantize_kv "
                            "made of them")
    check_tensors_are(v=v)


def options_of(q: torch.Tensor, asked: Asked, out: object, return_lse: object) -> tuple[Any, ...]:
    """The options as operators take them. Raises ArgumentError as :func:`call_of_attn` does."""
    if not (q.is_cuda or q.is_cpu or q.is_meta):
        check_device(q=q)  # raises
    options = for_tracer(*asked) if torch.compiler.is_dynamo_compiling() else for_schema(*asked)
    if not isinstance(return_lse, bool):
        check_return_lse(return_lse)  # may raise
    if out is not None:
        if not isinstance(out, torch.Tensor):
            check_out(out, q)  # raises
        elif not torch.compiler.is_dynamo_compiling():
            check_resolved(out)
    return options


# --- the call ---------------------------------------------------------------------------------------------------------


def attend(call: PublicCall, out: torch.Tensor | None, return_lse: bool) -> Result:
    """Make a call by the operators of its kind."""
    kind, arguments, asked = call
    q = arguments[0]
    options = options_of(q, asked, out, return_lse)
    if is_transformed():
        check_no_derivative(**given_to(call).named, out=out)
        if out is not None and has_no_rule_for_writes():
            return copied_to(out, q, attend(call, None, return_lse))
    if has_one_query(q, asked.layout) and groups_share_rows(given := given_to(call), asked, out):
        return _attend_by_group(given, call, out, return_lse, options)
    return FORMS[kind](arguments, out, return_lse, options)


def copied_to(out: torch.Tensor, like: torch.Tensor, made: Result) -> Result:
    """Write and return the result of a call with `out` that was made without, as under vmap or functionalize. `like`: a
    tensor of the shape, dtype and device that `out` must have."""
    check_out(out, like)
    check_no_grad(out=out)
    result = made if isinstance(made, torch.Tensor) else made[0]
    try:
        out.copy_(result)
    except RuntimeError as error:
        if not has_no_rule_for_writes():
            raise
        raise ArgumentError(f"out: expected a tensor that vmap maps, as it does q, k or v, got one for all entries; "
                            f"make it an argument of the mapped function ({error})") from error
    return out if isinstance(made, torch.Tensor) else (out, made[1])


# --- one query a head -------------------------------------------------------------------------------------------------


def has_one_query(q: torch.Tensor, layout: str) -> bool:
    """True where each head of a batch entry has one query."""
    return q.dim() == 4 and is_static(q.size(2 if layout == "HND" else 1) == 1)


def groups_share_rows(given: Given, asked: Asked, out: torch.Tensor | None) -> bool:
    """True where the q heads of a KV head, of one query each, become rows of one head (PackGQA), so that the kernels
    read k and v once a KV head, and not once a q head. They do where all rows of a head see the same keys. Not where q
    is smoothed: a mean over heads that have nothing in common smooths nothing. And not where shapes do not fit, so that
    the error is that of the ordinary call."""
    if not rows_see_alike(asked) or smooths_q(asked.qk, asked.smooth_q) or given.differs_by_head:
        return False
    q, heads_at = given.like, 1 if asked.layout == "HND" else 2
    if isinstance(given.details, Stored):
        batch, kv_heads, _, headdim = given.details.shape
    elif given.k is None or given.v is None or given.k.dim() != 4 or given.k.shape != given.v.shape:
        return False
    else:
        batch, kv_heads, _, headdim = heads_first(given.k, asked.layout).shape
    heads = q.shape[heads_at]
    return (heads > kv_heads > 0 and heads % kv_heads == 0 and batch == q.shape[0] and 0 < headdim == q.shape[3]
            and (out is None or (out.shape, out.dtype, out.device) == (q.shape, dtype_in_operators(q), q.device)))


def with_shared_rows(problem: Problem) -> Problem:
    """The problem that kernels get of a call in which :func:`groups_share_rows`."""
    group = problem.num_q_heads // problem.num_kv_heads
    return replace(problem, num_q_heads=problem.num_kv_heads, seqlen_q=group)


def _attend_by_group(given: Given, call: PublicCall, out: torch.Tensor | None, return_lse: bool,
                     options: tuple[Any, ...]) -> Result:
    """Make a call with the q heads of each KV head as rows of one head."""
    kind, (q, *others), asked = call
    layout = asked.layout
    if layout != "HND":
        options = options_of(q, asked.heads_first(), out, return_lse)
    if isinstance(given.details, Stored):
        kv_heads = given.details.shape[1]
    else:
        k, v, *optional = others
        others = [heads_first(k, layout), heads_first(v, layout), *optional]
        kv_heads = others[0].shape[1]
    rows, into = _by_group(q, kv_heads, layout), None if out is None else _by_group(out, kv_heads, layout)
    made = FORMS[kind]((rows, *others), into, return_lse, options)
    written, lse = made if isinstance(made, tuple) else (made, None)
    result = written.reshape(q.shape) if out is None else out
    return result if lse is None else (result, lse.reshape(q.shape[0], heads_first(q, layout).shape[1], 1))


def _by_group(of_heads: torch.Tensor, kv_heads: int, layout: str) -> torch.Tensor:
    """View a tensor with one row a q head as [batch, kv heads, q heads a kv head, headdim], in the same memory."""
    rows = heads_first(of_heads, layout).squeeze(2)
    return rows.view(rows.shape[0], kv_heads, rows.shape[1] // kv_heads, rows.shape[2])
