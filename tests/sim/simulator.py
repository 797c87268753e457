"""Launches on the simulator: the launch description that a GPU gets, buffers in host memory, reports as exceptions.

:class:`SimulatorBackend` stands where the package has :class:`sage_aot._backends.cuda.backend.CudaBackend`: it
launches what the plan says, from the packed structs alone. What memory a launch may touch the simulator is told
beforehand.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from courses import Course
from launches import INSIDE, WRITABLE, WRITTEN, Buffer, Launches, anywhere, key_of
from simbuild import Build, build_engine
from symbols import line_of

from sage_aot._backends.base import BackwardTensors, clear_output
from sage_aot._backends.cuda.call import arguments_of, strides_of
from sage_aot._backends.cuda.training import backward_arguments, save_k
from sage_aot._kernels.manifest import Manifest, Struct, read_target
from sage_aot._launch.backward import BackwardPlan, SavedParts, backward_launches, heads_side_by_side, plan_backward
from sage_aot._launch.choose import Kernels
from sage_aot._launch.plan import Argument, Launch, Plan, launches
from sage_aot._launch.selection import choose_launch, pool_launch
from sage_aot._launch.structs import Packer
from sage_aot._problem.given import Given
from sage_aot._problem.problem import Problem
from sage_aot._problem.selection import Choosing, Pooling
from sage_aot._problem.tensors import OPERANDS

REDZONE = 1024
"""Bytes of nobody between two buffers of the workspace; a multiple of the plan's alignment."""

TENSOR_REDZONE = 2**14
"""Bytes of nobody at both ends of a tensor that is read: a tile of 64 rows of 256 bytes."""


class SimulatorError(AssertionError):
    """A kernel did what no kernel may do; the message lists what."""

    def __init__(self, reports: list[Report]) -> None:
        super().__init__(reports)
        self.reports = reports

    def __str__(self) -> str:
        return "\n".join(map(str, self.reports))


@dataclass(frozen=True)
class Report:
    """One fault, where it was seen first."""

    kernel: str
    kind: str
    detail: str
    place: str  # file:line
    block: int
    thread: int
    count: int  # how often it was seen

    def __str__(self) -> str:
        return (f"{self.kernel}: {self.kind} at {self.place}, block {self.block}, warp {self.thread // 32}, lane "
                f"{self.thread % 32} ({self.count} times): {self.detail}")


SM_COUNT = 3
"""SMs of the GPU that is simulated: so few that a block of a grid which fits it takes several query tiles, and so that
the last round of them is not whole."""


class Simulator:
    """The kernels of a folder on the CPU. One seed gives one order of threads and blocks."""

    def __init__(self, build: Build, seed: int = 0, arch: int | None = None) -> None:
        """`arch`: the chip to simulate instead of each kernel's own; 90 for sm_90."""
        self.build, self.seed, self.arch = build, seed, arch
        self.launched: set[str] = set()  # names of libraries
        self.course: Course | None = None  # of the call whose launches these are
        self._engine = _engine()
        self._buffers: tuple[Buffer, ...] = ()

    def launch(self, launch: Launch, layout: Struct, addresses: dict[str, int]) -> None:
        """Run one launch to its end, on tensors at these addresses, or write what it wrote before; SimulatorError where
        it is faulty."""
        record, packed = launch.record, Packer(layout).pack(launch.params)
        _, (major, minor), _ = read_target(record.target)
        settings = (launch.blocks, record.fact("threads"), record.fact("shared_bytes"),
                    self.arch or 10 * major + minor, record.programmatic_launch, launch.entry,
                    bool(record.facts.get("in_order")))
        simulate = functools.partial(self.launch_kernel, record.name, packed.at(addresses), *settings)
        self.launched.add(record.name)
        if self.course:
            self.course.begin(record.name)
        if self._engine.tables or self._holds_the_bug(record.name):  # no part of the key
            simulate()
        else:
            LAUNCHES.run(simulate, lambda: key_of(
                (record.name, packed.at(anywhere(addresses)), *settings, self.seed),
                (self.build.library(record.name), self._engine.path), addresses, self._buffers), self._buffers)
        if self.course:
            self.course.end(self._buffers)

    def _holds_the_bug(self, name: str) -> bool:
        """True where the bug that is switched on is one of a kernel's."""
        return self._engine.planted > 0 and self._engine.planted in self.build.switches(name)

    def launch_kernel(self, name: str, params: bytes, blocks: int, threads: int, shared_bytes: int = 0,
                      arch: int = 80, programmatic: bool = False, entry: str = "", in_order: bool = False) -> None:
        """Run a kernel that need not be one of the matrix. `programmatic`: by a programmatic dependent launch; `entry`:
        the entry point, where its name is not the library's; `in_order`: blocks wait for those of lower index."""
        self.launched.add(name)
        self._engine.know(self._buffers)
        self._engine.launch(self.build.library(name), entry or name, params, blocks, threads, shared_bytes, arch,
                            self.seed, programmatic, in_order)
        self._engine.read_states(self._buffers)

    def know(self, *buffers: Buffer) -> None:
        """Let launches touch these buffers and no others, from now on."""
        self._buffers = buffers


