"""Selections of blocks of keys on a device."""

from __future__ import annotations

import torch

from sage_aot._backends.cuda.call import strides_of
from sage_aot._backends.cuda.device import entered
from sage_aot._backends.cuda.queue import Queue, queue_of
from sage_aot._backends.loader import Library
from sage_aot._launch.plan import Argument
from sage_aot._launch.selection import choose_launch, pool_launch
from sage_aot._launch.structs import SOURCES
from sage_aot._problem.selection import Choosing, Pooling


class CudaPool:
    """The launch that pools tensors of given strides on one device. Safe under threads."""

    def __init__(self, pooling: Pooling, arch: str, library: Library, x: torch.Tensor, wants_means: bool) -> None:
        self._pooling, self._arch, self._library, self._wants_means = pooling, arch, library, wants_means
        self._device, self._strides = x.get_device(), strides_of(x, "HND")
        self._queues: dict[bool, Queue] = {}  # by whether x begins at a multiple of 16 bytes

    def __call__(self, x: torch.Tensor, pooled: torch.Tensor, means: torch.Tensor | None) -> None:
        is_aligned = x.data_ptr() % 16 == 0
        if is_aligned not in self._queues:
            launch = pool_launch(self._pooling, self._arch, self._library.manifest,
                                 Argument("x", self._strides, is_aligned), self._wants_means)
            self._queues[is_aligned] = queue_of(self._library, self._device, [launch])
        run(self._queues[is_aligned], self._device, x=x, pooled=pooled, x_mean=means)


class CudaChoice:
    """The launch that chooses blocks on one device. Safe under threads."""

    def __init__(self, choosing: Choosing, arch: str, library: Library, device: int) -> None:
        self._device = device
        self._queue = queue_of(library, device, [choose_launch(choosing, arch, library.manifest)])

    def __call__(self, q_pooled: torch.Tensor, k_pooled: torch.Tensor, amounts: torch.Tensor | None,
                 selected: torch.Tensor) -> None:
        run(self._queue, self._device, q_pooled=q_pooled, k_pooled=k_pooled, amounts=amounts, selected=selected)


def run(queue: Queue, device: int, **tensors: torch.Tensor | None) -> None:
    """Queue launches on torch's current stream; tensors by their names in SOURCES."""
    addresses = [0 if (tensor := tensors.get(name)) is None else tensor.data_ptr() for name in SOURCES]
    with entered(device):
        queue(torch._C._cuda_getCurrentRawStream(device), *addresses)
