"""What the checks and the choice of kernels say against a call, as a sentence, remembered by kind of call."""

from __future__ import annotations

import threading
from typing import Any

import torch

from sage_aot._call.ops import cast_for_autocast
from sage_aot._call.pipeline import MOST_PREPARED, backend_of, environment, handed_backend, kind_of_call, plan_of
from sage_aot._problem.check import check, check_device, check_no_grad, check_not_nested, check_out, check_tensors_are
from sage_aot._problem.options import Options
from sage_aot.errors import SageAotError

_answers: dict[tuple[Any, ...], str | None] = {}
"""By kind of call and autocast's dtype. The oldest is dropped first."""

_UNKNOWN = "no answer yet"
_lock = threading.Lock()  # held while _answers changes; reads take no lock


def refusal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor | None,
            options: tuple[Any, ...]) -> str | None:
    """The message of the error that an operator's call would raise, or None. Launches nothing and loads no kernel.

    Remembers the answer by kind of call and by autocast's dtype. Raises SageAotError for what has no such kind: what is
    no dense tensor, or on no device with kernels; and for grad mode, which may change between calls.
    """
    if not (isinstance(q, torch.Tensor) and isinstance(k, torch.Tensor) and isinstance(v, torch.Tensor)):
        check_tensors_are(q=q, k=k, v=v)  # raises
    if not (q.is_cuda or q.is_cpu):
        check_device(q)  # raises
    if out is not None and not isinstance(out, torch.Tensor):
        check_out(out, q)  # raises
    if q.is_nested or k.is_nested or v.is_nested:
        check_not_nested(q=q, k=k, v=v)  # raises
    if q.requires_grad or k.requires_grad or v.requires_grad or out is not None and out.requires_grad:
        check_no_grad(q=q, k=k, v=v, out=out)
    kind = q.device.type
    autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    key = autocast, *kind_of_call(q, k, v, out, options, environment(), handed_backend())
    answer = _answers.get(key, _UNKNOWN)
    if answer is _UNKNOWN:
        answer = _asked(q, k, v, out, options, autocast)
        with _lock:
            while len(_answers) >= MOST_PREPARED:
                del _answers[next(iter(_answers))]
            _answers[key] = answer
    return answer


def _asked(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor | None, options: tuple[Any, ...],
           autocast: torch.dtype | None) -> str | None:
    """The message of what the pipeline would raise now."""
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