LAUNCHES = Launches()
"""Results of this process's launches."""


class SimulatorBackend:
    """The kernels of a build on the simulator: what `sage_aot._call.pipeline` asks of a backend."""

    def __init__(self, build: Build, arch: str, seed: int = 0, chip: int | None = None, splits: int = 1) -> None:
        """`arch`: whose kernels run; `chip`: what the simulator is instead of that arch's own, 90 for sm_90; `splits`:
        so many blocks share the keys of every query tile."""
        self.manifest = build.manifest
        self.simulator = Simulator(build, seed, chip)
        self._arch, self._splits = arch, splits

    def arch(self, device: int) -> str:
        return self._arch

    def splits(self, problem: Problem, kernels: Kernels, device: int) -> int:
        return self._splits

    def bind(self, plan: Plan, given: Given, out: torch.Tensor | None) -> SimulatedCall | SimulatedTraining:
        call = SimulatedCall(_spread(plan), given, out, self.manifest, self.simulator)
        if plan.problem.part != "train":
            return call
        return SimulatedTraining(plan, plan_backward(plan, self.manifest).saved, call)

    def kept_bytes(self, plan: Plan) -> int:
        if plan.problem.part == "train":
            return plan_backward(plan, self.manifest).saved.total
        return _spread(plan).kept_bytes if plan.problem.part != "all" else 0

    def bind_backward(self, plan: Plan, tensors: BackwardTensors) -> SimulatedBackward:
        side_by_side = heads_side_by_side(plan, self.manifest, tensors.wants_all, SM_COUNT, asked=2)
        return SimulatedBackward(plan_backward(plan, self.manifest, side_by_side), self.manifest, self.simulator)

    def bind_pool(self, pooling: Pooling, x: torch.Tensor, wants_means: bool) -> SimulatedPool:
        return SimulatedPool(pooling, self)

    def bind_choice(self, choosing: Choosing, device: int) -> SimulatedChoice:
        return SimulatedChoice(choosing, self)

    def run(self, launch: Launch, inputs: dict[str, torch.Tensor | None],
            outputs: dict[str, torch.Tensor | None]) -> None:
        """Run a launch of a selection, whose tensors lie between redzones."""
        self.simulator.know(*views(inputs, outputs))
        addresses = {name: 0 if tensor is None else tensor.data_ptr() for name, tensor in (inputs | outputs).items()}
        self.simulator.launch(launch, self.manifest.structs[launch.record.params], addresses)


class SimulatedCall:
    """The launches of a plan whose buffers lie apart."""

    def __init__(self, plan: Plan, given: Given, out: torch.Tensor | None, manifest: Manifest,
                 simulator: Simulator) -> None:
        self.plan, self._given, self._out = plan, given, out
        self._manifest, self._simulator = manifest, simulator

    def __call__(self, given: Given, out: torch.Tensor | None, lse: torch.Tensor | None) -> None:
        self.run(given, out, lse, torch.empty(self.plan.workspace_bytes, dtype=torch.uint8))

    def run(self, given: Given, out: torch.Tensor | None, lse: torch.Tensor | None, workspace: torch.Tensor) -> None:
        """The call with a workspace of the caller's, which keeps what the quantizers leave."""
        inputs = _apart({name: tensor for name, tensor in zip(OPERANDS, given.tensors) if name != "kept"})
        results = {"out": out, "lse": lse}
        self._simulator.know(*views(inputs, results), *_buffers_of(self.plan, workspace, given.kept))
        tensors = {**inputs, **results, "kept": given.kept, "workspace": workspace}
        addresses = {name: 0 if tensor is None else tensor.data_ptr() for name, tensor in tensors.items()}
        arguments = arguments_of(self._given, self._out, self.plan.problem.options.layout)
        arguments = arguments.of_call(tuple(addresses[name] % 16 == 0 for name in "qkv"), lse is not None)
        for launch in launches(self.plan, arguments, SM_COUNT):
            self._simulator.launch(launch, self._manifest.structs[launch.record.params], addresses)


