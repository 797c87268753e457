"""Reasons why a call would be refused: the messages of its checks and of the choice of kernels, remembered by kind of
call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from sage_aot._call.backends import backend_of, surroundings
from sage_aot._call.ops import autocast_dtype, cast_for_autocast
from sage_aot._call.pipeline import ByKind, kernels_on, kind_of_call, plan_of_call
from sage_aot._problem.arguments import check_dense, check_out
from sage_aot._problem.check import check
from sage_aot._problem.derivatives import check_no_derivative, check_no_grad, is_transformed
from sage_aot._problem.given import Given
from sage_aot._problem.options import Options
from sage_aot.errors import ArgumentError, UnsupportedError

if TYPE_CHECKING:
    from sage_aot._backends.base import Backend

answers: ByKind[str | None] = ByKind()
"""Answers of :func:`refusal`; the keys begin with autocast's dtype."""


def refusal(given: Given, out: torch.Tensor | None, options: tuple[Any, ...]) -> str | None:
    """The message of the error that an operator's call would raise, or None. Launches nothing and loads no kernel.

    Raises the error instead where the next call of the same kind may get another answer: for grad mode, for a tensor
    that is not dense, and where the kernels' folder or a loader is missing.
    """
    for tensor in (*given.tensors, out):
        if tensor is not None and not is_plain(tensor):
            check_dense(**given.named, out=out)
    if is_transformed():
        check_no_derivative(**given.named, out=out)
    autocast, around = autocast_dtype(given.like), surroundings()
    handed, _ = around
    key = autocast, *kind_of_call(given, out, options, around)
    return answers.remembered(key, around, lambda: _asked(handed or backend_of(given.like), given, out, options,
                                                          autocast))


def is_plain(tensor: torch.Tensor) -> bool:
    """True where a tensor is dense and of no subclass."""
    return (type(tensor) is torch.Tensor or type(tensor) is torch.nn.Parameter) and (
        tensor.layout is torch.strided and not tensor.is_nested)


def _asked(backend: Backend, given: Given, out: torch.Tensor | None, options: tuple[Any, ...],
           autocast: torch.dtype | None) -> str | None:
    """The message of what the pipeline would raise now."""
    check_no_grad(**given.named, out=out)  # raises: in another grad mode the answer is another
    device = given.like.get_device()
    if autocast is not None:
        given = _as_cast(given, autocast)
    try:
        problem = check(given, Options.from_schema(*options))
        if out is not None:
            check_out(out, given.like)
        if given.kind == "stored":
            plan_of_call(backend, problem, given)
        else:
            kernels_on(backend, problem, device)
    except (ArgumentError, UnsupportedError) as error:
        return str(error)
    return None


def _as_cast(given: Given, dtype: torch.dtype) -> Given:
    """The tensors that autocast would hand to the operator, without values: to cast them would launch a kernel."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    names = ("q",) if given.kind == "stored" else ("q", "k", "v")
    with FakeTensorMode() as mode:
        return given.having(**{name: cast_for_autocast(mode.from_tensor(getattr(given, name)), dtype,
                                                         given.like.device.type) for name in names})
