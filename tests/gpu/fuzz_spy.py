"""A backend before one that launches: it poisons all that a call writes, and keeps what the call handed over."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from layout import Result

from sage_aot._backends.base import Backend, BackwardCall, BackwardTensors, Call, ChooseCall, PoolCall
from sage_aot._kernels.manifest import Manifest
from sage_aot._launch.choose import Kernels
from sage_aot._launch.plan import Plan
from sage_aot._problem.given import Given
from sage_aot._problem.problem import Problem
from sage_aot._problem.selection import Choosing, Pooling


@dataclass(frozen=True)
class Handed:
    """Tensors that kernels got, and their plan: whatever the public call made of the caller's tensors."""

    plan: Plan
    given: Given  # q, k and v in the layout of the plan's options, or [tokens, heads, headdim]
    out: torch.Tensor  # likewise
    lse: torch.Tensor | None

    def on_cpu(self) -> Handed:
        return Handed(self.plan, on_cpu(self.given), on_cpu(self.out), on_cpu(self.lse))


def on_cpu(x: Any) -> Any:
    """Tensors, and named tuples of them, on the CPU; anything else as it is. What is expected of a call takes hundreds
    of small operations: processes that share a GPU wait for each other there, those that have a processor each do
    not."""
    if isinstance(x, torch.Tensor):
        return x.cpu()
    return type(x)(*map(on_cpu, x)) if isinstance(x, tuple) and hasattr(x, "_fields") else x


class Spy:
    """See above."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.attended: list[tuple[Handed, Result]] = []  # launches that had q, k and v; a tail has its own
        self.result: Result | None = None  # of the first
        self.error: Exception | None = None  # that the launches raised
        self.gradients: tuple[torch.Tensor, ...] = ()  # of a trained call

    @property
    def handed(self) -> Handed | None:
        """Tensors of the first launch that had q, k and v."""
        return self.attended[0][0] if self.attended else None

    def bring_to_cpu(self) -> None:
        """Bring what kernels were handed to the CPU, where its emulation runs then."""
        self.attended = [(handed.on_cpu(), result) for handed, result in self.attended]

    @property
    def manifest(self) -> Manifest:
        return self._backend.manifest

    def arch(self, device: int) -> str:
        return self._backend.arch(device)

    def splits(self, problem: Problem, kernels: Kernels, device: int) -> int:
        return self._backend.splits(problem, kernels, device)

    def bind(self, plan: Plan, given: Given, out: torch.Tensor | None) -> Call:
        call: Any = self._backend.bind(plan, given, out)

        def watched(given: Given, out: torch.Tensor | None, lse: torch.Tensor | None) -> None:
            for written in (out, lse):
                if written is not None:
                    written.fill_(math.nan)
            if given.kept is not None and plan.problem.part != "q":
                given.kept.fill_(0xFF)
            workspace = torch.full((call.plan.workspace_bytes,), 0xFF, dtype=torch.uint8,
                                   device=given.like.device)  # NaNs
            try:
                call.run(given, out, lse, workspace)
            except Exception as error:
                self.error = error
                raise
            result = Result(out, lse, workspace, call.plan)
            if plan.problem.part in ("all", "train"):
                self.attended.append((Handed(plan, given, out, lse), result))
                self.result = self.result or result

        return watched

    def kept_bytes(self, plan: Plan) -> int:
        return self._backend.kept_bytes(plan)

    def bind_backward(self, plan: Plan, tensors: BackwardTensors) -> BackwardCall:
        call: Any = self._backend.bind_backward(plan, tensors)

        def watched(tensors: BackwardTensors, lse: torch.Tensor, kept: torch.Tensor) -> None:
            for written in tensors.gradients:
                if written is not None:
                    written.fill_(math.nan)
            workspace = torch.full((call.plan.workspace_bytes,), 0xFF, dtype=torch.uint8, device=kept.device)
            try:
                call.run(tensors, lse, kept, workspace)
            except Exception as error:
                self.error = error
                raise
            self.gradients = tuple(gradient for gradient in tensors.gradients if gradient is not None)

        return watched

    def bind_pool(self, pooling: Pooling, x: torch.Tensor, wants_means: bool) -> PoolCall:
        call = self._backend.bind_pool(pooling, x, wants_means)

        def poisoned(x: torch.Tensor, pooled: torch.Tensor, means: torch.Tensor | None) -> None:
            pooled.fill_(0xFF)
            if means is not None:
                means.fill_(math.nan)
            call(x, pooled, means)

        return poisoned

    def bind_choice(self, choosing: Choosing, device: int) -> ChooseCall:
        call = self._backend.bind_choice(choosing, device)

        def poisoned(q_pooled: torch.Tensor, k_pooled: torch.Tensor, amounts: torch.Tensor | None,
                     selected: torch.Tensor) -> None:
            selected.view(torch.uint8).fill_(0xFF)
            call(q_pooled, k_pooled, amounts, selected)

        return poisoned
