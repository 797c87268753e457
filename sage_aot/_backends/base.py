"""What the pipeline asks of a backend."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from sage_aot._kernels.manifest import Manifest
from sage_aot._launch.plan import Plan


class Tensors(NamedTuple):
    """The tensors of a call that its preparation looks at: shapes, strides and devices, never values or addresses."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor


class Call(Protocol):
    """A call that is prepared for tensors of given shapes, strides and devices, as often as it is made."""

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
                 lse: torch.Tensor | None) -> None:
        """Write `out`, in the layout of q, and the log-sum-exp where it is wanted, [batch, heads, queries] float32."""
        ...


class Backend(Protocol):
    """What runs the kernels of one folder, or their emulation."""

    @property
    def manifest(self) -> Manifest: ...

    def arch(self, device: int) -> str:
        """The arch whose kernels run the calls of a CUDA device, or of CPU tensors, whose device is −1.
        UnsupportedError where there is none."""
        ...

    def bind(self, plan: Plan, tensors: Tensors) -> Call:
        """Prepare the calls of a plan. Neither queries nor keys are missing."""
        ...