class SimulatedTraining:
    """The forward pass of a trained call, whose buffers lie apart: what is saved of them lies as the plan says."""

    def __init__(self, plan: Plan, parts: SavedParts, forward: SimulatedCall) -> None:
        self.plan, self._saved, self._parts, self._forward = forward.plan, plan.kept_offsets, parts, forward

    def __call__(self, given: Given, out: torch.Tensor | None, lse: torch.Tensor | None) -> None:
        self.run(given, out, lse, torch.empty(self.plan.workspace_bytes, dtype=torch.uint8))

    def run(self, given: Given, out: torch.Tensor | None, lse: torch.Tensor | None, workspace: torch.Tensor) -> None:
        """The call with a workspace of the caller's."""
        clear_output(self.plan.problem, out, lse)
        apart = torch.empty(self.plan.kept_bytes, dtype=torch.uint8)
        self._forward.run(given._replace(kept=apart), out, lse, workspace)
        for name, offset in self.plan.kept_offsets.items():
            size = self.plan.sizes[name]
            given.kept.narrow(0, self._saved[name], size).copy_(apart.narrow(0, offset, size))
        save_k(self.plan, self._parts, workspace, given.kept)


class SimulatedBackward:
    """The launches of a backward pass whose buffers lie apart."""

    def __init__(self, plan: BackwardPlan, manifest: Manifest, simulator: Simulator) -> None:
        self.plan, self._manifest, self._simulator = _spread_backward(plan), manifest, simulator

    def __call__(self, tensors: BackwardTensors, lse: torch.Tensor, kept: torch.Tensor) -> None:
        self.run(tensors, lse, kept, torch.empty(self.plan.workspace_bytes, dtype=torch.uint8))

    def run(self, tensors: BackwardTensors, lse: torch.Tensor, kept: torch.Tensor, workspace: torch.Tensor) -> None:
        """The call with a workspace of the caller's, which keeps what the first kernel writes for the others."""
        tensors.clear(self.plan.forward.problem)
        tensors = tensors.readable()
        results = {"grad_q": tensors.grad_q, "grad_k": tensors.grad_k, "grad_v": tensors.grad_v}
        inputs = _apart({**{name: tensor for name, tensor in tensors.named.items() if name not in results},
                         "lse": lse, "kept": kept})
        buffers = [Buffer(name, workspace.data_ptr() + offset,
                          np.full(self.plan.sizes[name], INSIDE | WRITABLE, np.uint8), "workspace")
                   for name, offset in self.plan.offsets.items()]
        self._simulator.know(*views(inputs, results), *buffers)
        addresses = {name: 0 if tensor is None else tensor.data_ptr() for name, tensor in
                     {**inputs, **results, "workspace": workspace}.items()}
        arguments = backward_arguments(tensors, self.plan.forward.problem.options.layout)
        for launch in backward_launches(self.plan, arguments):
            self._simulator.launch(launch, self._manifest.structs[launch.record.params], addresses)


class SimulatedPool:
    """The pooling of a tensor."""

    def __init__(self, pooling: Pooling, backend: SimulatorBackend) -> None:
        self._pooling, self._backend = pooling, backend

    def __call__(self, x: torch.Tensor, pooled: torch.Tensor, means: torch.Tensor | None) -> None:
        inputs = _apart({"x": x})
        tensor = Argument("x", strides_of(inputs["x"], "HND"), inputs["x"].data_ptr() % 16 == 0)
        launch = pool_launch(self._pooling, self._backend.arch(-1), self._backend.manifest, tensor, means is not None)
        self._backend.run(launch, inputs, {"pooled": pooled, "x_mean": means})


class SimulatedChoice:
    """A choice of blocks."""

    def __init__(self, choosing: Choosing, backend: SimulatorBackend) -> None:
        self._choosing, self._backend = choosing, backend

    def __call__(self, q_pooled: torch.Tensor, k_pooled: torch.Tensor, amounts: torch.Tensor | None,
                 selected: torch.Tensor) -> None:
        launch = choose_launch(self._choosing, self._backend.arch(-1), self._backend.manifest)
        inputs = _apart({"q_pooled": q_pooled, "k_pooled": k_pooled, "amounts": amounts})
        self._backend.run(launch, inputs, {"selected": selected})


