"""Tests marked `by_workers(does=function)` leave their work to other processes, from the start of the session on: their
fixture `outcome` is what `function(build, **parameters)` returned for their own parameters.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest
from drawn import variants_of
from simbuild import Build
from variants_on_cpu import SIMULATED, variant
from workers import Workers

from sage_aot._kernels.spec import AttnSpec

_WORKERS, _OUTCOMES = pytest.StashKey[Workers](), pytest.StashKey[dict[str, Future[Any]]]()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What waits for the workers comes last."""
    items.sort(key=lambda item: "outcome" in _fixtures(item))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Put the workers to work on everything that this session's tests will ask for, in their order."""
    specs = {spec for item in session.items for spec in _specs(item)}
    if not specs or session.config.option.collectonly:
        return
    session.config.stash[_WORKERS] = workers = Workers(sorted(specs, key=lambda spec: spec.name))
    session.config.stash[_OUTCOMES] = {
        item.nodeid: workers.submit(item.get_closest_marker("by_workers").kwargs["does"], **_parameters(item))
        for item in session.items if "outcome" in _fixtures(item)}


def pytest_unconfigure(config: pytest.Config) -> None:
    if _WORKERS in config.stash:
        config.stash[_WORKERS].close()


@pytest.fixture
def outcome(request: pytest.FixtureRequest) -> Any:
    return request.config.stash[_OUTCOMES][request.node.nodeid].result()


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
