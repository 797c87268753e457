"""The keys that a query row sees: templates/include/sage/problem/mask.cuh in torch."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from sage_aot._problem.options import UNBOUNDED, bounds_of


def rows_see_alike(call: Any) -> bool:
    """True where every row sees every key, so that heads may become rows of one head. `call`: has the options that
    :class:`Mask` has, each of which hides nothing where it is false."""
    return not (call.is_causal or call.window)


class VisibleKeys(NamedTuple):
    """The keys that each row sees: from `begin` on, before `end`."""

    begin: torch.Tensor  # [rows] i64
    end: torch.Tensor  # likewise; equal to begin where a row sees no key

    def of_rows(self, rows: slice) -> VisibleKeys:
        return VisibleKeys(self.begin[rows], self.end[rows])

    def to(self, device: torch.device) -> VisibleKeys:
        return VisibleKeys(self.begin.to(device), self.end.to(device))

    def packed(self, key_ranks: torch.Tensor) -> VisibleKeys:
        """Visible keys among those that a key mask leaves. Of the first n keys the mask leaves key_ranks[n]."""
        return VisibleKeys(*(key_ranks[of_caller.to(key_ranks.device)] for of_caller in self))

    @property
    def none(self) -> torch.Tensor:
        """[rows] bool: the row sees no key."""
        return self.begin >= self.end

    def contains(self, keys: torch.Tensor) -> torch.Tensor:
        """[rows, keys] bool, of keys by index: the row sees the key."""
        return (keys >= self.begin[:, None]) & (keys < self.end[:, None])


@dataclass(frozen=True)
class Mask:
    """The options of a call that decide which keys a query row sees."""

    is_causal: bool = False
    window: tuple[int, int] | None = None

    @classmethod
    def of(cls, call: object) -> Mask:
        """The mask of an object that has the options as attributes."""
        return cls(**{name: getattr(call, name) for name in _OPTIONS})

    def visible_keys(self, rows: torch.Tensor, seqlen_q: int, seqlen_kv: int) -> VisibleKeys:
        """The keys of rows by index. Row i is at the key i + seqlen_kv − seqlen_q, and sees as many keys in front of it
        and behind it as the window has."""
        left, right = bounds_of(self.is_causal, self.window)
        at = rows + seqlen_kv - seqlen_q
        begin = torch.zeros_like(rows) if left == UNBOUNDED else (at - left).clamp(0, seqlen_kv)
        end = torch.full_like(rows, seqlen_kv) if right == UNBOUNDED else (at + 1 + right).clamp(0, seqlen_kv)
        return VisibleKeys(begin, end)


_OPTIONS = tuple(field.name for field in dataclasses.fields(Mask))
"""Names of the options that decide which keys a row sees."""
