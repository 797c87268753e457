"""A planted bug's call of the last time comes first; where it shows the bug no longer, all calls are made in turn."""

from __future__ import annotations

import pytest
from bugs import IN_TURN
from catching import Search, Shown
from variants_on_cpu import SEEDS, cases_of, variant

MUTATION = next(mutation for mutation in IN_TURN if mutation.bug.header.startswith("attn/mma/"))
FIRST, SECOND, THIRD = list(cases_of(variant(MUTATION.variant)))[:3]


@pytest.fixture
def made(monkeypatch) -> list[str]:
    """The calls that were made. The second and the third case fail, the second by another check."""
    cases = []

    def make(self: Search, name: str, case: str) -> Shown | None:
        cases.append(case)
        checks = {SECOND: "another", THIRD: MUTATION.caught}
        return Shown(name, case, checks[case]) if case in checks else None

    monkeypatch.setattr(Search, "_made", make)
    return cases


def shown(case: str | None, check: str | None = None) -> Shown | None:
    search = Search(None, None, MUTATION.bug, (MUTATION.variant,), SEEDS)
    return search.shown((MUTATION.variant, case) if case else None, check)


def test_the_call_of_the_last_time_is_enough(made):
    assert shown(THIRD, MUTATION.caught) == (MUTATION.variant, THIRD, MUTATION.caught)
    assert shown(SECOND).case == SECOND
    assert made == [THIRD, SECOND]


@pytest.mark.parametrize(("case", "again"), [
    (None, []), ("a case that is no more", []), (FIRST, [FIRST]), (SECOND, [SECOND])])
def test_else_all_calls_are_made_in_turn(made, case, again):
    assert shown(case, MUTATION.caught) == (MUTATION.variant, SECOND, "another")
    assert made == [*again, FIRST, SECOND]
