"""Calls of CUDA tensors: which kernels a device runs, workspace from torch's allocator, launches on torch's current
stream.

A kind of call is prepared once: its structs are packed, and its kernels bound to them. Every call of the kind then adds
the addresses of its tensors to the structs and queues the launches.
"""

from __future__ import annotations

import os
import struct
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, cached_property
from itertools import accumulate
from typing import NamedTuple, cast

import numpy as np
import torch

from sage_aot._backends.base import BackwardTensors, Tensors
from sage_aot._backends.drivers import Driver, Function, Launcher, default_driver
from sage_aot._backends.loader import Library
from sage_aot._kernels.manifest import KernelRecord, Manifest
from sage_aot._kernels.spec import is_ptx
from sage_aot._launch.backward import (
    BackwardArguments,
    BackwardPlan,
    SavedParts,
    backward_launches,
    plan_backward,
)
from sage_aot._launch.choose import Gpu, Kernels, nearest_arch
from sage_aot._launch.plan import MISSING, Argument, Arguments, Launch, Plan, Strides, launches, splits_of
from sage_aot._launch.structs import SOURCES, WORD, Packed, Packer, Tensor
from sage_aot._problem.check import Problem, Sequences
from sage_aot.errors import LaunchError, PtxWarning, UnsupportedError

ALIGNED = (True, True, True)
"""q, k and v all begin at a multiple of 16 bytes."""


class CudaBackend:
    """The kernels of a folder on CUDA devices."""

    def __init__(self, library: Library, arch: str | None = None, splits: int | None = None) -> None:
        """`arch`: run this arch's kernels on every device; None chooses the arch by the device's compute capability.
        `splits`: so many blocks share the keys of every query tile; None chooses by the device's number of SMs."""
        self.library = library
        self._arch, self._splits = arch, splits
        self._archs: dict[int, str] = {}  # device → arch
        self._contexts: dict[int, int] = {}  # device → context

    @property
    def manifest(self) -> Manifest:
        return self.library.manifest

    @cached_property
    def packers(self) -> dict[str, Packer]:
        """A packer per struct that kernels take, by the name of the struct."""
        return {name: Packer(layout) for name, layout in self.manifest.structs.items()}

    def arch(self, device: int) -> str:
        """The arch of a device, looked up once: torch and the driver take microseconds to answer. The look-up warns
        where the kernels are PTX."""
        if device not in self._archs:
            self._archs[device] = self._arch or arch_of(self.library, device)
        return self._archs[device]

    def context(self, device: int) -> int:
        """The context in which the kernels of a device are launched. The device must be torch's current one."""
        if device not in self._contexts:
            try:
                self._contexts[device] = self.library.driver.context(device)
            except Exception as error:  # cupy's errors have no common base
                raise LaunchError(f"the driver has no context for device {device}: {error}") from error
        return self._contexts[device]

    def splits(self, problem: Problem, kernels: Kernels, device: int) -> int:
        return self._splits or splits_of(problem, kernels, sm_count(device))

    def bind(self, plan: Plan, tensors: Tensors) -> CudaCall:
        return CudaCall(plan, tensors, self, tensors.device)

    def kv_bytes(self, plan: Plan) -> int:
        return plan.kv_bytes

    def bind_training(self, plan: Plan, tensors: Tensors) -> CudaTraining:
        return CudaTraining(plan, plan_backward(plan, self.manifest).saved, self.bind(plan, tensors))

    def saved_bytes(self, plan: Plan) -> int:
        return plan_backward(plan, self.manifest).saved.total

    def bind_backward(self, plan: Plan, tensors: BackwardTensors) -> CudaBackward:
        return CudaBackward(plan_backward(plan, self.manifest), self, tensors.v.get_device())


def arch_of(library: Library, device: int) -> str:
    """The arch whose kernels a CUDA device runs. UnsupportedError where no arch fits, or no loader works here."""
    gpu = gpu_here(device, library.driver)  # library.driver raises where no loader works, and says what is missing
    arch = nearest_arch(gpu, library.manifest)
    if is_ptx(arch) and os.environ.get("SAGE_AOT_PTX_WARNING") != "0":
        warnings.warn(f"this sage-aot has no machine code for this GPU ({gpu}): the driver compiles the PTX of {arch}, "
                      f"which takes seconds at the first call of each kernel and does not use what is new in this GPU. "
                      f"Look for a newer sage-aot; SAGE_AOT_PTX_WARNING=0 silences this", PtxWarning, stacklevel=2)
    return arch


