"""Processes that compile and simulate kernels while the tests' own process runs other tests."""

from __future__ import annotations

import functools
import gc
import multiprocessing
import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing.synchronize import Lock
from typing import Generic, NamedTuple, TypeVar

import simbuild
import torch
from outcomes import Outcomes
from simbuild import Build, HostBuildError
from simulator import LAUNCHES

from sage_aot._kernels.spec import AttnSpec

Result = TypeVar("Result")


class Timed(NamedTuple, Generic[Result]):
    """Result of a function, and how long one process took for it."""

    result: Result
    compiling: float  # seconds in which it compiled the kernels, or waited for them
    calling: float  # seconds of the function
    made: dict[str, bytes]  # outcomes to keep where its test passes
    recalled: int  # outcomes that were kept before


class Workers:
    """One process for each processor. The first that is asked for anything compiles these kernels for all of them."""

    def __init__(self, specs: Iterable[AttnSpec], outcomes: Outcomes) -> None:
        """`outcomes`: what each process begins with."""
        os.environ["OPENBLAS_NUM_THREADS"] = "1"  # of the processes to come: idle threads of numpy's would spin
        context = multiprocessing.get_context("spawn")  # a fork would inherit torch's threads as dead ones
        self._kernels = tuple(specs), context.Lock()
        self._executor = ProcessPoolExecutor(os.cpu_count(), context, _start, (*self._kernels, outcomes))

    def submit(self, function: Callable[..., Result], **arguments: object) -> Future[Timed[Result]]:
        """`function(build, outcomes, **arguments)` in one of them, as soon as what was submitted before leaves one
        free."""
        return self._executor.submit(_run, function, arguments)

    def build(self) -> Build:
        """The kernels, for this process."""
        return _built(*self._kernels)

    def close(self) -> None:
        self._executor.shutdown(cancel_futures=True)


def _start(specs: tuple[AttnSpec, ...], lock: Lock, outcomes: Outcomes) -> None:
    """Set up each of the processes."""
    global _kernels, _outcomes
    _kernels, _outcomes = (specs, lock), outcomes
    LAUNCHES.kept = not outcomes.repeat
    torch.set_num_threads(1)
    gc.freeze()  # what is imported stays; the collector would go through it again and again


_kernels: tuple[tuple[AttnSpec, ...], Lock]
_outcomes: Outcomes


def _run(function: Callable[..., Result], arguments: dict[str, object]) -> Timed[Result]:
    begin = time.perf_counter()
    build = _built(*_kernels)
    compiled = time.perf_counter()
    result = function(build, _outcomes, **arguments)
    return Timed(result, compiled - begin, time.perf_counter() - compiled, *_outcomes.take())


def _built(specs: tuple[AttnSpec, ...], lock: Lock) -> Build:
    found = _build_or_error(specs, lock)
    if isinstance(found, HostBuildError):
        raise found
    return found


@functools.cache
def _build_or_error(specs: tuple[AttnSpec, ...], lock: Lock) -> Build | HostBuildError:
    """Caches the error too: else each task would compile the failing kernels again."""
    with lock:
        try:
            simbuild.build_engine()
            return simbuild.build_matrix(specs)
        except HostBuildError as error:
            return error
