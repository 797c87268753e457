"""Why a call would be refused: the messages of its checks and of the choice of kernels, remembered by kind of call."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from sage_aot._call.ops import cast_for_autocast
from sage_aot._call.pipeline import (
    answers,
    backend_of,
    environment,
    handed_backend,
    kernels_on,
    kind_of_call,
    kind_of_stored,
    plan_of_stored,
)
from sage_aot._problem.check import check, check_dense, check_out, check_stored
from sage_aot._problem.derivatives import check_no_derivative, check_no_grad, is_transformed
from sage_aot._problem.options import Options
from sage_aot.errors import ArgumentError, UnsupportedError

if TYPE_CHECKING:
    from sage_aot._backends.base import Backend
    from sage_aot._problem.check import Sequences, Stored

_UNKNOWN = "no answer yet"


def refusal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, key_mask: torch.Tensor | None,
            out: torch.Tensor | None, options: tuple[Any, ...], sequences: Sequences | None = None) -> str | None:
    """The message of the error that an operator's call would raise, or None. Launches nothing and loads no kernel.

    Raises the error instead where the next call of the same kind may get another answer: for grad mode, for a tensor
    that is not dense, and where the kernels' folder or a loader is missing.
    """
    if not (is_plain(q) and is_plain(k) and is_plain(v) and (key_mask is None or is_plain(key_mask))
            and (out is None or is_plain(out))):
        check_dense(q=q, k=k, v=v, key_mask=key_mask, out=out)
    if sequences is not None:
        check_dense(cu_seqlens_q=sequences.cu_seqlens_q, cu_seqlens_k=sequences.cu_seqlens_k)
    if q.requires_grad or k.requires_grad or v.requires_grad or out is not None and out.requires_grad:
        check_no_grad(q=q, k=k, v=v, out=out)
    if is_transformed():
        check_no_derivative(q=q, k=k, v=v, out=out)
    autocast = _autocast_dtype(q)
    handed, variables = handed_backend(), environment()
    key = autocast, *kind_of_call(q, k, v, key_mask, out, options, variables, handed, sequences)
    return _remembered(key, handed, variables, lambda: _asked(handed or backend_of(q), q, k, v, key_mask, out, options,
                                                              sequences, autocast))


def refusal_stored(q: torch.Tensor, stored: Stored, out: torch.Tensor | None, options: tuple[Any, ...]) -> str | None:
    """As :func:`refusal`, of a call with k and v that were quantized before."""
    if not (is_plain(q) and (out is None or is_plain(out))):
        check_dense(q=q, out=out)
    if q.requires_grad or out is not None and out.requires_grad:
        check_no_grad(q=q, out=out)
    if is_transformed():
        check_no_derivative(q=q, out=out)
    autocast = _autocast_dtype(q)
    handed, variables = handed_backend(), environment()
    key = autocast, *kind_of_stored(q, stored, out, options, variables, handed)
    return _remembered(key, handed, variables, lambda: _asked_stored(handed or backend_of(q), q, stored, out, options,
                                                                     autocast))


def _autocast_dtype(q: torch.Tensor) -> torch.dtype | None:
    kind = q.device.type
    return torch.get_autocast_dtype(kind) if not q.is_meta and torch.is_autocast_enabled(kind) else None


def _remembered(key: tuple[Any, ...], handed: Backend | None, variables: tuple[Any, ...],
                ask: Callable[[], str | None]) -> str | None:
    """The answer of before for calls of a kind, or what `ask` says now."""
    try:
        answer = answers.get(key, _UNKNOWN)
    except TypeError:  # a size that a tracer does not know yet cannot be hashed
        return ask()
    if answer is _UNKNOWN:
        answer = ask()
        if (handed, variables) == (handed_backend(), environment()):  # else another thread changed them
            answers.keep(key, answer)
    return answer


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is dense and of no subclass."""
    return (type(tensor) is torch.Tensor or type(tensor) is torch.nn.Parameter) and (
        tensor.layout is torch.strided and not tensor.is_nested)


def _asked(backend: Backend, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, key_mask: torch.Tensor | None,
           out: torch.Tensor | None, options: tuple[Any, ...], sequences: Sequences | None,
           autocast: torch.dtype | None) -> str | None:
    """The message of what the pipeline would raise now."""
    device = q.get_device()
    if autocast is not None:
        q, k, v = (_as_cast(tensor, autocast, q.device.type) for tensor in (q, k, v))
    try:
        problem = check(q, k, v, Options.from_schema(*options), key_mask, sequences)
        if out is not None:
            check_out(out, q)
        kernels_on(backend, problem, device)
    except (ArgumentError, UnsupportedError) as error:
        return str(error)
    return None


def _asked_stored(backend: Backend, q: torch.Tensor, stored: Stored, out: torch.Tensor | None,
                  options: tuple[Any, ...], autocast: torch.dtype | None) -> str | None:
    q = q if autocast is None else _as_cast(q, autocast, q.device.type)
    try:
        problem = check_stored(q, stored, Options.from_schema(*options))
        if out is not None:
            check_out(out, q)
        plan_of_stored(backend, problem, stored)
    except (ArgumentError, UnsupportedError) as error:
        return str(error)
    return None


def _as_cast(tensor: torch.Tensor, dtype: torch.dtype, kind: str) -> torch.Tensor:
    """What autocast would hand to the operator, without values: to cast them would launch a kernel."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        return cast_for_autocast(mode.from_tensor(tensor), dtype, kind)
