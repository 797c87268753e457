"""What the pipeline asks of a backend."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from sage_aot._kernels.manifest import Manifest
from sage_aot._launch.plan import Plan
from sage_aot._problem.check import Sequences


class Tensors(NamedTuple):
    """The tensors from which a call is prepared. Preparation reads shapes, strides and devices, no values or addresses.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    key_mask: torch.Tensor | None = None

    @property
    def of_rows(self) -> tuple[torch.Tensor, ...]:
        """Those of [batch, heads, rows, headdim] or [tokens, heads, headdim]."""
        return self.q, self.k, self.v, self.out


class Call(Protocol):
    """A call prepared for tensors of given shapes, strides and devices. It may be made any number of times."""

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
                 lse: torch.Tensor | None, key_mask: torch.Tensor | None = None,
                 sequences: Sequences | None = None) -> None:
        """Write `out`, in the layout of q, and the log-sum-exp to `lse`, [batch, heads, queries] or [heads, tokens]
        float32, unless None."""
        ...


class Backend(Protocol):
    """What runs the kernels of one folder, or their emulation."""

    @property
    def manifest(self) -> Manifest: ...

    def arch(self, device: int) -> str:
        """The arch whose kernels run the calls of a CUDA device; −1 stands for CPU tensors. UnsupportedError where no
        arch does."""
        ...

    def bind(self, plan: Plan, tensors: Tensors) -> Call:
        """Prepare the calls of a plan, which has at least one query and one key."""
        ...
