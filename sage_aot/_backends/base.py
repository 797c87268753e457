"""The interface of a backend."""

from __future__ import annotations

import math
from typing import NamedTuple, Protocol, cast

import torch

from sage_aot._kernels.manifest import Manifest
from sage_aot._launch.choose import Kernels
from sage_aot._launch.plan import Plan
from sage_aot._problem.given import Given
from sage_aot._problem.problem import Problem
from sage_aot._problem.selection import Choosing, Pooling


class Call(Protocol):
    """A call prepared for tensors of given shapes, strides and devices. It may be made any number of times."""

    def __call__(self, given: Given, out: torch.Tensor | None, lse: torch.Tensor | None) -> None:
        """Write the output to `out`, in the layout of q, and the log-sum-exp to `lse`, float32 [batch, heads, queries]
        or [heads, tokens], unless that is None. The log-sum-exp of a trained call is that of scores without row_bias.
        Calls of the part "kv" or "train" write what they keep to `given.kept`, uint8 of :meth:`Backend.kept_bytes`;
        calls of the part "q" read it there."""
        ...


class BackwardTensors(NamedTuple):
    """The tensors of a backward pass. A gradient is None where nobody asked for it; those of k and v are computed
    together."""

    grad_out: torch.Tensor
    given: Given  # the arguments of the forward call, with its output in the place of q, and v in that of k
    grad_q: torch.Tensor | None
    grad_k: torch.Tensor | None
    grad_v: torch.Tensor | None

    @property
    def out(self) -> torch.Tensor:
        return cast(torch.Tensor, self.given.q)

    @property
    def v(self) -> torch.Tensor:
        return cast(torch.Tensor, self.given.v)

    @property
    def gradients(self) -> tuple[torch.Tensor | None, ...]:
        return self.grad_q, self.grad_k, self.grad_v

    @property
    def wants_all(self) -> bool:
        return all(gradient is not None for gradient in self.gradients)

    @property
    def named(self) -> dict[str, torch.Tensor]:
        """The tensors that there are, by the names that kernels have for them."""
        gradients = {"grad_q": self.grad_q, "grad_k": self.grad_k, "grad_v": self.grad_v}
        optional = {name: tensor for name, tensor in self.given.named.items() if name not in ("q", "k")}
        return {**optional, "out": self.out, "grad_out": self.grad_out,
                **{name: tensor for name, tensor in gradients.items() if tensor is not None}}

    def clear(self, problem: Problem) -> None:
        """Write zeros to the gradients of which some rows may be of no batch entry, or of keys that a mask hides."""
        for gradient in self.gradients if problem.tokens else self.gradients[1:] if problem.packs_keys else ():
            if gradient is not None:
                gradient.zero_()

    def readable(self) -> BackwardTensors:
        """Replace tensors that are read, and whose rows are not as kernels read them, by copies."""
        v = with_vectors(self.v)
        return self._replace(grad_out=with_vectors(self.grad_out), given=self.given.having(
            q=with_vectors(self.out), k=v, v=v))


def clear_output(problem: Problem, out: torch.Tensor | None, lse: torch.Tensor | None) -> None:
    """Write what rows of nothing have to the output and the log-sum-exp of a trained call, if some rows may be of no
    sequence: the next layer's gradients take all of them."""
    if problem.tokens and out is not None and lse is not None:
        out.zero_()
        lse.fill_(-math.inf)


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

    def __call__(self, tensors: BackwardTensors, lse: torch.Tensor, kept: torch.Tensor) -> None:
        """Write the gradients that are not None, zeros where nothing reaches them. `lse`, `kept`: what the forward pass
        returned."""
        ...


class PoolCall(Protocol):
    """The pooling of a tensor, prepared for tensors of given shapes, strides and devices."""

    def __call__(self, x: torch.Tensor, pooled: torch.Tensor, means: torch.Tensor | None) -> None:
        """Write `pooled`, uint8 of the size that :func:`sage_aot._launch.selection.pooled_offsets` says, and the means
        of the rows as they came to `means`, float32 [batch, heads, blocks, headdim], unless None."""
        ...


class ChooseCall(Protocol):
    """A choice of blocks of keys, prepared likewise."""

    def __call__(self, q_pooled: torch.Tensor, k_pooled: torch.Tensor, amounts: torch.Tensor | None,
                 selected: torch.Tensor) -> None:
        """Write `selected`, bool of Choosing.mask_shape. `amounts`: float32 [q heads], or None."""
        ...


class Backend(Protocol):
    """The kernels of one folder, or their emulation."""

    @property
    def manifest(self) -> Manifest: ...

    def arch(self, device: int) -> str:
        """The arch whose kernels run the calls of a CUDA device; −1 stands for CPU tensors. UnsupportedError where no
        arch does."""
        ...

    def splits(self, problem: Problem, kernels: Kernels, device: int) -> int:
        """The number of blocks that share the keys of a query tile."""
        ...

    def bind(self, plan: Plan, given: Given, out: torch.Tensor | None) -> Call:
        """Prepare the calls of a plan, which has at least one query and one key, for tensors like these. Preparation
        reads shapes, strides and devices, no values or addresses."""
        ...

    def kept_bytes(self, plan: Plan) -> int:
        """Bytes of what a call of the part "kv" or "train" keeps, or one of the part "q" reads; else 0.
        UnsupportedError where no kernels can read what a trained call keeps."""
        ...

    def bind_backward(self, plan: Plan, tensors: BackwardTensors) -> BackwardCall:
        """Prepare the backward pass of a plan of the part "train", which has at least one query and one key."""
        ...

    def bind_pool(self, pooling: Pooling, x: torch.Tensor, wants_means: bool) -> PoolCall:
        """Prepare the pooling of tensors like x, [batch, heads, seqlen, headdim], which has at least one row."""
        ...

    def bind_choice(self, choosing: Choosing, device: int) -> ChooseCall:
        """Prepare a choice on a device; there is at least one query and one key."""
        ...
