"""The error of quantization in a model's attention, call by call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from sage_aot._tools.reference import Accuracy, measure
from sage_aot.integrations import _serve
from sage_aot.integrations._rules import HostCall


class Audited(NamedTuple):
    """A call that sage_aot served, compared with the host's own attention on the same inputs."""

    q: tuple[int, ...]  # shape
    k: tuple[int, ...]
    layout: str  # of both: "HND" or "NHD"
    is_causal: bool
    has_mask: bool  # or a window
    accuracy: Accuracy  # of sage_aot's output against the host's


@contextmanager
def audit() -> Iterator[list[Audited]]:
    """Compute the calls that sage_aot serves by their host, too, while the context is entered, and append the
    difference to the list. The model goes on with sage_aot's output. Not audited are calls of compiled code, steps of a
    ring, and calls of the package sageattention: no host's own attention stands behind them.

    >>> import torch
    >>> from sage_aot.integrations import Policy, audit, use
    >>> from sage_aot.integrations.torch import sdpa
    >>> q, k, v = torch.randn(3, 1, 2, 100, 64)
    >>> with use(Policy(when="possible")), audit() as calls:
    ...     out = sdpa(q, k, v)
    >>> calls[0].q, calls[0].accuracy.cosine > 0.99
    ((1, 2, 100, 64), True)
    """
    calls: list[Audited] = []

    def observe(call: HostCall, result: Any, host: Callable[[], Any]) -> None:
        ours, hosts = (made[0] if isinstance(made, tuple) else made for made in (result, host()))
        calls.append(Audited(tuple(call.q.shape), tuple(call.k.shape), call.layout, call.is_causal,
                             call.mask is not None or call.window is not None, measure(ours, hosts)))

    before, _serve.observer = _serve.observer, observe
    try:
        yield calls
    finally:
        _serve.observer = before