def gpu_here(device: int, driver: Driver | None = None) -> Gpu:
    """A CUDA device's capability, driver and name. `driver`: None for the default; the CUDA of the device's driver is
    None where no loader works."""
    try:
        cuda = (driver or default_driver()).cuda
    except UnsupportedError:
        cuda = None
    return Gpu(torch.cuda.get_device_capability(device), cuda, torch.cuda.get_device_name(device))


@cache
def sm_count(device: int) -> int:
    """Number of SMs of a CUDA device."""
    return torch.cuda.get_device_properties(device).multi_processor_count


# --- a prepared call --------------------------------------------------------------------------------------------------


class CudaCall:
    """The launches of a plan for tensors of given strides on one device. Safe under threads."""

    def __init__(self, plan: Plan, tensors: Tensors, backend: CudaBackend, device: int) -> None:
        self.plan = plan
        self._workspace_bytes = plan.workspace_bytes
        self._strides = [MISSING if tensor is None else strides_of(tensor, plan.problem.options.layout)
                         for tensor in tensors.of_rows]
        self._key_mask = None if tensors.key_mask is None else mask_argument(tensors.key_mask)
        self._backend, self._device, self._driver = backend, device, backend.library.driver
        self._queues: dict[tuple[bool, ...], Queue] = {}  # by which of q, k, v begin at a multiple of 16 bytes
        self._aligned = self._queue_for(ALIGNED)
        with _device(device):
            self._context, self._current = backend.context(device), self._driver.current

    def __call__(self, q: torch.Tensor | None, k: torch.Tensor | None, v: torch.Tensor | None,
                 out: torch.Tensor | None, lse: torch.Tensor | None, key_mask: torch.Tensor | None = None,
                 sequences: Sequences | None = None, kv: torch.Tensor | None = None) -> None:
        if self._current() != self._context:  # this thread did not use the device yet, or is on another device
            like = cast(torch.Tensor, k if q is None else q)
            made = like.new_empty(self._workspace_bytes, dtype=torch.uint8)
            self.run(q, k, v, out, lse, made, key_mask, sequences, kv)
            return
        # The device is torch's current one. Ask torch's allocator for raw memory: a tensor around it doubles the time.
        at_q, at_k, at_v = _address(q), _address(k), _address(v)
        stream = torch._C._cuda_getCurrentRawStream(self._device)
        workspace = torch._C._cuda_cudaCachingAllocator_raw_alloc(self._workspace_bytes, stream)
        try:
            self._queue_at(at_q, at_k, at_v).launch(stream, at_q, at_k, at_v, _address(out), _address(lse),
                                                    _address(key_mask),
                                                    0 if sequences is None else sequences.cu_seqlens_q.data_ptr(),
                                                    0 if sequences is None else sequences.cu_seqlens_k.data_ptr(),
                                                    _address(kv), workspace)
        finally:  # queued kernels may still use the memory: the allocator reuses it in the order of the stream
            torch._C._cuda_cudaCachingAllocator_raw_delete(workspace)

    def run(self, q: torch.Tensor | None, k: torch.Tensor | None, v: torch.Tensor | None, out: torch.Tensor | None,
            lse: torch.Tensor | None, workspace: torch.Tensor, key_mask: torch.Tensor | None = None,
            sequences: Sequences | None = None, kv: torch.Tensor | None = None) -> None:
        """Make the call with a workspace of the caller's: uint8, plan.workspace_bytes. Afterwards the workspace holds
        the quantized tensors, but for those that `kv` holds."""
        addresses = addresses_of(q, k, v, out, workspace, lse, key_mask, sequences, kv)
        self._queue_at(*addresses[:3])(torch._C._cuda_getCurrentRawStream(self._device), *addresses)

    def _queue_at(self, at_q: int, at_k: int, at_v: int) -> Queue:
        if (at_q | at_k | at_v) & 15 == 0:
            return self._aligned
        return self._queue_for((at_q & 15 == 0, at_k & 15 == 0, at_v & 15 == 0))

    def launches(self, at_16_bytes: tuple[bool, ...] = ALIGNED) -> list[Launch]:
        """The launches, for q, k and v that begin at a multiple of 16 bytes or not."""
        q, k, v, out = (Argument(name, strides, at) for name, strides, at in
                        zip(Tensors._fields, self._strides, (*at_16_bytes, True)))
        return launches(self.plan, Arguments(q, k, v, out, self._key_mask), sm_count(self._device))

    def queue_of(self, wanted: Sequence[Launch]) -> Queue:
        """Load the kernels of some launches and bind them to a queue."""
        return queue_of(self._backend, self._device, wanted)

    def _queue_for(self, at_16_bytes: tuple[bool, ...]) -> Queue:
        if at_16_bytes not in self._queues:
            self._queues[at_16_bytes] = self.queue_of(self.launches(at_16_bytes))
        return self._queues[at_16_bytes]


