"""The suite catches every bug of mutations.py, by the check that the list names."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import simbuild
from mutations import MUTATIONS, Mutation
from simbuild import Build
from simulated import Simulated
from tables import DOCUMENT, with_tables
from variants_on_cpu import SEEDS, cases_of, failure_of, variant


def caught_by(base: Build, mutation: Mutation) -> str | None:
    """The check that fails first where this bug is planted; what every kernel must pass is what counts. `base`: kernels
    without it."""
    spec = variant(mutation.variant)
    with tempfile.TemporaryDirectory() as folder:
        subject = Simulated(simbuild.build_matrix([spec], mutation.plant(Path(folder)), base))
        for case in cases_of(spec).values():
            if failure := failure_of(subject.check(case, seed) for seed in SEEDS):
                return failure[0]
    return None


@pytest.mark.by_workers(does=caught_by)
@pytest.mark.parametrize("mutation", MUTATIONS, ids=[mutation.name for mutation in MUTATIONS])
def test_bug_is_caught(outcome, mutation):
    assert outcome == mutation.caught


def test_tables_of_the_document_are_up_to_date():
    assert with_tables(DOCUMENT.read_text()) == DOCUMENT.read_text(), "run `PYTHONPATH=. python tests/sim/tables.py`"
