"""What the pipeline asks of a backend."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from sage_aot._kernels.manifest import Manifest
from sage_aot._launch.choose import Kernels
from sage_aot._launch.plan import Plan
from sage_aot._problem.check import Problem, Sequences


class Tensors(NamedTuple):
    """The tensors from which a call is prepared; None for one that the problem's part does not take. Preparation reads
    shapes, strides and devices, no values or addresses."""

    q: torch.Tensor | None
    k: torch.Tensor | None
    v: torch.Tensor | None
    out: torch.Tensor | None
    key_mask: torch.Tensor | None = None

    @property
    def of_rows(self) -> tuple[torch.Tensor | None, ...]:
        """Those of [batch, heads, rows, headdim] or [tokens, heads, headdim]."""
        return self.q, self.k, self.v, self.out

    @property
    def device(self) -> int:
        """The index of the CUDA device; −1 for CPU tensors."""
        return next(tensor for tensor in self.of_rows if tensor is not None).get_device()


class Call(Protocol):
    """A call prepared for tensors of given shapes, strides and devices. It may be made any number of times."""

    def __call__(self, q: torch.Tensor | None, k: torch.Tensor | None, v: torch.Tensor | None,
                 out: torch.Tensor | None, lse: torch.Tensor | None, key_mask: torch.Tensor | None = None,
                 sequences: Sequences | None = None, kv: torch.Tensor | None = None) -> None:
        """Write `out`, in the layout of q, and the log-sum-exp to `lse`, [batch, heads, queries] or [heads, tokens]
        float32, unless None. Of a problem's part "kv", write what is kept of k and v to `kv`, uint8 of
        :meth:`Backend.kv_bytes`; of its part "q", read it there."""
        ...


class TrainingCall(Protocol):
    """The forward pass of a trained call, prepared likewise."""

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
                 saved: torch.Tensor, /) -> None:
        """Write `out`, `lse` as a :class:`Call` does, without row_bias, and to `saved`, uint8 of
        :meth:`Backend.saved_bytes`, what the backward pass reads of the quantized q and k."""
        ...


class BackwardTensors(NamedTuple):
    """The tensors from which a backward pass is prepared, as :class:`Tensors`."""

    grad_out: torch.Tensor
    out: torch.Tensor
    v: torch.Tensor
    grad_q: torch.Tensor
    grad_k: torch.Tensor
    grad_v: torch.Tensor

    def readable(self) -> BackwardTensors:
        """The same, with copies of those that are read and whose rows are not as kernels read them."""
        return self._replace(grad_out=with_vectors(self.grad_out), out=with_vectors(self.out), v=with_vectors(self.v))


def with_vectors(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, of 16-bit elements, if its rows begin at multiples of 16 bytes and hold whole vectors of 16 bytes;
    else a copy of which that holds, with zeros behind the last channel."""
    missing = -tensor.shape[-1] % 8
    if missing:
        tensor = torch.nn.functional.pad(tensor, (0, missing))  # in the order of the tensor's own dimensions
    *strides, channel = tensor.stride()
    if channel == 1 and tensor.data_ptr() % 16 == 0 and all(stride % 8 == 0 for stride in strides):
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


class BackwardCall(Protocol):
    """A backward pass prepared for tensors of given shapes, strides and devices."""

    def __call__(self, tensors: BackwardTensors, lse: torch.Tensor, saved: torch.Tensor) -> None:
        """Write grad_q, grad_k and grad_v. `lse`, `saved`: what the forward pass returned."""
        ...


class Backend(Protocol):
    """What runs the kernels of one folder, or their emulation."""

    @property
    def manifest(self) -> Manifest: ...

    def arch(self, device: int) -> str:
        """The arch whose kernels run the calls of a CUDA device; −1 stands for CPU tensors. UnsupportedError where no
        arch does."""
        ...

    def splits(self, problem: Problem, kernels: Kernels, device: int) -> int:
        """How many blocks share the keys of a query tile."""
        ...

    def bind(self, plan: Plan, tensors: Tensors) -> Call:
        """Prepare the calls of a plan, which has at least one query and one key."""
        ...

    def kv_bytes(self, plan: Plan) -> int:
        """Bytes of what a call of the part "kv" keeps, or one of the part "q" reads."""
        ...

    def bind_training(self, plan: Plan, tensors: Tensors) -> TrainingCall:
        """Prepare the forward pass of a plan of the part "train", which has at least one query and one key."""
        ...

    def saved_bytes(self, plan: Plan) -> int:
        """Bytes of what such a forward pass saves. UnsupportedError where no kernels can read it."""
        ...

    def bind_backward(self, plan: Plan, tensors: BackwardTensors) -> BackwardCall:
        """Prepare the backward pass of a plan of the part "train", which has at least one query and one key."""
        ...
