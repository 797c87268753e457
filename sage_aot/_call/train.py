"""Attention that is trained: :func:`train_attn`, :func:`train_attn_varlen`, their operators and derivatives."""

from __future__ import annotations

from numbers import Number
from typing import Any

import torch

from sage_aot._call import selection  # noqa: F401  # whose operators get rules below, too
from sage_aot._call.batching import register_rules
from sage_aot._call.flops import register_formulas
from sage_aot._call.forms import call_of_attn_varlen, check_qkv, options_of
from sage_aot._call.ops import CONTIGUOUS, LIBRARY, TAGS, Operator, implement, kept_bytes, register
from sage_aot._call.pipeline import prepared, prepared_backward
from sage_aot._call.signatures import SIGNATURES
from sage_aot._imports import when_imported
from sage_aot._package import PACKAGE
from sage_aot._problem.arguments import check_optional_are
from sage_aot._problem.check import check, check_backward
from sage_aot._problem.derivatives import check_backward_alone, is_transformed
from sage_aot._problem.given import Given
from sage_aot._problem.options import OPTIONS, Asked, Options, schema
from sage_aot._problem.problem import Problem
from sage_aot._problem.tensors import FUNCTIONS, TENSORS, Kind, check_taken
from sage_aot.errors import ArgumentError

_Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def train_attn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, key_mask: torch.Tensor | None = None,
               is_causal: bool = False, scale: float | None = None, layout: str = "HND",
               **refused: Any) -> torch.Tensor:
    """Attention in 8 bits that is differentiable: softmax(q·kᵀ·scale)·v, and its gradients by SageBwd.

    The forward pass is that of :func:`sage_aot.attn` with ``p="exp2"`` and else its default options, but that channels
    of k which are far larger than most are not divided: such a k costs more accuracy here. The backward pass recomputes
    P from the same 8-bit q and k. Of its five products it computes dO·Vᵀ in 16 bits and the others in 8 bits, on Hopper
    q·kᵀ in 8 bits and the others in 16. Rounding is treated as identity (straight-through). Equal calls on one GPU give
    equal bits. docs/training.md says what models train with it.

    For the backward pass a call keeps 8-bit q and k, and v and the output as they are: 6 bytes a channel of head dims
    64 and 128, where bf16 attention keeps 8. Where v is a view, all that it is a view of is kept. The gradient of q is
    computed where q requires grad, and those of k and v, together, where k or v does. Under torch.no_grad() call
    :func:`sage_aot.attn`, which with ``p="exp2"`` gives the same output where k has no such channels.

    Args:
        q: as :func:`sage_aot.attn`; float16 or bfloat16, headdim from 1 to 128. Elements of k, or of q times
            `scale`, beyond 1e25 give wrong gradients, and beyond 1e17 where scores pass 1e34.
        k, v: likewise. The gradients of grouped heads are summed over the q heads that share a kv head.
        key_mask: as :func:`sage_aot.attn`: bool ``[batch, keys]``, True where a key may be seen. Nothing depends on
            what other keys and values hold, and their gradients are zeros.
        is_causal: query i sees the keys ``j <= i + keys - queries``: the mask is aligned bottom-right.
        scale: factor on q·kᵀ before the softmax; None means ``1 / sqrt(headdim)``.
        layout: ``"HND"`` or ``"NHD"``, of q, k, v and the output.
        refused: `sinks`, `attn_mask`, `block_mask` and `window` of :func:`sage_aot.attn`, and `dropout_p`, which have
            no backward pass: None or 0.0.

    Returns:
        The output, like q in shape and dtype. A query that sees no key gives zeros, and has a gradient of zeros. It
        has no second derivative.

    Raises:
        ArgumentError, UnsupportedError, CubinError, LaunchError: as :func:`sage_aot.attn`. ArgumentError also within
            forward AD and derivatives of torch.func, for which there is no formula. (The operator itself, as a saved
            program has it, gives zeros there, as that of :func:`sage_aot.attn` does.) UnsupportedError also where
            the folder of kernels has none for the backward pass.

    Source: SageAttention3 (arXiv:2505.11594), Algorithms 2 and 3.

    >>> import torch, sage_aot
    >>> q, k, v = (torch.randn(1, 2, 100, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    >>> sage_aot.train_attn(q, k, v, is_causal=True).sum().backward()
    >>> q.grad.shape
    torch.Size([1, 2, 100, 64])
    """
    check_qkv(q, k, v)
    check_optional_are(key_mask=key_mask)
    asked = Asked(is_causal, scale, layout, window=refused.pop("window", None))
    return _trained("train", _train, (q, k, v, key_mask), asked, refused)


