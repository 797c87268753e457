"""Which tests run where, and how long they take.

Those marked `gpu` need a GPU that kernels are built for. In a narrowed build (`python -m codegen build --arch sm89`) a
test that fails for want of the other archs' kernels says nothing: it is left out, and counted. Where the environment
variable CI is set, none is.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator

import pytest
import torch

from sage_aot._backends.cuda import arch_of
from sage_aot._backends.drivers import default_driver
from sage_aot._call.pipeline import default_library
from sage_aot._kernels.manifest import AttnRecord, Manifest
from sage_aot.errors import SageAotError, UnsupportedError

# The simulator's processes keep all processors busy: threads of one operator would wait for each other at every turn.
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")  # of the programs that tests start


# --- tests of a GPU ---------------------------------------------------------------------------------------------------


def no_gpu() -> str | None:
    """Why no kernel can run here, or None."""
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    try:
        arch_of(default_library(), torch.cuda.current_device())
    except SageAotError as error:
        return str(error)
    return None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Where no kernel can run, leave the GPU tests out and count them; asked for by name, fail."""
    reason = no_gpu()
    if reason is None:
        return
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    if gpu and config.option.markexpr == "gpu":
        raise pytest.UsageError(f"`-m gpu` was asked for, but {reason}")
    items[:] = [item for item in items if item not in set(gpu)]
    config.hook.pytest_deselected(items=gpu)


def pytest_report_header() -> str:
    reason = no_gpu()
    if reason:
        return f"gpu tests are deselected: {reason}"
    return f"gpu tests run on {torch.cuda.get_device_name()}, kernels are launched through {default_driver().name}"


# --- tests of kernels that a narrowed build lacks ---------------------------------------------------------------------



def _is_narrowed() -> bool:
    try:
        return not default_library().manifest.complete and not os.environ.get("CI")
    except SageAotError:  # each test says what is wrong
        return False


_NARROWED = _is_narrowed()
_ARCH = re.compile(r"(?<![a-z0-9])(?:sm|ptx)\d+")
_missed: set[str] = set()
"""Archs that the test which runs looked up, and that are not built."""
_left_out: Counter[str] = Counter()
"""Tests by the archs that they miss."""


def _noting(look_up):
    def attention(manifest: Manifest, arch: str) -> tuple[AttnRecord, ...]:
        found = look_up(manifest, arch)
        if not found:
            _missed.add(arch)
        return found

    return attention


if _NARROWED:
    Manifest.attention = _noting(Manifest.attention)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """What a marker or a parameter names counts as looked up."""
    _missed.clear()
    if _NARROWED:
        named = {arch for marker in item.iter_markers("kernels") for arch in marker.args}
        named.update(_ARCH.findall(item.name.partition("[")[2]))
        _missed.update(named.difference(default_library().manifest.attention_archs))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report = yield
    if _NARROWED and report.failed and (_missed or _is_unsupported(call.excinfo.value)):
        missed = ", ".join(sorted(_missed)) or "the arch that an UnsupportedError names"
        _left_out[missed] += 1
        report.outcome, report.longrepr = "skipped", (str(item.path), 0, f"Skipped: no kernels of {missed}")
    return report


def _is_unsupported(error: BaseException | None) -> bool:
    """Whether an UnsupportedError is what failed, or led to it."""
    while error is not None:
        if isinstance(error, UnsupportedError):
            return True
        error = error.__cause__ or error.__context__
    return False


# --- minutes ----------------------------------------------------------------------------------------------------------

_seconds: Counter[str] = Counter()
"""Of one processor, by part."""


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """A test by a worker (tests/sim/conftest.py) says what it took there; here it only waited."""
    if "by_workers" not in report.keywords:
        _seconds["/".join(report.nodeid.split("/")[:2])] += report.duration
    elif report.when == "teardown":
        _seconds.update(dict(report.user_properties))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _seconds.total() > 60:
        terminalreporter.section("minutes of one processor")
        for part, seconds in sorted(_seconds.items()):
            terminalreporter.write_line(f"| {part} | {seconds / 60:.1f} |")
    if _left_out:
        built = ", ".join(default_library().manifest.attention_archs)
        missed = ", ".join(f"{count} of {archs}" for archs, count in _left_out.most_common())
        terminalreporter.write_line(
            f"{_left_out.total()} tests are left out: they need kernels that a build of {built} alone lacks "
            f"({missed}). `python -m codegen build` builds all.")
