"""The compiled matrix, once a session, and the processes that simulate it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import simbuild
from simbuild import Build
from variants_on_cpu import Pool, cases_of


@pytest.fixture(scope="session")
def built() -> Build:
    simbuild.build_engine()  # here, so that the processes find it ready
    return simbuild.build_matrix()


@pytest.fixture(scope="session")
def pool(built: Build, request: pytest.FixtureRequest) -> Iterator[Pool]:
    """At work on every case that this session's tests will ask for, in their order."""
    running = Pool(built)
    running.submit([cases_of(item.callspec.params["spec"])[item.callspec.params["name"]]
                    for item in request.session.items if "pool" in getattr(item, "fixturenames", ())])
    yield running
    running.close()