def train_attn_varlen(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor,
                      cu_seqlens_k: torch.Tensor, max_seqlen_q: int, max_seqlen_k: int, *, is_causal: bool = False,
                      scale: float | None = None, **refused: Any) -> torch.Tensor:
    """:func:`sage_aot.train_attn` on sequences of several lengths in one tensor, without padding.

    Sequences are those of :func:`sage_aot.attn_varlen`. Bits, also of gradients, equal those of
    :func:`sage_aot.train_attn` on each sequence, except where either splits keys otherwise. On Hopper the bits of
    the gradients of q and k also depend on whether one kernel finds all gradients: docs/training.md.

    Args:
        q: as :func:`sage_aot.attn_varlen`, ``[tokens, q heads, headdim]``; float16 or bfloat16, headdim from 1 to 128.
        k, v: likewise. The gradients of grouped heads are summed over the q heads that share a kv head.
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k: as :func:`sage_aot.attn_varlen`. Where it would not
            write a row of the output (behind the last sequence, or behind `max_seqlen_q`), here the row is zeros. Such
            rows of q, k and v have gradients of zeros.
        is_causal: query i of a sequence sees the keys ``j <= i + keys - queries`` of it, aligned bottom-right.
        scale: as :func:`sage_aot.train_attn`.
        refused: likewise, and `key_mask`: leave the keys that it masks out of the sequences.

    Returns:
        Attention ``[tokens, q heads, headdim]``, contiguous, in the dtype of q. It has no second derivative.

    Raises:
        ArgumentError, UnsupportedError, CubinError, LaunchError: as :func:`sage_aot.train_attn`.

    >>> import torch, sage_aot
    >>> q, k, v = (torch.randn(100, 2, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    >>> begins = torch.tensor([0, 70, 100], dtype=torch.int32)
    >>> sage_aot.train_attn_varlen(q, k, v, begins, begins, 70, 70, is_causal=True).sum().backward()
    >>> q.grad.shape
    torch.Size([100, 2, 64])
    """
    asked = Asked(is_causal, scale, window=refused.pop("window", None))
    kind, arguments, _ = call_of_attn_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, asked,
                                             kind="train_varlen")
    return _trained(kind, _train_varlen, arguments, asked, refused)


def _trained(kind: Kind, operator: Operator, arguments: tuple[Any, ...], asked: Asked,
             refused: dict[str, Any]) -> torch.Tensor:
    """Make a call by its operator, if nothing is asked for that has no backward pass."""
    if refused:
        _check_refused(kind, refused)
    q, k, v, *_ = arguments
    options = options_of(q, asked, None, False)
    if is_transformed():
        check_backward_alone(q=q, k=k, v=v)
    out: torch.Tensor = operator(*arguments, *options)[0]
    return out


def _check_refused(kind: Kind, refused: dict[str, Any]) -> None:
    """Raise ArgumentError for an argument that has no backward pass, and TypeError for one that nobody knows."""
    for name, value in refused.items():
        if name in TENSORS and kind not in TENSORS[name].calls:
            check_taken(kind, **{name: value})
        elif name != "dropout_p":
            raise TypeError(f"{FUNCTIONS[kind]}() got an unexpected keyword argument {name!r}")
        elif value is not None and (not isinstance(value, Number) or bool(value)):
            raise ArgumentError(f"dropout_p: expected 0.0, got {value!r}; there is no dropout: leave it out, or call "
                                f"torch.nn.functional.scaled_dot_product_attention")


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
    return (torch.empty_like(q, memory_format=CONTIGUOUS), q.new_empty(problem.lse_shape, dtype=torch.float32),
            q.new_empty(kept_bytes, dtype=torch.uint8))


