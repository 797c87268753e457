"""The suite catches every bug of mutations.py, by the check that the list names."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import simbuild
from fuzz_cases import Case
from mutations import MUTATIONS, Mutation
from simbuild import Build
from simulated import Simulated
from tables import DOCUMENT, with_tables
from variants_on_cpu import SEEDS, cases_of, failure_of, has_plain_rows, variant

from sage_aot._kernels.axes import ROWS


def caught_by(base: Build, mutation: Mutation) -> str | None:
    """The check that fails first where this bug is planted; what every kernel must pass is what counts. `base`: kernels
    without it."""
    cases = cases_of(variant(mutation.variant))
    in_quantizers = simbuild.is_included("quantize.cu.jinja", mutation.header)
    plain = {name: case for name, case in cases.items() if in_quantizers and has_plain_rows(case)}
    return (caught_in(plain, base, mutation, ("bf16",))
            or caught_in({name: case for name, case in cases.items() if name not in plain}, base, mutation))


def caught_in(cases: dict[str, Case], base: Build, mutation: Mutation,
              rows: tuple[str, ...] = ROWS) -> str | None:
    """The same for some of the kernel's cases. `rows`: what the quantizers are compiled for."""
    if not cases:
        return None
    with tempfile.TemporaryDirectory() as folder:
        project = mutation.plant(Path(folder))
        subject = Simulated(simbuild.build_matrix([variant(mutation.variant)], project, base, rows))
        for case in cases.values():
            if failure := failure_of(subject.check(case, seed) for seed in SEEDS):
                return failure[0]
    return None


@pytest.mark.by_workers(does=caught_by)
@pytest.mark.parametrize("mutation", MUTATIONS, ids=[mutation.name for mutation in MUTATIONS])
def test_bug_is_caught(outcome, mutation):
    assert outcome == mutation.caught


def test_tables_of_the_document_are_up_to_date():
    assert with_tables(DOCUMENT.read_text()) == DOCUMENT.read_text(), "run `PYTHONPATH=. python tests/sim/tables.py`"
