"""The public call on the simulator, held against everything that the fuzzer of tests/gpu holds a GPU against.

`sage_aot.attn` takes CPU tensors and does all that it does for a GPU, from checks to packed structs; only the launches
go to the simulator in the place of a driver.
"""

from __future__ import annotations

import dataclasses
import hashlib
from unittest import mock

import torch
from courses import Course
from fuzz_cases import Case
from fuzz_checks import Subject, Verdict
from fuzz_spy import Spy
from layout import Result
from simbuild import Build
from simulator import Report, SimulatorBackend, SimulatorError

from sage_aot._launch import plan as launch_plan

DELTA_BYTES = 2047
"""Workspace for delta_s: so little that short calls too compute heads in several launches, three of the smallest
at once."""


class Simulated(Subject):
    """The kernels of a build, one seed after the other."""

    def __init__(self, build: Build) -> None:
        super().__init__("cpu", [build.folder])
        self.build = build
        self.launched: set[str] = set()
        """Kernels that ran."""

    def check(self, case: Case, seed: int, course: Course | None = None) -> tuple[Verdict, str]:
        """Make the call with the threads in the order of a seed; the verdict, and a digest of all that was written.
        Where the simulator reports a fault, that is what failed, by its kind. AsBefore where a course says so."""
        backend = SimulatorBackend(self.build, case.arch, seed, splits=case.splits or 1)
        backend.simulator.launched, backend.simulator.course = self.launched, course
        spy = Spy(backend)
        with mock.patch.object(launch_plan, "DELTA_BYTES", DELTA_BYTES):
            verdict = self.examine(case, spy)
        reports = _reports(spy)
        if reports:
            verdict = dataclasses.replace(verdict, failure=(reports[0].kind, verdict.failure[1]))
        return verdict, _digest(spy.result, spy.gradients) if spy.result else ""


def _reports(spy: Spy) -> list[Report]:
    return spy.error.reports if isinstance(spy.error, SimulatorError) else []


def _digest(result: Result, gradients: tuple[torch.Tensor, ...]) -> str:
    digest = hashlib.sha256()
    for tensor in (result.out, result.lse, result.workspace, *gradients):
        if tensor is not None:
            digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
