"""Whether a call is to be differentiated: by autograd, by forward AD, or by a transformation of torch.func.

An operator cannot tell: by the time it runs, the wrappers of torch.func are gone, and the derivatives that torch then
makes up are zeros. The public calls ask in front of their operators.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import forward_ad

from sage_aot._kernels.spec import MOST_TRAINED
from sage_aot.errors import ArgumentError

_functorch: Any = torch._C._functorch
_DIFFERENTIATING = _functorch.TransformType.Grad, _functorch.TransformType.Jvp


def may_differentiate() -> bool:
    """Whether any tensor could be differentiated now: a question of less than a microsecond in front of
    :func:`check_no_derivative`."""
    return torch.is_grad_enabled() or forward_ad._current_level >= 0 or is_transformed()


def is_transformed() -> bool:
    """Whether a transformation of torch.func is going on, vmap and functionalize among them."""
    return _functorch.peek_interpreter_stack() is not None


def _transformation_differentiates() -> bool:
    return any(level.key() in _DIFFERENTIATING for level in _functorch.get_interpreter_stack() or ())


# dynamo enters the transformations that it traces, so at that time the answers hold; it guards on those around it.
is_transformed._dynamo_marked_constant = True  # type: ignore[attr-defined]
_transformation_differentiates._dynamo_marked_constant = True  # type: ignore[attr-defined]


def check_no_grad(**tensors: torch.Tensor | None) -> None:
    """ArgumentError for a tensor that autograd would track. Call it on every call, since grad mode may change."""
    if not torch.is_grad_enabled():
        return
    for name, tensor in tensors.items():
        if tensor is not None and tensor.requires_grad:
            raise ArgumentError(f"{name} requires grad, and attn has no backward pass; call it under torch.no_grad() "
                                f"or torch.inference_mode(), or pass {name}.detach(); to train with f16 or bf16, head "
                                f"dims up to {MOST_TRAINED} and no key mask call sage_aot.train_attn")


def check_no_derivative(**tensors: torch.Tensor | None) -> None:
    """ArgumentError for a tensor by which the result of attn would be differentiated. In compiled code the operator's
    fake implementation asks what autograd tracks."""
    if not torch.compiler.is_dynamo_compiling():
        check_no_grad(**tensors)
    _check_differentiated("attn has no derivative", **tensors)


def check_backward_alone(**tensors: torch.Tensor) -> None:
    """ArgumentError for a tensor that is differentiated by other means than autograd's backward pass."""
    _check_differentiated("train_attn has a backward pass alone, by Tensor.backward() and torch.autograd.grad()",
                          **tensors)


def _check_differentiated(what: str, **tensors: torch.Tensor | None) -> None:
    for name, tensor in tensors.items():
        if tensor is not None and _is_differentiated(tensor):
            raise ArgumentError(f"{name} is differentiated by forward AD or torch.func, and {what}; there, call "
                                f"torch.nn.functional.scaled_dot_product_attention with the backend MATH")


def _is_differentiated(tensor: torch.Tensor) -> bool:
    """Whether forward AD or a transformation of torch.func differentiates by a tensor. A tracer cannot look into a
    tensor: to it, any tensor may be."""
    if torch.compiler.is_dynamo_compiling():
        return forward_ad._current_level >= 0 or _transformation_differentiates()
    while _functorch.is_functorch_wrapped_tensor(tensor):
        if _functorch.is_gradtrackingtensor(tensor) and _tracks(tensor):
            return True
        tensor = _functorch.get_unwrapped(tensor)
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(tensor).tangent is not None


def _tracks(wrapper: torch.Tensor) -> bool:
    """Of a wrapper of grad, jvp or what is made of them: whether a derivative goes through it."""
    own = _functorch.maybe_get_level(wrapper)
    if any(level.level() == own and level.key() == _functorch.TransformType.Grad
           for level in _functorch.get_interpreter_stack() or ()):
        return wrapper.requires_grad and torch.is_grad_enabled()
    return True
