"""The suite catches every bug of mutations.py, by the check that the list names, and every bug of drawn.py."""

from __future__ import annotations

import pytest
from bugs import IN_TURN, SWITCHED
from catching import caught_by, caught_by_any, failure_without_bugs
from drawn import HARMLESS, candidates, drawn, variants_of
from tables import DOCUMENT, with_tables


@pytest.mark.planted
@pytest.mark.by_workers(does=caught_by)
@pytest.mark.parametrize("mutation", IN_TURN, ids=[mutation.name for mutation in IN_TURN])
def test_bug_is_caught(outcome, mutation):
    assert outcome and outcome.check == mutation.caught


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
