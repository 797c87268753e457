"""Attention that is trained: :func:`train_attn`, its operators, and its derivative."""

from __future__ import annotations

from typing import Any

import torch

from sage_aot._call import selection  # noqa: F401  # whose operators get rules below, too
from sage_aot._call.batching import register_rules
from sage_aot._call.flops import register_formulas
from sage_aot._call.forms import check_qkv, options_of
from sage_aot._call.ops import CONTIGUOUS, LIBRARY, TAGS, implement, kept_bytes, register
from sage_aot._call.pipeline import lse_shape, prepared, prepared_backward
from sage_aot._imports import when_imported
from sage_aot._package import PACKAGE
from sage_aot._problem.check import check, check_backward
from sage_aot._problem.derivatives import check_backward_alone, is_transformed
from sage_aot._problem.given import Given
from sage_aot._problem.options import OPTIONS, Asked, Options, schema
from sage_aot._problem.problem import Problem
from sage_aot.errors import ArgumentError

_Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def train_attn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, is_causal: bool = False,
               scale: float | None = None, layout: str = "HND") -> torch.Tensor:
    """Attention in 8 bits that is differentiable: softmax(q·kᵀ·scale)·v, and its gradients by SageBwd.

    The forward pass is that of :func:`sage_aot.attn` with ``p="exp2"`` and else its default options. The backward pass
    recomputes P from the same 8-bit q and k. Of its five products it computes dO·Vᵀ in 16 bits and the others in 8
    bits. Rounding is treated as identity (straight-through). Equal calls on one GPU give equal bits. docs/training.md
    says what models train with it.

    For the backward pass a call keeps 8-bit q and k, and v and the output as they are: 6 bytes a channel of head dims
    64 and 128, where bf16 attention keeps 8. Where v is a view, all that it is a view of is kept. The gradient of q is
    computed where q requires grad, and those of k and v, together, where k or v does. Under torch.no_grad() call
    :func:`sage_aot.attn`, which with ``p="exp2"`` gives the same output.

    Args:
        q: as :func:`sage_aot.attn`; float16 or bfloat16, headdim from 1 to 128.
        k, v: likewise. The gradients of grouped heads are summed over the q heads that share a kv head.
        is_causal: query i sees the keys ``j <= i + keys - queries``: the mask is aligned bottom-right.
        scale: factor on q·kᵀ before the softmax; None means ``1 / sqrt(headdim)``.
        layout: ``"HND"`` or ``"NHD"``, of q, k, v and the output.

    Returns:
        The output, like q in shape and dtype. A query that sees no key gives zeros, and has a gradient of zeros. It
        has no second derivative.

    Raises:
        ArgumentError, UnsupportedError, CubinError, LaunchError: as :func:`sage_aot.attn`. ArgumentError also within
            forward AD and derivatives of torch.func, for which there is no formula. UnsupportedError also where
            the folder of kernels has none for the backward pass.

    Source: SageAttention3 (arXiv:2505.11594), Algorithms 2 and 3.

    >>> import torch, sage_aot
    >>> q, k, v = (torch.randn(1, 2, 100, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    >>> sage_aot.train_attn(q, k, v, is_causal=True).sum().backward()
    >>> q.grad.shape
    torch.Size([1, 2, 100, 64])
    """
    check_qkv(q, k, v)
    options = options_of(q, Asked(is_causal, scale, layout), None, False)
    if is_transformed():
        check_backward_alone(q=q, k=k, v=v)
    out: torch.Tensor = _forward_op(q, k, v, *options)[0]
    return out


# --- the operators ----------------------------------------------------------------------------------------------------


def _forward(given: Given, *options: Any) -> _Tensors:
    """The output, the log-sum-exp of the scores of smoothed keys, without row_bias, and what the backward pass reads of
    the quantized q and k."""
    call = prepared(given, None, options)
    out, lse, kept = _results(given.like, call.problem, call.kept_bytes)
    call.run(given._replace(kept=kept), out, lse)
    return out, lse, kept


def _fake_forward(given: Given, *options: Any) -> _Tensors:
    problem = check(given, Options.from_schema(*options))
    return _results(given.like, problem, kept_bytes(problem, given.like))


