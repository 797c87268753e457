"""Routes: calls that are the host's by their shape, remembered, so that a small call is left to the host at once.

The first call of a kind learns its route; adapters look it up before they make a :class:`HostCall`, which takes longer
than a small call of SDPA allows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from sage_aot.integrations import _policy
from sage_aot.integrations._calibration import chosen, threshold_of
from sage_aot.integrations._gain import Work, is_faster, kernel_headdim, prefers_flash
from sage_aot.integrations._report import SLOWER, Tally, is_counted, lock, tally_of

HOST, FLASH, FLASH_GROUPED = range(3)
"""Ways in which a host computes a call: its own; by torch's FlashAttention-2; by that where k and v have fewer heads
than q, which the call must allow."""


@dataclass(frozen=True, slots=True)  # whose fields are read faster than those of a named tuple
class Route:
    """The way of a call that is the host's by its shape, whatever else it asks for."""

    counted: Callable[[], Any]  # to be called for each call
    by: int


_MOST = 4096
"""Routes that are remembered at once."""

NOT_ASKED: Any = "not asked yet"
"""Mark in the place of a route that nobody has learned yet; a kind that has none is kept as None."""


def route(q: torch.Tensor, k: torch.Tensor, has_mask: bool, is_causal: bool, rows: int = -2) -> Route | None:
    """The route of a call; None where more than its shape decides.

    Args:
        is_causal: the call may have a causal mask.
        rows: k's dimension of keys, -2 or 1.
    """
    if torch.compiler.is_dynamo_compiling():
        return None
    try:
        kind = q.shape, k.shape, has_mask, is_causal, rows
        known = _policy.routes.get(kind, NOT_ASKED)
        return _learn(q, k, kind) if known is NOT_ASKED else known
    except (RuntimeError, TypeError):  # a nested tensor has no shape, lengths that are symbols have no hash
        return None


def is_small(q: torch.Tensor, k: torch.Tensor, has_mask: bool, is_causal: bool, rows: int = -2) -> bool:
    """True for a call that its :func:`route` leaves to the host; counts it."""
    known = route(q, k, has_mask, is_causal, rows)
    if known is None:
        return False
    known.counted()
    return True


def _learn(q: torch.Tensor, k: torch.Tensor, kind: tuple[Any, ...]) -> Route | None:
    if _policy.current().when != "faster" or not q.is_cuda or not type(q) is type(k) is torch.Tensor:
        return None
    device = q.get_device()
    agreed = all(chosen(other).thresholds == chosen(device).thresholds for other in range(torch.cuda.device_count()))
    by = _way(device, *kind) if agreed else None  # `kind` has no device: to ask a tensor for it takes too long
    tally = None if by is None else tally_of(SLOWER)
    made = None if by is None or tally is None else Route(tally.add, by)
    _remember(kind, made, tally)
    return made


def _remember(kind: tuple[Any, ...], made: Route | None, tally: Tally | None) -> None:
    with lock:
        if len(_policy.learned) >= _MOST:
            _policy.learned.clear()
        if is_counted(tally):  # else the report was reset meanwhile
            _policy.learned[kind] = made


def _kinds(has_mask: bool, is_causal: bool) -> tuple[str, ...]:
    """Kinds that a call may be of. What a mask, a causal one with it or a window hides makes less work than all of its
    pairs: where those are not faster, the rest is not."""
    if has_mask:
        return "padded", "masked", "window"
    return ("full", "causal") if is_causal else ("full",)


def _way(device: int, q: torch.Size, k: torch.Size, has_mask: bool, is_causal: bool, rows: int) -> int | None:
    if len(q) != 4 or len(k) != 4 or 0 in q or 0 in k:
        return None
    heads, keys = (1, 2) if rows == -2 else (2, 1)
    sizes = q[0], q[heads], k[heads], q[keys], k[keys], q[3]
    if any(is_faster(threshold_of(device, kind, kernel_headdim(q[3])), Work.of(*sizes, kind == "causal"))
           for kind in _kinds(has_mask, is_causal)):
        return None
    fits = q[0] == k[0] and q[3] == k[3] and q[heads] % k[heads] == 0 and q[3] % 8 == 0  # torch pads other head dims
    if rows != -2 or has_mask or is_causal or not fits or not prefers_flash(
            chosen(device).thresholds, q[0], q[heads], q[keys], k[keys], q[3]):
        return HOST
    return FLASH if q[heads] == k[heads] else FLASH_GROUPED
