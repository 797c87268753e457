"""Hooks of pytest: which tests run where, in which process, and how long they take.

Those marked `gpu` need a GPU that kernels are built for. In a narrowed build (`python -m codegen build --arch sm89`) a
test that fails for want of the other archs' kernels says nothing: it is left out, and counted. Where the environment
variable CI is set, none is.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import xdist.plugin
from session import LINES, asked_by_name
from xdist.scheduler import LoadScopeScheduling

from sage_aot._backends.cuda.device import arch_of
from sage_aot._backends.drivers import default_driver
from sage_aot._call.backends import default_library
from sage_aot._kernels.manifest import AttnRecord, Manifest
from sage_aot.errors import SageAotError, UnsupportedError

# The simulator's processes keep all processors busy: threads of one operator would wait for each other at every turn.
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")  # of the programs that tests start


# --- tests of a GPU ---------------------------------------------------------------------------------------------------


@functools.cache
def no_gpu() -> str | None:
    """Reason why no kernel can run here, or None."""
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    try:
        arch_of(default_library(), torch.cuda.current_device())
    except SageAotError as error:
        return str(error)
    return None


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out files of GPU tests where no kernel can run, unless they are asked for: more than three times as many
    tests as all others, to be collected for nothing."""
    is_gpu = collection_path.parent.name == "gpu" and collection_path.name.startswith("test_")
    return True if is_gpu and config.option.markexpr != "gpu" and no_gpu() else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the GPU tests out of files that are named, and fail where `-m gpu` asks for them."""
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
        return f"gpu tests are left out: {reason}"
    return f"gpu tests run on {torch.cuda.get_device_name()}, kernels are launched through {default_driver().name}"


# --- processes that run tests -----------------------------------------------------------------------------------------


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """A process for each processor, at most four, since each takes a gigabyte. None where tests are asked for by name:
    pytest's own process runs them, prints as they do, and stops in a debugger. None where a failure ends the session,
    which processes hear of too late; and none on a machine with a GPU, whose tests wait for each other."""
    if asked_by_name(config) or config.option.maxfail or no_gpu() is None:
        return 0
    return min(xdist.plugin.pytest_xdist_auto_num_workers(config), 4)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    return _ByFile(config, log)


class _ByFile(LoadScopeScheduling):
    """Gives a file's tests to one process, whose fixtures they share, and all of tests/sim, which shares the
    simulator's workers. The files with most tests come first. A file of tests/gpu may have thirty thousand tests: such
    files are dealt out in parts."""

    def _split_scope(self, nodeid: str) -> str:
        path = Path(nodeid.partition("::")[0])
        if path.parent.name == "gpu":
            return f"{path}, part {zlib.crc32(nodeid.encode()) % GPU_PARTS}"
        return str(path.parent if path.parent.name == "sim" else path)


GPU_PARTS = 64
"""Parts of a file of tests/gpu."""


# --- a driver's library that runs nothing -----------------------------------------------------------------------------


@pytest.fixture(scope="session")
def fake_driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with libcuda.so.1, which records launches (unit/fake_driver.c): an LD_LIBRARY_PATH for programs."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if sys.platform != "linux" or compiler is None:
        pytest.skip("the library that stands in for the driver's needs Linux and a C compiler")
    folder = tmp_path_factory.mktemp("driver")
    subprocess.run([compiler, "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", "-Wl,-soname,libcuda.so.1", "-o",
                    folder / "libcuda.so.1", Path(__file__).parent / "unit/fake_driver.c"], check=True)
    return folder


# --- torch's settings -------------------------------------------------------------------------------------------------


@pytest.fixture
def default_dtype() -> Iterator[Callable[[torch.dtype], None]]:
    """torch.set_default_dtype for the time of a test."""
    before = torch.get_default_dtype()
    yield torch.set_default_dtype
    torch.set_default_dtype(before)


# --- tests of kernels that a narrowed build lacks ---------------------------------------------------------------------


def _is_narrowed() -> bool:
    try:
        return not default_library().manifest.complete and not os.environ.get("CI")
    except SageAotError:  # each test says what is wrong
        return False


_NARROWED = _is_narrowed()
_ARCH = re.compile(r"\b(?:sm|ptx)\d+\b")
_left_out: Counter[str] = Counter()
"""Tests by the archs that they miss."""


def _lacking(archs: Iterable[str]) -> list[str]:
    """Archs that are not built."""
    return sorted(set(archs).difference(default_library().manifest.attention_archs))


def _ending_the_test(look_up: Callable[[Manifest, str], tuple[AttnRecord, ...]]) -> Callable[..., Any]:
    """Wrap the look-up of an arch's kernels: where the build lacks them, the test ends there and is left out."""
    def attention(manifest: Manifest, arch: str) -> tuple[AttnRecord, ...]:
        if manifest is default_library().manifest and _lacking([arch]):
            pytest.skip(f"{_WANT}{arch}")
        return look_up(manifest, arch)

    return attention


_WANT = "no kernels of "

if _NARROWED:
    Manifest.attention = _ending_the_test(Manifest.attention)


def pytest_runtest_setup(item: pytest.Item) -> None:
    marked = _lacking(arch for marker in item.iter_markers("kernels") for arch in marker.args) if _NARROWED else []
    if marked:
        pytest.skip(f"{_WANT}{', '.join(marked)}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    """A test that fails for an UnsupportedError which names an arch that is not built is left out, too."""
    report = yield
    if _NARROWED and report.failed and call.excinfo and (unsupported := _unsupported(call.excinfo.value)):
        report.outcome, report.longrepr = "skipped", (str(item.path), 0, f"Skipped: {_WANT}{', '.join(unsupported)}")
    return report


def _unsupported(error: BaseException | None) -> list[str]:
    """The archs that are not built and that an UnsupportedError names, if one is what failed or led to it."""
    while error is not None and not isinstance(error, UnsupportedError):
        error = error.__cause__ or error.__context__
    return _lacking(_ARCH.findall(str(error).partition("; got ")[2])) if error else []


# --- the end of a session ---------------------------------------------------------------------------------------------

_seconds: Counter[str] = Counter()
"""Seconds of one processor, by part."""


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Count what a test took, and what a narrowed build lacks for it. A test by a worker (tests/sim/conftest.py) says
    what it took there; here it only waited."""
    if _NARROWED and report.skipped and isinstance(report.longrepr, (tuple, list)) and _WANT in report.longrepr[2]:
        _left_out[report.longrepr[2].partition(_WANT)[2]] += 1
    if "by_workers" not in report.keywords:
        _seconds["/".join(report.nodeid.split("/")[:2])] += report.duration
    elif report.when == "teardown":
        _seconds.update(dict(report.user_properties))


def pytest_configure(config: pytest.Config) -> None:
    config.stash[LINES] = []


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Hand the last lines of a process that runs tests to the process that prints."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["lines"] = session.config.stash[LINES]


def pytest_testnodedown(node: Any, error: object) -> None:
    """Take the lines of a process that has ended, each once."""
    lines = node.config.stash[LINES]
    lines[:] = dict.fromkeys([*lines, *getattr(node, "workeroutput", {}).get("lines", ())])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for line in config.stash[LINES]:
        terminalreporter.write_line(line)
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