def set_exp2(up: np.ndarray, down: np.ndarray) -> None:
    """Let ex2.approx be what a chip was measured to make of it from now on, engine/scalars.cpp: the bits of 2^x and of
    2^-x for all x in [1, 2)."""
    _engine().set_exp2(up, down)


def plant(number: int) -> None:
    """Plant this bug in kernels that were compiled with switches (schemata.py), from now on; 0: none."""
    _engine().plant(number)


def views(inputs: dict[str, torch.Tensor | None], outputs: dict[str, torch.Tensor | None]) -> list[Buffer]:
    """The bytes that belong to tensors, and no others of their storages: inputs hold values, outputs none yet. None: a
    tensor that the call does not have."""
    by_storage: dict[int, list[tuple[str, torch.Tensor, int]]] = defaultdict(list)
    for tensors, state in ((inputs, INSIDE | WRITTEN), (outputs, INSIDE | WRITABLE)):
        for name, tensor in tensors.items():
            if tensor is None:
                continue
            by_storage[tensor.untyped_storage().data_ptr()].append((name, tensor, state))
    return [_storage_buffer(address, parts) for address, parts in by_storage.items() if address]


def _storage_buffer(address: int, parts: list[tuple[str, torch.Tensor, int]]) -> Buffer:
    """A storage from the first byte that belongs to a tensor to the last."""
    size = parts[0][1].untyped_storage().nbytes()
    states = np.zeros(size, np.uint8)
    for _, tensor, state in parts:
        elements = torch.zeros(size // tensor.itemsize, dtype=torch.uint8)
        elements.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).fill_(state)
        states[: elements.numel() * tensor.itemsize] |= elements.numpy().repeat(tensor.itemsize)
    inside = np.flatnonzero(states)
    first, end = (int(inside[0]), int(inside[-1]) + 1) if len(inside) else (0, 0)
    return Buffer("/".join(name for name, _, _ in parts), address + first, states[first:end], parts[0][0])


def _apart(tensors: dict[str, torch.Tensor | None]) -> dict[str, torch.Tensor | None]:
    """Copies with redzones at both ends: what lies behind a tensor would else be for the heap to say."""
    return {name: tensor if tensor is None or tensor.numel() == 0 else _between_redzones(tensor.detach())
            for name, tensor in tensors.items()}


