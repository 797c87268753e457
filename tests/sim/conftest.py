"""The compiled matrix, once a session, and the processes that simulate it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import simbuild
from simbuild import Build
from variants_on_cpu import SIMULATED, Pool, cases_of


@pytest.fixture(scope="session")
def built(request: pytest.FixtureRequest) -> Build:
    """The kernels that this session's tests ask for: the variants among their parameters, or all that are simulated."""
    simbuild.build_engine()  # here, so that the processes find it ready
    items = [item for item in request.session.items if "built" in getattr(item, "fixturenames", ())]
    asked = [_parameters(item).get("spec") for item in items]
    return simbuild.build_matrix(SIMULATED if None in asked else asked)


@pytest.fixture(scope="session")
def pool(built: Build, request: pytest.FixtureRequest) -> Iterator[Pool]:
    """At work on every case that this session's tests will ask for, in their order."""
    running = Pool(built)
    asked = [_parameters(item) for item in request.session.items if "pool" in getattr(item, "fixturenames", ())]
    running.submit([cases_of(parameters["spec"])[parameters["name"]] for parameters in asked])
    yield running
    running.close()


def _parameters(item: pytest.Item) -> dict[str, object]:
    return item.callspec.params if hasattr(item, "callspec") else {}