class CudaTraining:
    """The forward pass of a trained call: the launches of its plan, then a copy of K̂. Safe under threads."""

    def __init__(self, plan: Plan, parts: SavedParts, forward: CudaCall) -> None:
        self.plan, self._parts, self._forward = plan, parts, forward

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
                 saved: torch.Tensor) -> None:
        with _device(saved.get_device()):
            self.run(q, k, v, out, lse, saved, saved.new_empty(self.plan.workspace_bytes))

    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
            saved: torch.Tensor, workspace: torch.Tensor) -> None:
        """Make the call with a workspace of the caller's: uint8, plan.workspace_bytes."""
        self._forward.run(q, k, v, out, lse, workspace, kv=saved)
        save_k(self.plan, self._parts, workspace, saved)


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

    def __init__(self, plan: BackwardPlan, backend: CudaBackend, device: int) -> None:
        self.plan = plan
        self._backend, self._device = backend, device
        self._queues: dict[tuple[tuple[int, ...], ...], Queue] = {}  # by the strides of readable tensors

    def __call__(self, tensors: BackwardTensors, lse: torch.Tensor, saved: torch.Tensor) -> None:
        with _device(self._device):
            self.run(tensors, lse, saved, saved.new_empty(self.plan.workspace_bytes))

    def run(self, tensors: BackwardTensors, lse: torch.Tensor, saved: torch.Tensor, workspace: torch.Tensor) -> None:
        """Make the call with a workspace of the caller's: uint8, plan.workspace_bytes. Afterwards the workspace holds
        what the first kernel writes for the others."""
        readable = tensors.readable()
        strides = tuple(tensor.stride() for tensor in readable)
        if strides not in self._queues:
            self._queues[strides] = self.queue_of(self.launches(readable))
        self._queues[strides](torch._C._cuda_getCurrentRawStream(self._device),
                              *self.addresses(readable, lse, saved, workspace))

    def addresses(self, tensors: BackwardTensors, lse: torch.Tensor, saved: torch.Tensor,
                  workspace: torch.Tensor) -> list[int]:
        """The addresses that a :class:`Queue` of the launches takes."""
        named = {**tensors._asdict(), "lse": lse, "saved": saved, "workspace": workspace}
        return [_address(named.get(source)) for source in SOURCES]

    def queue_of(self, wanted: Sequence[Launch]) -> Queue:
        """Load the kernels of some launches and bind them to a queue."""
        return queue_of(self._backend, self._device, wanted)

    def launches(self, tensors: BackwardTensors) -> list[Launch]:
        """The launches for readable tensors of these strides."""
        return backward_launches(self.plan, backward_arguments(tensors, self.plan.forward.problem.options.layout))


def backward_arguments(tensors: BackwardTensors, layout: str) -> BackwardArguments:
    return BackwardArguments(*(Tensor((name, 0), *strides_of(tensor, layout))
                               for name, tensor in tensors._asdict().items()))


def queue_of(backend: CudaBackend, device: int, wanted: Sequence[Launch]) -> Queue:
    """Load the kernels of some launches and bind them to a queue."""
    load, packers = backend.library.load, backend.packers
    with _device(device):
        bound = [_Bound(launch.record, load(launch.record, launch.entry, device), launch.blocks,
                        packers[launch.record.params].pack(launch.params)) for launch in wanted]
        return Queue(bound, backend.library.driver, device, backend.context(device))


def _device(device: int) -> AbstractContextManager[object]:
    """Makes a device torch's current one, unless it already is."""
    return nullcontext() if torch.cuda.current_device() == device else torch.cuda.device(device)


