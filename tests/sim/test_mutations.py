"""The suite catches every bug of mutations.py, by the check that the list names."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path

import pytest
import simbuild
import simulator
from mutations import MUTATIONS
from schemata import Mutation, can_be_switched, plant, plant_switched
from simbuild import PROJECT, Build
from simulated import Simulated
from tables import DOCUMENT, with_tables
from variants_on_cpu import SEEDS, cases_of, failure_of, variant

SWITCHED: dict[str, list[Mutation]] = {}
"""Per variant the bugs that its kernels are compiled with, all at once."""

for _mutation in MUTATIONS:
    if can_be_switched(_mutation):
        SWITCHED.setdefault(_mutation.variant, []).append(_mutation)

IN_TURN = sorted(MUTATIONS, key=lambda mutation: [
    other for other in MUTATIONS if other.variant == mutation.variant].index(mutation))
"""The first of each variant, then the second: so the workers compile different variants."""


def caught_by(base: Build, mutation: Mutation) -> str | None:
    """The check that fails first where this bug is planted; what every kernel must pass is what counts. `base`: kernels
    without it."""
    if can_be_switched(mutation):
        simulator.plant(SWITCHED[mutation.variant].index(mutation) + 1)
        try:
            return first_failure(_switched(base, mutation.variant), mutation.variant)
        finally:
            simulator.plant(0)
    with tempfile.TemporaryDirectory() as folder:
        project = plant(mutation, Path(folder))
        return first_failure(Simulated(simbuild.build_matrix([variant(mutation.variant)], project, base)),
                             mutation.variant)


@cache
def _switched(base: Build, name: str) -> Simulated:
    project = plant_switched(SWITCHED[name], PROJECT.build / "switched" / name)
    return Simulated(simbuild.build_matrix([variant(name)], project, base))


def first_failure(subject: Simulated, name: str) -> str | None:
    for case in cases_of(variant(name)).values():
        if failure := failure_of(subject.check(case, seed) for seed in SEEDS):
            return failure[0]
    return None


def failure_without_bugs(base: Build, name: str) -> tuple[str, str] | None:
    """Of a variant's kernels that were compiled with switches, all of them off."""
    return failure_of([_switched(base, name).check(cases_of(variant(name))["plain"], SEEDS[0])])


@pytest.mark.by_workers(does=caught_by)
@pytest.mark.parametrize("mutation", IN_TURN, ids=[mutation.name for mutation in IN_TURN])
def test_bug_is_caught(outcome, mutation):
    assert outcome == mutation.caught


@pytest.mark.by_workers(does=failure_without_bugs)
@pytest.mark.parametrize("name", SWITCHED)
def test_switches_alone_change_nothing(outcome, name):
    assert outcome is None


def test_tables_of_the_document_are_up_to_date():
    assert with_tables(DOCUMENT.read_text()) == DOCUMENT.read_text(), "run `PYTHONPATH=. python tests/sim/tables.py`"
