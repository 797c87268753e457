"""The torch operators behind the public calls: schemas, implementations, and fake implementations for tracers.

`sage_aot::attn` and its three forms (with the log-sum-exp, into a given tensor, both), likewise `sage_aot::attn_varlen`
and `sage_aot::attn_kv`, and `sage_aot::quantize_kv` run the kernels for CUDA tensors and the emulation for CPU tensors.
Everything that a tracer cannot follow (the environment, the manifest, caches, addresses) happens inside the operators.
All forms take the options by position, in the order of the table OPTIONS.
Registered through torch.library.Library, whose dispatch takes a third of the time of torch.library.custom_op.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import takewhile
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch

from sage_aot._call.backends import backend_of
from sage_aot._call.pipeline import plan_of, prepared
from sage_aot._call.signatures import SIGNATURES
from sage_aot._package import PACKAGE
from sage_aot._problem.arguments import check_out
from sage_aot._problem.check import check
from sage_aot._problem.derivatives import check_no_grad
from sage_aot._problem.given import Given
from sage_aot._problem.options import Options, schema
from sage_aot._problem.problem import Problem, heads_first
from sage_aot._problem.tensors import Kind

LIBRARY: Any = torch.library.Library(PACKAGE, "DEF")  # type: ignore[no-untyped-call]  # keeps the operators alive
OPERATORS: Any = getattr(torch.ops, PACKAGE)
"""``torch.ops.sage_aot``."""

CONTIGUOUS = torch.contiguous_format
_T = TypeVar("_T")


# --- what runs --------------------------------------------------------------------------------------------------------


def _attn(given: Given, *options: Any) -> torch.Tensor:
    call, q = prepared(given, None, options), given.like
    out = torch.empty_like(q, memory_format=CONTIGUOUS)
    call.run(given, out, None)
    return out


def _attn_lse(given: Given, *options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    call, q = prepared(given, None, options), given.like
    out, lse = torch.empty_like(q, memory_format=CONTIGUOUS), call.empty_lse(q)
    call.run(given, out, lse)
    return out, lse


def _attn_out(given: Given, out: torch.Tensor, *options: Any) -> None:
    call = prepared(given, out, options)
    call.run(given, out, None)
    _count_write(out)


def _attn_lse_out(given: Given, out: torch.Tensor, *options: Any) -> torch.Tensor:
    call = prepared(given, out, options)
    lse = call.empty_lse(out)
    call.run(given, out, lse)
    _count_write(out)
    return lse


def _count_write(out: torch.Tensor) -> None:
    """Count a write to `out`, so that a backward pass that saved the old values raises."""
    if not out.is_inference():
        torch.autograd.graph.increment_version(out)


def _quantize_kv(given: Given, *options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    call, k = prepared(given, None, options), given.like
    kept = k.new_empty(call.kept_bytes, dtype=torch.uint8)
    call.run(given._replace(kept=kept), None, None)
    return kept, _copied(k, call.problem)


def _copied(k: torch.Tensor, problem: Problem) -> torch.Tensor:
    """k heads first where a call with the quantized k will need it; else no elements."""
    if not problem.options.smooth_q:
        return k.new_empty(0)
    return heads_first(k, problem.options.layout).clone(memory_format=CONTIGUOUS)


# --- what a tracer sees: shapes, and the same errors ------------------------------------------------------------------


def _fake_attn(given: Given, *options: Any) -> torch.Tensor:
    _check(given, None, options)
    return torch.empty_like(given.like, memory_format=CONTIGUOUS)


def _fake_attn_lse(given: Given, *options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    problem = _check(given, None, options)
    return torch.empty_like(given.like, memory_format=CONTIGUOUS), _fake_lse(problem, given.like)


def _fake_attn_out(given: Given, out: torch.Tensor, *options: Any) -> None:
    _check(given, out, options)


def _fake_attn_lse_out(given: Given, out: torch.Tensor, *options: Any) -> torch.Tensor:
    return _fake_lse(_check(given, out, options), out)


def _check(given: Given, out: torch.Tensor | None, options: tuple[Any, ...]) -> Problem:
    problem = check(given, Options.from_schema(*options))
    if out is not None:
        check_out(out, given.like)
    check_no_grad(**given.named, out=out)
    return problem


def _fake_lse(problem: Problem, q: torch.Tensor) -> torch.Tensor:
    return q.new_empty(problem.lse_shape, dtype=torch.float32)


def _fake_quantize_kv(given: Given, *options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    problem, k = _check(given, None, options), given.like
    return k.new_empty(kept_bytes(problem, k), dtype=torch.uint8), _copied(k, problem)


def kept_bytes(problem: Problem, like: torch.Tensor) -> int:
    """Bytes of what the call of a problem keeps. Asks for the kernels in use: this size is theirs to say."""
    backend = backend_of(like)
    return 0 if problem.is_empty else backend.kept_bytes(plan_of(backend, problem, like.get_device()))


# --- registration -----------------------------------------------------------------------------------------------------


Operator: TypeAlias = "torch._ops.OpOverload[..., Any]"  # a string: in torch 2.4 the class has no parameters


class Forms(NamedTuple):
    """The four operators of a kind of call."""

    plain: Operator
    lse: Operator
    out: Operator
    lse_out: Operator

    def __call__(self, arguments: tuple[Any, ...], out: torch.Tensor | None, return_lse: bool,
                 options: tuple[Any, ...]) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Make a call by its form. `arguments`: those of the signature; `options`: as operators take them."""
        if out is None:
            made: torch.Tensor | tuple[torch.Tensor, torch.Tensor] = (self.lse if return_lse else self.plain)(
                *arguments, *options)
            return made
        if return_lse:
            return out, self.lse_out(*arguments, out, *options)
        self.out(*arguments, out, *options)
        return out