def _between_redzones(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the tensor's strides and alignment."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    memory = torch.empty(span * tensor.itemsize + 3 * TENSOR_REDZONE, dtype=torch.uint8)
    begin = TENSOR_REDZONE + (tensor.data_ptr() - memory.data_ptr()) % TENSOR_REDZONE
    copy = memory[begin: begin + span * tensor.itemsize].view(tensor.dtype)
    copy.copy_(tensor.as_strided((span,), (1,)))  # what lies between rows too
    return copy.as_strided(tensor.shape, tensor.stride())


def _spread(laid_out: Plan) -> Plan:
    """Spread a plan: redzones around every buffer."""
    offsets, kept_offsets = (
        {name: offset + REDZONE * (i + 1) for i, (name, offset) in enumerate(of_memory.items())}
        for of_memory in (laid_out.offsets, laid_out.kept_offsets))
    return replace(laid_out, offsets=offsets, workspace_bytes=laid_out.workspace_bytes + REDZONE * (len(offsets) + 1),
                   kept_offsets=kept_offsets, kept_bytes=laid_out.kept_bytes + REDZONE * (len(kept_offsets) + 1))


def _spread_backward(laid_out: BackwardPlan) -> BackwardPlan:
    """Spread the plan of a backward pass: redzones around every buffer."""
    offsets = {name: offset + REDZONE * (i + 1) for i, (name, offset) in enumerate(laid_out.offsets.items())}
    return replace(laid_out, offsets=offsets, workspace_bytes=laid_out.workspace_bytes + REDZONE * (len(offsets) + 1))


def _buffers_of(laid_out: Plan, workspace: torch.Tensor, kept: torch.Tensor | None) -> list[Buffer]:
    """Buffers of the workspace, to be written; of the quantized k and v, to be written by the call that quantizes them,
    and read by the others."""
    states = ("workspace", workspace, laid_out.offsets, WRITABLE), (
        "kept", kept, laid_out.kept_offsets, WRITTEN if laid_out.problem.part == "q" else WRITABLE)
    return [Buffer(name, memory.data_ptr() + offset, np.full(laid_out.sizes[name], INSIDE | state, np.uint8), base)
            for base, memory, offsets, state in states if memory is not None for name, offset in offsets.items()]


# --- the engine, engine/launch.cpp ------------------------------------------------------------------------------------


class _Launch(ctypes.Structure):
    _fields_ = [("call", ctypes.c_void_p), ("params", ctypes.c_char_p), ("blocks", ctypes.c_uint32),
                ("threads", ctypes.c_uint32), ("dynamic_bytes", ctypes.c_uint32), ("arch", ctypes.c_uint32),
                ("seed", ctypes.c_uint64), ("programmatic", ctypes.c_bool), ("in_order", ctypes.c_bool)]


class _Report(ctypes.Structure):
    _fields_ = [("kind", ctypes.c_char_p), ("detail", ctypes.c_char_p), ("file", ctypes.c_char_p),
                ("pc", ctypes.c_uint64), ("line", ctypes.c_int32), ("block", ctypes.c_uint32),
                ("thread", ctypes.c_uint32), ("count", ctypes.c_uint32)]


@functools.cache
def _engine() -> _Engine:
    """One for a process."""
    return _Engine()


class _Engine:
    """The C++ engine, and the kernels that it has loaded."""

    def __init__(self) -> None:
        self.path, self.planted = build_engine(), 0
        self._library = ctypes.CDLL(str(self.path), mode=ctypes.RTLD_GLOBAL)  # kernels find its functions
        self._library.sim_launch.restype = ctypes.c_bool
        self._kernels: dict[Path, ctypes.CDLL] = {}
        self.tables: tuple[np.ndarray, ...] = ()

    def set_exp2(self, *tables: np.ndarray) -> None:
        self.tables = tables  # the engine keeps their addresses
        self._library.sim_set_exp2(*(ctypes.c_void_p(table.ctypes.data) for table in tables))

    def plant(self, number: int) -> None:
        self.planted = number
        self._library.sim_plant(number)

    def read_states(self, buffers: tuple[Buffer, ...]) -> None:
        """Bring the states of buffers that it knows up to date."""
        for i, buffer in enumerate(buffers):
            self._library.sim_get_states(i, buffer.state.ctypes.data_as(ctypes.c_char_p))

    def know(self, buffers: tuple[Buffer, ...]) -> None:
        self._library.sim_clear_buffers()
        for buffer in buffers:
            self._library.sim_add_buffer(
                buffer.name.encode(), ctypes.c_void_p(buffer.address), ctypes.c_uint64(buffer.state.size),
                buffer.state.ctypes.data_as(ctypes.c_char_p))

    def launch(self, path: Path, name: str, params: bytes, blocks: int, threads: int, shared_bytes: int, arch: int,
               seed: int, programmatic: bool, in_order: bool) -> None:
        kernel = self._kernel(path)
        expected = kernel[f"sim_params_bytes_{name}"]()
        assert len(params) == expected, f"{name}: its struct has {expected} bytes, got {len(params)}"
        call = ctypes.cast(kernel[f"sim_call_{name}"], ctypes.c_void_p)
        launch = _Launch(call, params, blocks, threads, shared_bytes, arch, seed, programmatic, in_order)
        assert self._library.sim_launch(ctypes.byref(launch)), f"no chip model for sm_{arch}: engine/chip.h"
        reports = [self._report(i, path, name) for i in range(self._library.sim_report_count())]
        if reports:
            raise SimulatorError(reports)

    def _kernel(self, path: Path) -> ctypes.CDLL:
        if path not in self._kernels:
            self._kernels[path] = ctypes.CDLL(str(path))
            self._kernels[path].sim_make_static_shared_memory()
        return self._kernels[path]

    def _report(self, index: int, path: Path, name: str) -> Report:
        found = _Report()
        self._library.sim_get_report(index, ctypes.byref(found))
        place = f"{_source(path, found.file.decode())}:{found.line}" if found.file else line_of(path, found.pc - 1)
        return Report(name, found.kind.decode(), found.detail.decode(), place, found.block, found.thread, found.count)


def _source(library: Path, file: str) -> str:
    """The path of a source that a library names relative to its own folder."""
    return os.path.normpath(os.path.join(library.parent, file))