def addresses_of(q: torch.Tensor | None, k: torch.Tensor | None, v: torch.Tensor | None, out: torch.Tensor | None,
                 workspace: torch.Tensor, lse: torch.Tensor | None = None, key_mask: torch.Tensor | None = None,
                 sequences: Sequences | None = None, kv: torch.Tensor | None = None) -> list[int]:
    """The addresses that a :class:`Queue` takes, in the order of SOURCES."""
    cu_seqlens = sequences[:2] if sequences else (None, None)
    return [*map(_address, (q, k, v, out, lse, key_mask, *cu_seqlens, kv, workspace))]


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def strides_of(tensor: torch.Tensor, layout: str) -> Strides:
    """Strides, in elements, of a tensor in the caller's layout ("HND" or "NHD"), or of [tokens, heads, headdim]."""
    if tensor.dim() == 3:
        row, head, _ = tensor.stride()
        return Strides(0, head, row)
    batch, first, second, _ = tensor.stride()
    return Strides(batch, first, second) if layout == "HND" else Strides(batch, second, first)


def mask_argument(key_mask: torch.Tensor) -> Argument:
    """A call's key mask, [batch, keys] of any strides."""
    batch, key = key_mask.stride()
    return Argument("key_mask", Strides(batch, 0, key), at_16_bytes=False)


class _Bound(NamedTuple):
    record: KernelRecord
    function: Function
    blocks: int
    packed: Packed


class Queue:
    """Launches whose structs wait for the addresses of a call. Safe under threads."""

    def __init__(self, bound: list[_Bound], driver: Driver, device: int, context: int) -> None:
        self._bound, self._driver, self._device, self._context = bound, driver, device, context
        data = [launch.packed.data for launch in bound]
        self._template = np.frombuffer(b"".join(data), np.uint64)
        self._begins = np.array([*accumulate(map(len, data[:-1]), initial=0)], np.uint64)  # of the structs, in bytes
        sources = b"".join([launch.packed.sources for launch in bound])
        self._sources = np.frombuffer(sources, np.uint8).astype(np.intp)
        self._free: list[_Structs] = []  # grows to the most threads that were here at once; pop, append are atomic

    def __call__(self, stream: int, *addresses: int) -> None:
        """Queue the launches, in order, on a raw stream handle. `addresses`: of the call's tensors, the first ones in
        the order of SOURCES, always as many. LaunchError, with the kernel's name, where the driver refuses a launch."""
        try:
            with self._driver.entered(self._context):
                self.launch(stream, *addresses)
        except LaunchError:
            raise
        except Exception as error:  # raised by entering the context
            raise LaunchError(f"the driver does not enter the context of device {self._device}: {error}") from error

    def launch(self, stream: int, *addresses: int) -> None:
        """As calling the queue does, where the launches' context is already the current one."""
        try:
            structs = self._free.pop()
        except IndexError:
            structs = _Structs(len(self._template), self._begins, self._bound)
        _ADDRESSES[len(addresses)].pack_into(structs.address_bytes, 0, *addresses)
        structs.addresses.take(self._sources, None, structs.gathered, "clip")
        np.add(self._template, structs.gathered, structs.words)
        launcher = None
        try:
            for launcher in structs.launchers:
                launcher(stream)
        except Exception as error:  # cupy's errors have no common base: name the kernel, whatever the error
            refused = self._bound[structs.launchers.index(launcher)] if launcher else self._bound[0]
            raise LaunchError(f"the driver does not launch {refused.record.name} on device {self._device}: "
                              f"{error}") from error
        self._free.append(structs)  # not reached after an error, which drops these structs


_ADDRESSES = [struct.Struct(f"<{count}Q") for count in range(len(SOURCES) + 1)]


class _Structs:
    """The structs of a call's launches, and the launchers that read them. Used by one thread at a time."""

    __slots__ = ("address_bytes", "addresses", "gathered", "launchers", "words")

    def __init__(self, num_words: int, begins: np.ndarray, bound: list[_Bound]) -> None:
        self.addresses = np.zeros(len(SOURCES) + 1, np.uint64)  # the last, of NO_SOURCE, stays zero
        self.address_bytes = self.addresses.data
        self.gathered = np.empty(num_words, np.uint64)
        memory = np.empty(num_words + len(bound), np.uint64)  # the structs, then a pointer to each
        self.words = memory[:num_words]
        begin = memory.ctypes.data
        np.add(begins, begin, memory[num_words:])
        pointers = begin + WORD * num_words
        self.launchers: list[Launcher] = [launch.function.bind(launch.blocks, pointers + WORD * i)
                                          for i, launch in enumerate(bound)]
