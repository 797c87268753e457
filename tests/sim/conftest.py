"""Tests marked `by_workers(does=function)` leave their work to other processes, from this folder's first test on: their
fixture `outcome` is what `function(build, **parameters)` returned for their own parameters.

Where nobody asks for tests by name, what was simulated before is not repeated: tests marked `planted`, which plant
bugs, are left out where a whole run left a stamp (stamp.py); of others the outcome is kept (outcomes.py). Where kernels
changed, calls go as far as their launches (courses.py); where the package's Python changed, what each launch wrote is
kept (launches.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest
from drawn import variants_of
from outcomes import Outcomes
from session import LINES, asked_by_name
from simbuild import Build
from simulator import LAUNCHES
from stamp import Kept, Planted
from variants_on_cpu import SIMULATED, variant
from workers import Timed, Workers

from sage_aot._kernels.spec import AttnSpec

_WORKERS, _OUTCOMES = pytest.StashKey[Workers](), pytest.StashKey[dict[str, Future[Timed[Any]]]]()
_PLANTED, _KEPT = pytest.StashKey[Planted](), pytest.StashKey[Kept]()
_TIMED = pytest.StashKey[Timed[Any]]()
"""Key of a test's stash: what a worker returned."""


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out planted bugs that were all caught before, and put tests that wait for the workers last."""
    if any({"outcome", "built"}.intersection(_fixtures(item)) for item in items):
        config.stash[_KEPT] = Kept()
    planted = [item for item in items if item.get_closest_marker("planted")]
    if planted:
        config.stash[_PLANTED] = of_session = Planted()
        if not asked_by_name(config) and of_session.passed_before:
            items[:] = [item for item in items if not item.get_closest_marker("planted")]
            config.hook.pytest_deselected(items=planted)
            config.stash[LINES].append(f"{len(planted)} tests of planted bugs are left out: all of them passed on "
                                       "these files. `-m planted` runs them.")
    items.sort(key=lambda item: "outcome" in _fixtures(item))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report = yield
    if call.when == "call" and report.passed and item.get_closest_marker("planted"):
        item.config.stash[_PLANTED].passed.add(item.nodeid)
    if call.when == "call" and report.passed and _TIMED in item.stash:
        item.config.stash[_KEPT].passed(item.stash[_TIMED].made, item.stash[_TIMED].recalled)
    return report


@pytest.fixture(scope="session", autouse=True)
def simulating(request: pytest.FixtureRequest) -> Iterator[None]:
    """Puts the workers to work on everything that this session's tests will ask for, in their order, in front of the
    first test of this folder: of several processes that run tests, the one that runs this folder's has workers."""
    session, config = request.session, request.config
    if _KEPT not in config.stash:  # no test needs a kernel
        yield
        return
    specs = {spec for item in session.items for spec in _specs(item)}
    kept, by_name = config.stash[_KEPT], asked_by_name(config)
    LAUNCHES.kept = not by_name
    config.stash[_WORKERS] = workers = Workers(sorted(specs, key=lambda spec: spec.name),
                                               Outcomes(kept.sources, repeat=by_name))
    config.stash[_OUTCOMES] = {
        item.nodeid: workers.submit(item.get_closest_marker("by_workers").kwargs["does"], **_parameters(item))
        for item in session.items if "outcome" in _fixtures(item)}
    yield
    kept.finish()
    workers.close()
    if kept.recalled:
        config.stash[LINES].append(f"{kept.recalled} outcomes of simulated calls are kept from runs with the same "
                                   f"kernels, engine and Python; calls of {kept.again} tests were made. "
                                   "`-m by_workers` simulates all.")
    if planted := config.stash.get(_PLANTED, None):
        planted.finish()


@pytest.fixture
def outcome(request: pytest.FixtureRequest) -> Any:
    timed = request.config.stash[_OUTCOMES][request.node.nodeid].result()
    request.node.stash[_TIMED] = timed
    planted = request.node.get_closest_marker("planted")
    request.node.user_properties += [("tests/sim: kernels compiled for the CPU", timed.compiling),
                                     (f"tests/sim: {'planted bugs' if planted else 'calls'}", timed.calling)]
    return timed.result


@pytest.fixture(scope="session")
def built(request: pytest.FixtureRequest) -> Build:
    """The kernels that this session's tests ask for: those among their parameters, or all that are simulated."""
    return request.config.stash[_WORKERS].build()


def _specs(item: pytest.Item) -> Iterator[AttnSpec]:
    """The kernels that a test needs; other tests have parameters of these names, too."""
    if not {"outcome", "built"}.intersection(_fixtures(item)):
        return
    parameters = _parameters(item)
    if "spec" in parameters:
        yield parameters["spec"]
    elif "mutation" in parameters:
        yield variant(parameters["mutation"].variant)
    elif "bug" in parameters:
        yield from map(variant, variants_of(parameters["bug"]))
    elif "name" in parameters:
        yield variant(parameters["name"])
    else:
        yield from SIMULATED


def _fixtures(item: pytest.Item) -> list[str]:
    return getattr(item, "fixturenames", [])


def _parameters(item: pytest.Item) -> dict[str, Any]:
    return item.callspec.params if hasattr(item, "callspec") else {}