def _results(q: torch.Tensor, problem: Problem, kept_bytes: int) -> _Tensors:
    return (torch.empty_like(q, memory_format=CONTIGUOUS), q.new_empty(lse_shape(problem), dtype=torch.float32),
            q.new_empty(kept_bytes, dtype=torch.uint8))


def _backward(grad_out: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, saved: torch.Tensor,
              *arguments: Any) -> _Tensors:
    """The gradients of q, k and v; no elements in place of those that are not asked for."""
    from sage_aot._backends.base import BackwardTensors

    _check_first_derivative(grad_out, v, out)
    options, of_q, of_kv = _options_and_asked(arguments)
    grad_q, grad_k, grad_v = gradients = _fake_backward(grad_out, v, out, lse, saved, *arguments)
    if 0 in (out.numel(), v.numel()) or not (of_q or of_kv):
        return tuple(gradient.zero_() for gradient in gradients)  # type: ignore[return-value]
    of_k_and_v = (grad_k, grad_v) if of_kv else (None, None)
    tensors = BackwardTensors(grad_out, out, v, grad_q if of_q else None, *of_k_and_v)
    call = prepared_backward(tensors, options)
    if saved.numel() != call.kept_bytes:
        raise ArgumentError(f"saved: expected the {call.kept_bytes} bytes that the kernels in use keep of such a "
                            f"forward pass, got {saved.numel()}; run forward and backward pass with the same kernels")
    call.run(tensors, lse, saved)
    return gradients


def _fake_backward(grad_out: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, saved: torch.Tensor,
                   *arguments: Any) -> _Tensors:
    options, of_q, of_kv = _options_and_asked(arguments)
    check_backward(grad_out, v, out, lse, saved, Options.from_schema(*options))
    grad_q, grad_k, grad_v = (torch.empty_like(like, memory_format=CONTIGUOUS) if of_it else like.new_empty(0)
                              for like, of_it in ((out, of_q), (v, of_kv), (v, of_kv)))
    return grad_q, grad_k, grad_v


def _options_and_asked(arguments: tuple[Any, ...]) -> tuple[tuple[Any, ...], bool, bool]:
    """The options, and which gradients are asked for: torch hands over no defaults at the end."""
    of_q, of_kv, *_ = (*arguments[len(OPTIONS):], True, True)
    return arguments[:len(OPTIONS)], of_q, of_kv


def _check_first_derivative(*tensors: torch.Tensor) -> None:
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        raise ArgumentError("train_attn has no second derivative; call backward without create_graph=True, or take "
                            "torch.nn.functional.scaled_dot_product_attention with the backend MATH")


# --- the derivative ---------------------------------------------------------------------------------------------------


def _save(ctx: Any, inputs: tuple[Any, ...], output: _Tensors) -> None:
    _, _, v, *ctx.options = inputs
    out, lse, saved = output
    ctx.mark_non_differentiable(lse, saved)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(v, out, lse, saved)


def _differentiate(ctx: Any, grad_out: torch.Tensor | None, *unused: None) -> tuple[torch.Tensor | None, ...]:
    nothing = [None] * len(ctx.options)
    if grad_out is None:
        return None, None, None, *nothing
    if is_transformed():
        check_backward_alone(grad_out=grad_out)
    of_q, of_k, of_v = ctx.needs_input_grad[:3]
    found = _backward_op(grad_out, *ctx.saved_tensors, *ctx.options, of_q=of_q, of_kv=of_k or of_v)
    return *(gradient if of_it else None for gradient, of_it in zip(found, (of_q, of_k, of_v))), *nothing


_forward_op = register("train_attn", "train", "(Tensor, Tensor, Tensor)", _forward, _fake_forward)
LIBRARY.define("train_attn_backward(Tensor grad_out, Tensor v, Tensor out, Tensor lse, Tensor saved, "
               f"{schema()}, bool of_q=True, bool of_kv=True) -> (Tensor, Tensor, Tensor)", tags=TAGS)
_backward_op = implement("train_attn_backward", _backward, _fake_backward)
torch.library.register_autograd(f"{PACKAGE}::train_attn", _differentiate, setup_context=_save, lib=LIBRARY)
register_rules(LIBRARY)
when_imported("torch.utils.flop_counter", register_formulas)  # not imported here: it warns where triton is missing
