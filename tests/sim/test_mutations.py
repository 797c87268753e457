"""The suite catches every bug of mutations.py, by the check that the list names."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from pathlib import Path

import pytest
import simbuild
import torch
from mutations import MUTATIONS, Mutation
from simbuild import Build
from simulated import Simulated
from tables import DOCUMENT, with_tables
from variants_on_cpu import SEEDS, SPECS, cases_of, failure_of

from sage_aot._kernels.spec import AttnSpec


def spec_of(mutation: Mutation) -> AttnSpec:
    return next(spec for spec in SPECS if spec.name == f"sage_attn_{mutation.variant}")


def caught_by(mutation: Mutation, folder: Path, base: Build) -> str | None:
    """The check that fails first where this bug is planted; what every kernel must pass is what counts."""
    torch.set_num_threads(1)
    spec = spec_of(mutation)
    subject = Simulated(simbuild.build_matrix([spec], mutation.plant(folder), base))
    for case in cases_of(spec).values():
        if failure := failure_of(subject.check(case, seed) for seed in SEEDS):
            return failure[0]
    return None


@pytest.fixture(scope="module")
def processes() -> Iterator[Executor]:
    simbuild.build_engine()  # here, so that the processes find it ready
    context = multiprocessing.get_context("spawn")  # a fork would inherit torch's threads as dead ones
    with ProcessPoolExecutor(os.cpu_count(), context) as executor:
        yield executor


@pytest.fixture(scope="module")
def found(processes, request, tmp_path_factory) -> dict[Mutation, object]:
    """By mutation what caught it, as soon as it is known."""
    asked = [item.callspec.params["mutation"] for item in request.session.items if "found" in item.fixturenames]
    base = simbuild.build_matrix(map(spec_of, asked))
    return {mutation: processes.submit(caught_by, mutation, tmp_path_factory.mktemp("mutation"), base)
            for mutation in asked}


@pytest.mark.parametrize("mutation", MUTATIONS, ids=[mutation.name for mutation in MUTATIONS])
def test_bug_is_caught(found, mutation):
    assert found[mutation].result() == mutation.caught


def test_tables_of_the_document_are_up_to_date():
    assert with_tables(DOCUMENT.read_text()) == DOCUMENT.read_text(), "run `PYTHONPATH=. python tests/sim/tables.py`"