def register(name: str, kind: Kind, returns: str, run: Callable[..., Any], fake: Callable[..., Any],
             out: str = "") -> Operator:
    """Define an operator that takes what a kind of call is given, then `out`, then the options. `run` and `fake` take
    the first as a Given."""
    LIBRARY.define(f"{name}({SIGNATURES[kind].schema}{out}{schema()}) -> {returns}", tags=TAGS)
    return implement(name, _reading(kind, run), _reading(kind, fake))


# Compiled code hands tensors over with the strides that they have in eager code. With their order alone, which is all
# that torch before 2.8 can be told, Inductor takes a broadcast dimension, of stride 0, for the last one.
TAGS = torch.Tag.pt2_compliant_tag, getattr(torch.Tag, "needs_exact_strides", torch.Tag.needs_fixed_stride_order)


def implement(name: str, run: Callable[..., Any], fake: Callable[..., Any]) -> Operator:
    """Implement an operator that is defined."""
    op: Operator = getattr(OPERATORS, name).default
    for device in ("CUDA", "CPU"):
        LIBRARY.impl(name, run, device)
        LIBRARY.impl(name, _autocasting(op, device), f"Autocast{device}")
    torch.library.register_fake(f"{PACKAGE}::{name}", fake, lib=LIBRARY)
    return op


def _reading(kind: Kind, form: Callable[..., _T]) -> Callable[..., _T]:
    """The form as torch calls it: with the arguments one by one."""
    read, count = SIGNATURES[kind].read, SIGNATURES[kind].arity

    def run(*arguments: Any) -> _T:
        if type(arguments[-1]) is list:  # a window, which torch makes a list of; options are hashed
            arguments = *arguments[:-1], tuple(arguments[-1])
        return form(read(arguments[:count]), *arguments[count:])

    return run


def _register_forms(name: str, kind: Kind) -> Forms:
    out = "Tensor(a!) out, "
    return Forms(register(name, kind, "Tensor", _attn, _fake_attn),
                 register(f"{name}_lse", kind, "(Tensor, Tensor)", _attn_lse, _fake_attn_lse),
                 register(f"{name}_out", kind, "()", _attn_out, _fake_attn_out, out),
                 register(f"{name}_lse_out", kind, "Tensor", _attn_lse_out, _fake_attn_lse_out, out))


def cast_for_autocast(tensor: torch.Tensor, dtype: torch.dtype, kind: str) -> torch.Tensor:
    """The tensor as torch.autocast hands it over on devices of a kind."""
    return tensor.to(dtype) if _is_cast(tensor, kind) else tensor


def dtype_in_operators(tensor: torch.Tensor) -> torch.dtype:
    """The dtype in which an operator called now gets a tensor: that of torch.autocast, or the tensor's own."""
    dtype = autocast_dtype(tensor)
    return tensor.dtype if dtype is None or not _is_cast(tensor, tensor.device.type) else dtype


def autocast_dtype(tensor: torch.Tensor) -> torch.dtype | None:
    """The dtype of torch.autocast on a tensor's device; None where autocast is off."""
    kind = tensor.device.type
    return torch.get_autocast_dtype(kind) if not tensor.is_meta and torch.is_autocast_enabled(kind) else None


def _is_cast(tensor: torch.Tensor, kind: str) -> bool:
    return tensor.is_floating_point() and tensor.dtype != torch.float64 and tensor.device.type == kind


def _autocasting(op: Operator, device: str) -> Callable[..., Any]:
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


attn, attn_varlen = _register_forms("attn", "dense"), _register_forms("attn_varlen", "varlen")
attn_kv = _register_forms("attn_kv", "stored")
FORMS: dict[Kind, Forms] = {"dense": attn, "varlen": attn_varlen, "stored": attn_kv}
quantize_kv = register("quantize_kv", "kv", "(Tensor, Tensor)", _quantize_kv, _fake_quantize_kv)
