"""A backend before one that launches: it poisons all that a call writes, and keeps what the call handed over."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from layout import Result

from sage_aot._backends.base import Backend, BackwardCall, BackwardTensors, Call, Tensors, TrainingCall
from sage_aot._kernels.manifest import Manifest
from sage_aot._launch.choose import Kernels
from sage_aot._launch.plan import Plan
from sage_aot._problem.check import Problem, Sequences


@dataclass(frozen=True)
class Handed:
    """What kernels got, and their plan: whatever the public call made of the caller's tensors."""

    plan: Plan
    q: torch.Tensor  # as k, v and out in the layout of the plan's options, or [tokens, heads, headdim]
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor | None
    key_mask: torch.Tensor | None
    sequences: Sequences | None


class Spy:
    """See above."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.handed: Handed | None = None  # in the last call that had q, k and v
        self.result: Result | None = None
        self.error: Exception | None = None  # that the launches raised
        self.gradients: tuple[torch.Tensor, ...] = ()  # of a trained call

    @property
    def manifest(self) -> Manifest:
        return self._backend.manifest

    def arch(self, device: int) -> str:
        return self._backend.arch(device)

    def splits(self, problem: Problem, kernels: Kernels, device: int) -> int:
        return self._backend.splits(problem, kernels, device)

    def bind(self, plan: Plan, tensors: Tensors) -> Call:
        call: Any = self._backend.bind(plan, tensors)

        def watched(q: torch.Tensor | None, k: torch.Tensor | None, v: torch.Tensor | None, out: torch.Tensor | None,
                    lse: torch.Tensor | None, key_mask: torch.Tensor | None, sequences: Sequences | None,
                    kv: torch.Tensor | None) -> None:
            for written in (out, lse):
                if written is not None:
                    written.fill_(math.nan)
            if kv is not None and plan.problem.part != "q":
                kv.fill_(0xFF)
            device = next(tensor.device for tensor in (q, k) if tensor is not None)
            workspace = torch.full((call.plan.workspace_bytes,), 0xFF, dtype=torch.uint8, device=device)  # NaNs
            try:
                call.run(q, k, v, out, lse, workspace, key_mask, sequences, kv)
            except Exception as error:
                self.error = error
                raise
            if plan.problem.part == "all":
                self.handed = Handed(plan, q, k, v, out, lse, key_mask, sequences)
                self.result = Result(out, lse, workspace, call.plan)

        return watched

    def kv_bytes(self, plan: Plan) -> int:
        return self._backend.kv_bytes(plan)

    def saved_bytes(self, plan: Plan) -> int:
        return self._backend.saved_bytes(plan)

    def bind_training(self, plan: Plan, tensors: Tensors) -> TrainingCall:
        call: Any = self._backend.bind_training(plan, tensors)

        def watched(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
                    saved: torch.Tensor) -> None:
            workspace = torch.full((call.plan.workspace_bytes,), 0xFF, dtype=torch.uint8, device=saved.device)
            for written in (out, lse):
                written.fill_(math.nan)
            saved.fill_(0xFF)
            try:
                call.run(q, k, v, out, lse, saved, workspace)
            except Exception as error:
                self.error = error
                raise
            self.result = Result(out, lse, workspace, call.plan)

        return watched

    def bind_backward(self, plan: Plan, tensors: BackwardTensors) -> BackwardCall:
        call: Any = self._backend.bind_backward(plan, tensors)

        def watched(tensors: BackwardTensors, lse: torch.Tensor, saved: torch.Tensor) -> None:
            for written in (tensors.grad_q, tensors.grad_k, tensors.grad_v):
                written.fill_(math.nan)
            workspace = torch.full((call.plan.workspace_bytes,), 0xFF, dtype=torch.uint8, device=saved.device)
            try:
                call.run(tensors, lse, saved, workspace)
            except Exception as error:
                self.error = error
                raise
            self.gradients = tensors[3:]

        return watched
