"""The backend of CUDA tensors."""

from __future__ import annotations

import torch

from sage_aot._backends.base import BackwardTensors, Call
from sage_aot._backends.cuda.call import CudaCall
from sage_aot._backends.cuda.device import arch_of, sm_count
from sage_aot._backends.cuda.selection import CudaChoice, CudaPool
from sage_aot._backends.cuda.training import CudaBackward, CudaTraining
from sage_aot._backends.loader import Library
from sage_aot._kernels.manifest import Manifest
from sage_aot._launch.backward import heads_side_by_side, plan_backward
from sage_aot._launch.choose import Kernels
from sage_aot._launch.plan import Plan, splits_of
from sage_aot._problem.given import Given
from sage_aot._problem.problem import Problem
from sage_aot._problem.selection import Choosing, Pooling


class CudaBackend:
    """The kernels of a folder on CUDA devices."""

    def __init__(self, library: Library, arch: str | None = None, splits: int | None = None,
                 side_by_side: int | None = None) -> None:
        """`arch`: run this arch's kernels on every device; None chooses the arch by the device's compute capability.
        `splits`: so many blocks share the keys of every query tile; None chooses by the device's number of SMs.
        `side_by_side`: so many KV heads begin in turn where all gradients are asked for and the arch has a kernel that
        finds them together, 0: two kernels find them; None chooses by the call and the device."""
        self.library = library
        self._arch, self._splits, self._side_by_side = arch, splits, side_by_side
        self._archs: dict[int, str] = {}  # device → arch

    @property
    def manifest(self) -> Manifest:
        return self.library.manifest

    def arch(self, device: int) -> str:
        """The arch of a device, looked up once: torch and the driver take microseconds to answer. The look-up warns
        where the kernels are PTX."""
        if device not in self._archs:
            self._archs[device] = self._arch or arch_of(self.library, device)
        return self._archs[device]

    def splits(self, problem: Problem, kernels: Kernels, device: int) -> int:
        return self._splits or splits_of(problem, kernels, sm_count(device))

    def bind(self, plan: Plan, given: Given, out: torch.Tensor | None) -> Call:
        call = CudaCall(plan, given, out, self.library, given.like.get_device())
        return CudaTraining(call, plan_backward(plan, self.manifest).saved) if plan.problem.part == "train" else call

    def kept_bytes(self, plan: Plan) -> int:
        return plan_backward(plan, self.manifest).saved.total if plan.problem.part == "train" else plan.kept_bytes

    def bind_backward(self, plan: Plan, tensors: BackwardTensors) -> CudaBackward:
        device, asked = tensors.v.get_device(), self._side_by_side
        side_by_side = heads_side_by_side(plan, self.manifest, tensors.wants_all, sm_count(device), asked)
        return CudaBackward(plan_backward(plan, self.manifest, side_by_side), self.library, device)

    def bind_pool(self, pooling: Pooling, x: torch.Tensor, wants_means: bool) -> CudaPool:
        return CudaPool(pooling, self.arch(x.get_device()), self.library, x, wants_means)

    def bind_choice(self, choosing: Choosing, device: int) -> CudaChoice:
        return CudaChoice(choosing, self.arch(device), self.library, device)
