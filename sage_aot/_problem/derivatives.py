"""Checks that a call is not to be differentiated: by autograd, by forward AD, or by a transformation of torch.func.

An operator can tell the first alone. By the time it runs, torch.func has taken its wrappers off, and the derivatives
that torch then makes up are zeros. The public calls ask in front of their operators.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._functorch import pyfunctorch
from torch.autograd import forward_ad

from sage_aot._kernels.spec import MOST_TRAINED
from sage_aot._problem.options import STAYS_A_TENSOR
from sage_aot.errors import ArgumentError

_functorch: Any = torch._C._functorch


def check_no_grad(**tensors: torch.Tensor | None) -> None:
    """Raise ArgumentError for a tensor that autograd would track. Call it on every call, since grad mode may change."""
    if not torch.is_grad_enabled():
        return
    for name, tensor in tensors.items():
        if tensor is not None and tensor.requires_grad:
            raise ArgumentError(f"{name} requires grad, and attn has no backward pass; call it under torch.no_grad() "
                                f"or torch.inference_mode(), or pass {name}.detach(); to train with f16 or bf16, head "
                                f"dims up to {MOST_TRAINED}, no mask but a causal one and no sinks call "
                                f"sage_aot.train_attn")


# --- forward AD and torch.func ----------------------------------------------------------------------------------------


def is_transformed() -> bool:
    """True while forward AD or a transformation of torch.func goes on, vmap and functionalize among them: a question
    of a fraction of a microsecond in front of the checks below."""
    return _is_dual_level_entered(forward_ad._current_level) or _is_transformation_entered()


def has_no_rule_for_writes() -> bool:
    """True while vmap or functionalize goes on, for which operators that write to a tensor have no rule."""
    keys = [level.key() for level in _functorch.get_interpreter_stack() or ()]
    return _functorch.TransformType.Vmap in keys or _functorch.TransformType.Functionalize in keys


def check_no_derivative(**tensors: torch.Tensor | None) -> None:
    """Raise ArgumentError for a tensor by which forward AD or torch.func differentiates the result of attn."""
    _check("attn has no derivative", **tensors)


def check_backward_alone(**tensors: torch.Tensor | None) -> None:
    """Raise ArgumentError for a tensor by which forward AD or torch.func differentiates the result of train_attn, which
    has the derivative of autograd's backward pass alone."""
    _check("train_attn has a derivative for Tensor.backward() and torch.autograd.grad() alone", **tensors)


def _check(what: str, **tensors: torch.Tensor | None) -> None:
    for name, tensor in tensors.items():
        if tensor is not None and is_differentiated(tensor):
            raise ArgumentError(f"{name} is differentiated by forward AD or torch.func, and {what}; there, call "
                                f"torch.nn.functional.scaled_dot_product_attention with the backend MATH")


def is_differentiated(tensor: torch.Tensor) -> bool:
    """True while forward AD or torch.func differentiates by a tensor. To a tracer, which cannot look into a tensor, any
    tensor within them is differentiated."""
    if torch.compiler.is_dynamo_compiling():
        return (_is_dual_level_entered(forward_ad._current_level)
                or _is_differentiating_entered(torch.is_grad_enabled()))
    while _functorch.is_functorch_wrapped_tensor(tensor):
        if _functorch.is_gradtrackingtensor(tensor) and _tracks(tensor):
            return True
        tensor = _functorch.get_unwrapped(tensor)
    if forward_ad._current_level < 0:
        return False
    with pyfunctorch.temporarily_clear_interpreter_stack():  # else a transformation would wrap the tensor first
        return _has_tangent(tensor)


def _has_tangent(tensor: torch.Tensor) -> bool:
    return forward_ad.unpack_dual(tensor).tangent is not None  # type: ignore[no-untyped-call]


def _tracks(wrapper: torch.Tensor) -> bool:
    """True where a derivative goes through a wrapper by grad, jvp or what is made of them. Within them torch wraps
    views of constants, too. A wrapper by jvp tells only at the level of its own."""
    stack = _functorch.get_interpreter_stack() or []
    own = _functorch.maybe_get_level(wrapper)
    key = next((level.key() for level in stack if level.level() == own), _functorch.TransformType.Grad)
    if key == _functorch.TransformType.Grad:
        return wrapper.requires_grad and torch.is_grad_enabled()
    return stack[-1].level() != own or _has_tangent(wrapper)


# dynamo takes the answers of these for constants. It really enters the transformations that it traces, so at that time
# the answers hold; it guards on the transformations around the code, and on the values that the functions are given.


def _is_dual_level_entered(guarded: int) -> bool:
    """`guarded`: the level as the tracer knows it, which may be that of before the code entered one."""
    return forward_ad._current_level >= 0


def _is_transformation_entered() -> bool:
    return _functorch.peek_interpreter_stack() is not None


def _is_differentiating_entered(grad_enabled: bool) -> bool:
    keys = [level.key() for level in _functorch.get_interpreter_stack() or ()]
    return _functorch.TransformType.Jvp in keys or grad_enabled and _functorch.TransformType.Grad in keys


_constants: tuple[Any, ...] = (_is_dual_level_entered, _is_transformation_entered, _is_differentiating_entered,
                               has_no_rule_for_writes)
for _constant in _constants:
    _constant._dynamo_marked_constant = True


def _scalar_loses_a_derivative(tensor: torch.Tensor) -> bool:
    return tensor.requires_grad or is_transformed() and is_differentiated(tensor)


def _is_mapped(tensor: torch.Tensor) -> bool:
    """True for a tensor of vmap, which has a scalar for each entry."""
    return is_transformed() and bool(_functorch.is_batchedtensor(tensor))


STAYS_A_TENSOR += [_scalar_loses_a_derivative, _is_mapped]
