"""A call that is prepared: launches for tensors of given strides."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch

from sage_aot._backends.cuda.device import context_of, entered, sm_count
from sage_aot._backends.cuda.queue import Queue, queue_of
from sage_aot._backends.loader import Library
from sage_aot._launch.plan import MISSING, Argument, Arguments, Launch, Plan, Strides, launches
from sage_aot._problem.given import Given, strides_of_optional

ALIGNED = (True, True, True)
"""q, k and v all begin at a multiple of 16 bytes."""


class CudaCall:
    """The launches of a plan for tensors of given strides on one device. Safe under threads."""

    def __init__(self, plan: Plan, given: Given, out: torch.Tensor | None, library: Library, device: int) -> None:
        self.plan = plan
        self._workspace_bytes = plan.workspace_bytes
        self._arguments = arguments_of(given, out, plan.problem.options.layout)
        self._library, self._device, self._current = library, device, library.driver.current
        # What a call keeps is allocated after the call is prepared.
        has_others = plan.problem.part != "all" or any(tensor is not None for tensor in given.tensors[3:])
        self._others = addresses_of_others if has_others else no_addresses
        # By which of q, k, v begin at a multiple of 16 bytes, and whether the log-sum-exp is returned.
        self._queues: dict[tuple[tuple[bool, ...], bool], Queue] = {}
        with entered(device):
            self._context = context_of(library.driver, device)

    def __call__(self, given: Given, out: torch.Tensor | None, lse: torch.Tensor | None) -> None:
        if self._current() != self._context:  # this thread did not use the device yet, or is on another device
            self.run(given, out, lse, given.like.new_empty(self._workspace_bytes, dtype=torch.uint8))
            return
        # The device is torch's current one. Ask torch's allocator for raw memory: a tensor around it doubles the time.
        others = self._others(given)
        q, k, v, at_out, at_lse = [0 if tensor is None else tensor.data_ptr() for tensor in (*given[1:4], out, lse)]
        stream = torch._C._cuda_getCurrentRawStream(self._device)
        workspace = torch._C._cuda_cudaCachingAllocator_raw_alloc(self._workspace_bytes, stream)
        try:
            queue = self._queue_at(q, k, v, at_lse) if (q | k | v) & 15 or at_lse else self._usual
            queue.launch(stream, q, k, v, at_out, at_lse, workspace, *others)
        finally:  # queued kernels may still use the memory: the allocator reuses it in the order of the stream
            torch._C._cuda_cudaCachingAllocator_raw_delete(workspace)

    def run(self, given: Given, out: torch.Tensor | None, lse: torch.Tensor | None, workspace: torch.Tensor) -> None:
        """Make the call with a workspace of the caller's: uint8, plan.workspace_bytes. Afterwards the workspace holds
        the quantized tensors, but for those that `given.kept` holds."""
        q, k, v, at_out, at_lse, *others = addresses_of(given, out, lse, workspace)
        queue = self._queue_at(q, k, v, at_lse)
        queue(torch._C._cuda_getCurrentRawStream(self._device), q, k, v, at_out, at_lse, *others)

    @cached_property
    def _usual(self) -> Queue:
        """The queue of most calls."""
        return self._queue_for(ALIGNED, False)

    def _queue_at(self, q: int, k: int, v: int, lse: int) -> Queue:
        return self._queue_for((q & 15 == 0, k & 15 == 0, v & 15 == 0), lse != 0)

    def launches(self, at_16_bytes: tuple[bool, ...] = ALIGNED, returns_lse: bool = False) -> list[Launch]:
        """The launches, for q, k and v that begin at a multiple of 16 bytes or not."""
        return launches(self.plan, self._arguments.of_call(at_16_bytes, returns_lse), sm_count(self._device))

    def queue_of(self, wanted: Sequence[Launch]) -> Queue:
        """Load the kernels of some launches and bind them to a queue."""
        return queue_of(self._library, self._device, wanted)

    def _queue_for(self, at_16_bytes: tuple[bool, ...], returns_lse: bool) -> Queue:
        key = at_16_bytes, returns_lse
        if key not in self._queues:
            self._queues[key] = self.queue_of(self.launches(*key))
        return self._queues[key]


def addresses_of(given: Given, out: torch.Tensor | None, lse: torch.Tensor | None,
                 workspace: torch.Tensor) -> list[int]:
    """The addresses that a :class:`Queue` takes, in the order of SOURCES."""
    q, k, v, *others = given.tensors
    return [0 if tensor is None else tensor.data_ptr() for tensor in (q, k, v, out, lse, workspace, *others)]


def addresses_of_others(given: Given) -> list[int]:
    """The last of them, behind the workspace's."""
    return [0 if tensor is None else tensor.data_ptr() for tensor in given[4:-1]]


def no_addresses(given: Given) -> tuple[int, ...]:
    """Addresses of a call that has no tensors but q, k and v: none."""
    return ()


def arguments_of(given: Given, out: torch.Tensor | None, layout: str) -> Arguments:
    """The tensors of a call as launches depend on them."""
    rows = {name: Argument(name, MISSING if tensor is None else strides_of(tensor, layout))
            for name, tensor in (("q", given.q), ("k", given.k), ("v", given.v), ("out", out))}
    optional = {name: Argument(name, Strides(*strides_of_optional(name, getattr(given, name))))
                for name in given.optional}
    return Arguments(**rows, optional=optional, returns_lse=False)  # until a call says so: Arguments.of_call


def strides_of(tensor: torch.Tensor, layout: str) -> Strides:
    """Strides, in elements, of a tensor in the caller's layout ("HND" or "NHD"), or of [tokens, heads, headdim]."""
    if tensor.dim() == 3:
        row, head, _ = tensor.stride()
        return Strides(0, head, row)
    batch, first, second, _ = tensor.stride()
    return Strides(batch, first, second) if layout == "HND" else Strides(batch, second, first)
