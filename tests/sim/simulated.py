"""The public call on the simulator, held against everything that the fuzzer of tests/gpu holds a GPU against.

`sage_aot.attn` takes CPU tensors and does all that it does for a GPU, from checks to packed structs; only the launches
go to the simulator in the place of a driver.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from fuzz_cases import Case
from fuzz_checks import Subject, Verdict
from layout import Result
from simbuild import Build
from simulator import Report, Simulator, SimulatorError

from sage_aot import _emulate, _plan
from sage_aot._problem import Problem
from sage_aot._select import Kernels

DELTA_BYTES = 2047
"""Workspace for delta_s: so little that heads take turns in short calls too, three of the smallest at once."""


class _Spy:
    """Stands in the place of the emulation: poisons what the kernels write, runs them, and keeps what they leave."""

    def __init__(self, simulator: Simulator) -> None:
        self.simulator = simulator
        self.result: Result | None = None
        self.reports: list[Report] = []

    def attention(self, problem: Problem, kernels: Kernels, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
                  out: torch.Tensor, lse: torch.Tensor | None) -> None:
        out.fill_(math.nan)
        if lse is not None:
            lse.fill_(math.nan)
        try:
            plan, workspace = self.simulator.attention(problem, kernels, q, k, v, out, lse)
        except SimulatorError as error:
            self.reports = error.reports
            raise
        self.result = Result(out, lse, workspace, plan)


class Simulated(Subject):
    """The kernels of a build, one seed after the other."""

    def __init__(self, build: Build) -> None:
        super().__init__("cpu", [build.folder])
        self.build = build
        self._spy = _Spy(Simulator(build))  # of the last call

    def check(self, case: Case, seed: int) -> tuple[Verdict, str]:
        """Make the call with the threads in the order of a seed; the verdict, and a digest of all that was written.
        Where the simulator reports a fault, that is what failed, by its kind."""
        self._spy = _Spy(Simulator(self.build, seed))
        with mock.patch.object(_plan, "DELTA_BYTES", DELTA_BYTES):
            verdict = self.examine(case)
        if self._spy.reports:
            verdict = dataclasses.replace(verdict, failure=(self._spy.reports[0].kind, verdict.failure[1]))
        return verdict, _digest(self._spy.result) if self._spy.result else ""

    @contextmanager
    def _watched(self) -> Iterator[_Spy]:
        with mock.patch.object(_emulate, "attention", self._spy.attention):
            yield self._spy


def _digest(result: Result) -> str:
    digest = hashlib.sha256()
    for tensor in (result.out, result.lse, result.workspace):
        if tensor is not None:
            digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