class _BackwardPass:
    """The operator that returns the gradients of q, k and v; no elements for those that are not asked for.

    Its arguments are the gradient of the output, v, what the forward pass returned, what that took behind q, k and v,
    and which gradients are asked for.
    """

    def __init__(self, kind: Kind) -> None:
        self._kind, signature = kind, SIGNATURES[kind]
        self._behind_qkv = signature.arity - 3  # arguments between what the forward pass returned and the options
        self._tensors = signature.behind_qkv.count("Tensor")  # the first of them
        name = f"{FUNCTIONS[kind]}_backward"
        LIBRARY.define(f"{name}(Tensor grad_out, Tensor v, Tensor out, Tensor lse, Tensor saved, "
                       f"{signature.behind_qkv}{schema()}, bool of_q=True, bool of_kv=True) "
                       f"-> (Tensor, Tensor, Tensor)", tags=TAGS)
        self._operator = implement(name, self._run, self._fake)

    def _run(self, grad_out: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, saved: torch.Tensor,
             *arguments: Any) -> _Tensors:
        from sage_aot._backends.base import BackwardTensors

        _check_first_derivative(grad_out, v, out)
        given, options, of_q, of_kv = self._read(out, v, arguments)
        problem = check_backward(given, grad_out, lse, saved, Options.from_schema(*options))
        gradients = _empty_gradients(out, v, of_q, of_kv)
        if problem.is_empty or not (of_q or of_kv):
            return tuple(gradient.zero_() for gradient in gradients)  # type: ignore[return-value]
        grad_q, grad_k, grad_v = gradients
        tensors = BackwardTensors(grad_out, given, grad_q if of_q else None, grad_k if of_kv else None,
                                  grad_v if of_kv else None)
        call = prepared_backward(tensors, options)
        if saved.numel() != call.kept_bytes:
            raise ArgumentError(f"saved: expected the {call.kept_bytes} bytes that the kernels in use keep of such a "
                                f"forward pass, got {saved.numel()}; run forward and backward pass with the same "
                                f"kernels")
        call.run(tensors, lse, saved)
        return gradients

    def _fake(self, grad_out: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, saved: torch.Tensor,
              *arguments: Any) -> _Tensors:
        given, options, of_q, of_kv = self._read(out, v, arguments)
        check_backward(given, grad_out, lse, saved, Options.from_schema(*options))
        return _empty_gradients(out, v, of_q, of_kv)

    def _read(self, out: torch.Tensor, v: torch.Tensor,
              arguments: tuple[Any, ...]) -> tuple[Given, tuple[Any, ...], bool, bool]:
        """The call with the output instead of q, and v instead of k; its options; and which gradients are asked for:
        torch hands over no defaults at the end."""
        given = SIGNATURES[self._kind].read((out, v, v, *arguments[: self._behind_qkv]))
        others = arguments[self._behind_qkv:]
        options, asked = others[: len(OPTIONS)], others[len(OPTIONS):]
        of_q, of_kv, *_ = (*asked, True, True)
        return given, options, of_q, of_kv

    # The derivative of the forward operator, as torch.library.register_autograd takes it.

    def save(self, ctx: Any, inputs: tuple[Any, ...], output: _Tensors) -> None:
        _, _, v, *others = inputs
        out, lse, saved = output
        ctx.mark_non_differentiable(lse, saved)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(v, out, lse, saved, *others[: self._tensors])
        ctx.others = others[self._tensors:]

    def differentiate(self, ctx: Any, grad_out: torch.Tensor | None, *unused: None) -> tuple[torch.Tensor | None, ...]:
        nothing = [None] * (self._tensors + len(ctx.others))
        if grad_out is None:
            return None, None, None, *nothing
        if is_transformed():
            check_backward_alone(grad_out=grad_out)
        of_q, of_k, of_v = ctx.needs_input_grad[:3]
        found = self._operator(grad_out, *ctx.saved_tensors, *ctx.others, of_q=of_q, of_kv=of_k or of_v)
        return *(gradient if of_it else None for gradient, of_it in zip(found, (of_q, of_k, of_v))), *nothing


def _empty_gradients(out: torch.Tensor, v: torch.Tensor, of_q: bool, of_kv: bool) -> _Tensors:
    grad_q, grad_k, grad_v = (torch.empty_like(like, memory_format=CONTIGUOUS) if of_it else like.new_empty(0)
                              for like, of_it in ((out, of_q), (v, of_kv), (v, of_kv)))
    return grad_q, grad_k, grad_v


def _check_first_derivative(*tensors: torch.Tensor) -> None:
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        raise ArgumentError("train_attn has no second derivative; call backward without create_graph=True, or take "
                            "torch.nn.functional.scaled_dot_product_attention with the backend MATH")


def _differentiable(kind: Kind) -> Operator:
    """Define the operators of a public function, and return that of the forward pass."""
    name = FUNCTIONS[kind]
    operator, backward = register(name, kind, "(Tensor, Tensor, Tensor)", _forward, _fake_forward), _BackwardPass(kind)
    torch.library.register_autograd(f"{PACKAGE}::{name}", backward.differentiate, setup_context=backward.save,
                                    lib=LIBRARY)
    return operator


_train, _train_varlen = _differentiable("train"), _differentiable("train_varlen")
register_rules(LIBRARY)
when_imported("torch.utils.flop_counter", register_formulas)  # not imported here: it warns where triton is missing
