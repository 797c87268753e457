"""The suite catches every bug of mutations.py, by the check that the list names, and every bug of drawn.py."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import simbuild
from bugs import IN_TURN, SWITCHED
from drawn import BACKWARD_ALONE, HARMLESS, candidates, drawn, variants_of
from filelock import FileLock
from fuzz_cases import Case
from mutations import Mutation
from outcomes import Outcomes
from schemata import Bug, plant, plant_switched
from simbuild import PROJECT, Build, Project
from simulated import Simulated
from tables import DOCUMENT, with_tables
from variants_on_cpu import SEEDS, cases_of, first_failure, in_orders, seeds_of, variant


def caught_by(base: Build, outcomes: Outcomes, mutation: Mutation) -> str | None:
    """The check that fails first where this bug is planted, of those that every kernel must pass. `base`: kernels
    without it."""
    seeds = seeds_of(variant(mutation.variant))
    if mutation.bug.can_be_switched:
        return _caught_in(base, outcomes, mutation.variant, mutation.bug, seeds)
    folder = PROJECT.build / "planted" / hashlib.sha256(repr(mutation.bug).encode()).hexdigest()[:16]
    subject = _planted(base, mutation.variant, folder, lambda: plant(mutation.bug, folder))
    calls = _calls(mutation.variant, mutation.bug, seeds)
    return _check_of(first_failure(subject, outcomes, variant(mutation.variant), calls))


def caught_by_any(base: Build, outcomes: Outcomes, bug: Bug) -> str | None:
    """Failure of the first of a drawn bug's variants that fails, with the threads in one order alone."""
    return next(filter(None, (_caught_in(base, outcomes, name, bug, SEEDS[:1]) for name in variants_of(bug))), None)


def _caught_in(base: Build, outcomes: Outcomes, name: str, bug: Bug, seeds: tuple[int, ...]) -> str | None:
    return _check_of(first_failure(_switched(base, name), outcomes, variant(name), _calls(name, bug, seeds),
                                   SWITCHED[name].index(bug) + 1))


@cache
def _switched(base: Build, name: str) -> Simulated:
    folder = PROJECT.build / "switched" / name
    return _planted(base, name, folder, lambda: plant_switched(SWITCHED[name], folder))


def _planted(base: Build, name: str, folder: Path, plant_in_it: Callable[[], Project]) -> Simulated:
    """Plant by one process at a time: a second copy would change the headers that the first process compiles."""
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / "one_process"):
        return Simulated(simbuild.build_matrix([variant(name)], plant_in_it(), base))


def failure_without_bugs(base: Build, outcomes: Outcomes, name: str) -> tuple[str, str] | None:
    """Failure of a variant's kernels that were compiled with switches, all of them off: in every case, or a failure of
    its own would pass for a bug that was caught."""
    calls = [[(case, SEEDS[0])] for case in cases_of(variant(name)).values()]
    return first_failure(_switched(base, name), outcomes, variant(name), calls)


def _calls(name: str, bug: Bug, seeds: tuple[int, ...]) -> list[list[tuple[Case, int]]]:
    """Calls that may show a bug in a variant, case by case. A bug of the backward pass shows in trained calls alone;
    others show without a backward pass."""
    of_backward = bug.header.startswith("bwd/") or bug.place in BACKWARD_ALONE
    return [[*in_orders(case, seeds)] for case in cases_of(variant(name)).values() if case.trained == of_backward]


def _check_of(failure: tuple[str, str] | None) -> str | None:
    return failure and failure[0]


@pytest.mark.planted
@pytest.mark.by_workers(does=caught_by)
@pytest.mark.parametrize("mutation", IN_TURN, ids=[mutation.name for mutation in IN_TURN])
def test_bug_is_caught(outcome, mutation):
    assert outcome == mutation.caught


@pytest.mark.planted
@pytest.mark.by_workers(does=caught_by_any)
@pytest.mark.parametrize("bug", drawn(), ids=str)
def test_drawn_bug_is_caught(outcome, bug):
    assert outcome, (f"nothing shows it in {', '.join(variants_of(bug))}: add a case to variants_on_cpu.py or a "
                     "kernel to SHOWN_BY, or say in HARMLESS of drawn.py why it does no harm")


@pytest.mark.planted
@pytest.mark.by_workers(does=failure_without_bugs)
@pytest.mark.parametrize("name", SWITCHED)
def test_switches_alone_change_nothing(outcome, name):
    assert outcome is None


def test_what_is_harmless_could_be_drawn():
    known = {(bug.place, bug.operation) for bug in candidates()}
    assert [bug for bug in HARMLESS if bug not in known] == []


def test_tables_of_the_document_are_up_to_date():
    assert with_tables(DOCUMENT.read_text()) == DOCUMENT.read_text(), "run `PYTHONPATH=. python tests/sim/tables.py`"
