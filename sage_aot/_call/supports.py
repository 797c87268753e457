"""The public question :func:`supports`: would :func:`sage_aot.attn` take this call here?"""

from __future__ import annotations

import threading
from typing import Any

import torch

from sage_aot._call.ops import cast_for_autocast
from sage_aot._call.pipeline import MOST_PREPARED, backend_of, environment, handed_backend, kind_of_call, plan_of
from sage_aot._problem.check import (
    check,
    check_device,
    check_no_grad,
    check_not_nested,
    check_out,
    check_return_lse,
    check_tensors_are,
)
from sage_aot._problem.options import Options, for_schema
from sage_aot.errors import SageAotError


def supports(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, is_causal: bool = False, scale: float | None = None,
             layout: str = "HND", qk: str = "auto", smooth_q: bool | str = "auto", smooth_k: bool = True,
             smooth_v: bool = False, rotate: bool | str = "auto", clip: bool = True, pv_accum: str = "auto",
             return_lse: bool = False, out: torch.Tensor | None = None) -> str | None:
    """Why :func:`sage_aot.attn` would refuse this call here, or None where it would take it.

    The answer is that of the checks and of the choice of kernels. It launches nothing, loads no kernel, and reads no
    value of a tensor, so a damaged file or a refusal by the driver shows in the call alone. The answer for a kind of
    call (shapes, strides, dtypes, devices, options, autocast) is remembered: asked again, it takes a few microseconds.
    Inside of torch.compile the question breaks the graph; ask it outside.

    Args:
        q, k, v, is_causal, ...: as :func:`sage_aot.attn` takes them, of any type and value.

    Returns:
        None, or the message of the error that the call would raise.

    Raises:
        TypeError: a keyword that :func:`sage_aot.attn` does not have.

    Warns:
        PtxWarning: as :func:`sage_aot.attn`.

    Source: none; integrations ask it before they replace a model's attention.

    >>> import torch, sage_aot
    >>> q, k, v = torch.randn(3, 1, 2, 100, 64)
    >>> sage_aot.supports(q, k, v)
    'q: expected torch.float16 or torch.bfloat16, got torch.float32; convert it with q.to(torch.bfloat16)'
    >>> sage_aot.supports(q.bfloat16(), k.bfloat16(), v.bfloat16()) is None
    True
    """
    try:
        options = for_schema(is_causal, scale, layout, qk, smooth_q, smooth_k, smooth_v, rotate, clip, pv_accum)
        if not isinstance(return_lse, bool):
            check_return_lse(return_lse)  # raises
        if not (isinstance(q, torch.Tensor) and isinstance(k, torch.Tensor) and isinstance(v, torch.Tensor)):
            check_tensors_are(q=q, k=k, v=v)  # raises
        if not (q.is_cuda or q.is_cpu):
            check_device(q)  # raises
        if out is not None and not isinstance(out, torch.Tensor):
            check_out(out, q)  # raises
        if q.is_nested or k.is_nested or v.is_nested:
            check_not_nested(q=q, k=k, v=v)  # raises
        if q.requires_grad or k.requires_grad or v.requires_grad or out is not None and out.requires_grad:
            check_no_grad(q=q, k=k, v=v, out=out)  # on every call: grad mode changes
    except SageAotError as error:
        return str(error)
    return _answer(q, k, v, out, options)


_answers: dict[tuple[Any, ...], str | None] = {}
"""By kind of call and autocast's dtype. The oldest is dropped first."""

_UNKNOWN = "no answer yet"
_lock = threading.Lock()  # held while _answers changes; reads take no lock


def _answer(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor | None,
            options: tuple[Any, ...]) -> str | None:
    kind = q.device.type
    autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    key = autocast, *kind_of_call(q, k, v, out, options, environment(), handed_backend())
    answer = _answers.get(key, _UNKNOWN)
    if answer is _UNKNOWN:
        answer = _refusal(q, k, v, out, options, autocast)
        with _lock:
            while len(_answers) >= MOST_PREPARED:
                del _answers[next(iter(_answers))]
            _answers[key] = answer
    return answer


def _refusal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor | None, options: tuple[Any, ...],
             autocast: torch.dtype | None) -> str | None:
    """The message of what the pipeline would raise."""
    device = q.get_device()
    try:
        backend = handed_backend() or backend_of(q)
        if autocast is not None:
            q, k, v = (_as_cast(tensor, autocast, q.device.type) for tensor in (q, k, v))
        problem = check(q, k, v, Options.from_schema(*options))
        if out is not None:
            check_out(out, q)
        plan_of(backend, problem, device)
    except SageAotError as error:
        return str(error)
    return None


def _as_cast(tensor: torch.Tensor, dtype: torch.dtype, kind: str) -> torch.Tensor:
    """What autocast would hand to the operator, without values: to cast them would launch a kernel."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        return cast_for_autocast(mode.from_tensor(tensor), dtype, kind)
