"""A trained call and its backward pass."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sage_aot._backends.base import BackwardTensors, clear_output
from sage_aot._backends.cuda.call import CudaCall, strides_of
from sage_aot._backends.cuda.device import entered
from sage_aot._backends.cuda.queue import Queue, queue_of
from sage_aot._backends.loader import Library
from sage_aot._launch.backward import BackwardArguments, BackwardPlan, SavedParts, backward_launches
from sage_aot._launch.plan import Launch, Plan
from sage_aot._launch.structs import SOURCES, Tensor
from sage_aot._problem.given import Given


class CudaTraining:
    """The forward pass of a trained call: the launches of its plan, then a copy of K̂. Safe under threads."""

    def __init__(self, forward: CudaCall, parts: SavedParts) -> None:
        self.plan, self._parts, self._forward = forward.plan, parts, forward

    def __call__(self, given: Given, out: torch.Tensor | None, lse: torch.Tensor | None) -> None:
        with entered(given.like.get_device()):
            self.run(given, out, lse, given.like.new_empty(self.plan.workspace_bytes, dtype=torch.uint8))

    def run(self, given: Given, out: torch.Tensor | None, lse: torch.Tensor | None, workspace: torch.Tensor) -> None:
        """Make the call with a workspace of the caller's: uint8, plan.workspace_bytes."""
        clear_output(self.plan.problem, out, lse)
        self._forward.run(given, out, lse, workspace)
        assert given.kept is not None
        save_k(self.plan, self._parts, workspace, given.kept)


def save_k(plan: Plan, parts: SavedParts, workspace: torch.Tensor, saved: torch.Tensor) -> None:
    """Copy K̂ and the lines of its tiles from the workspace, where V̂ lies between them, behind what is saved of Q."""
    def words_of_tiles(memory: torch.Tensor, begin: int, count: int) -> torch.Tensor:
        words = memory.narrow(0, begin, count).view(torch.int64)  # torch copies strided bytes one by one
        return words.view(parts.kv_tiles, -1)

    of_kv = words_of_tiles(workspace, plan.offsets["kv_hat"], plan.sizes["kv_hat"])
    of_k = words_of_tiles(saved, parts.k_begin, parts.total - parts.k_begin)
    in_k, in_line = parts.k_tile_bytes // 8, parts.line_bytes // 8
    of_k[:, :in_k] = of_kv[:, :in_k]
    of_k[:, in_k:] = of_kv[:, -in_line:]


class CudaBackward:
    """The launches of a backward pass on one device. Safe under threads."""

    def __init__(self, plan: BackwardPlan, library: Library, device: int) -> None:
        self.plan = plan
        self._library, self._device = library, device
        self._queues: dict[tuple[tuple[int, ...] | None, ...], Queue] = {}  # by the strides of readable tensors

    def __call__(self, tensors: BackwardTensors, lse: torch.Tensor, kept: torch.Tensor) -> None:
        with entered(self._device):
            self.run(tensors, lse, kept, kept.new_empty(self.plan.workspace_bytes))

    def run(self, tensors: BackwardTensors, lse: torch.Tensor, kept: torch.Tensor, workspace: torch.Tensor) -> None:
        """Make the call with a workspace of the caller's: uint8, plan.workspace_bytes. Afterwards the workspace holds
        what the first kernel writes for the others."""
        tensors.clear(self.plan.forward.problem)
        readable = tensors.readable()
        strides = tuple(tensor if tensor is None else tensor.stride()
                        for tensor in (readable.grad_out, readable.out, readable.v, *readable.gradients))
        if strides not in self._queues:
            self._queues[strides] = self.queue_of(self.launches(readable))
        self._queues[strides](torch._C._cuda_getCurrentRawStream(self._device),
                              *self.addresses(readable, lse, kept, workspace))

    def addresses(self, tensors: BackwardTensors, lse: torch.Tensor, kept: torch.Tensor,
                  workspace: torch.Tensor) -> list[int]:
        """The addresses that a :class:`Queue` of the launches takes."""
        named = {**tensors.named, "lse": lse, "kept": kept, "workspace": workspace}
        return [0 if (tensor := named.get(source)) is None else tensor.data_ptr() for source in SOURCES]

    def queue_of(self, wanted: Sequence[Launch]) -> Queue:
        """Load the kernels of some launches and bind them to a queue."""
        return queue_of(self._library, self._device, wanted)

    def launches(self, tensors: BackwardTensors) -> list[Launch]:
        """The launches for readable tensors of these strides."""
        return backward_launches(self.plan, backward_arguments(tensors, self.plan.forward.problem.options.layout))


def backward_arguments(tensors: BackwardTensors, layout: str) -> BackwardArguments:
    """The tensors of a backward pass as launches depend on them."""
    def argument(name: str, tensor: torch.Tensor) -> Tensor:
        return Tensor((name, 0), *strides_of(tensor, layout))

    gradients = {name: None if tensor is None else argument(name, tensor)
                 for name, tensor in zip(("grad_q", "grad_k", "grad_v"), tensors.gradients)}
    return BackwardArguments(argument("grad_out", tensors.grad_out), argument("out", tensors.out),
                             argument("v", tensors.v), **gradients)
