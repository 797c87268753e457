"""Selections of blocks on the simulator: nothing to report, bits of the emulation, and what the caller is promised; and
the bugs planted in their kernels, each of which a case must show."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import simbuild
import simulator
import torch
from drawn import candidates, one_a_function
from operations import Drop, First, Left, OffByOne, Operation, Put, Second, Sign
from schemata import Bug, plant_switched
from simbuild import PROJECT, Build
from simulator import SimulatorBackend, SimulatorError
from variants_on_cpu import KERNELS, SEEDS

sys.path.insert(1, str(Path(__file__).parents[1] / "gpu"))

from selection_checks import CASES, Selection, failures, of_headdim

import sage_aot
from sage_aot._backends.emulation.backend import EmulationBackend
from sage_aot._backends.emulation.selection import views_of
from sage_aot._call.backends import handing
from sage_aot._kernels.spec import AttnSpec
from sage_aot._problem.selection import Pooling

ARCHS = {64: "sm80", 128: "sm90", 256: "sm86"}
"""Archs whose kernels run, by head dim: their sources are the same for every arch."""


def _spec(headdim: int) -> AttnSpec:
    """A kernel that a selection's kernels are built for."""
    return next(spec for spec in KERNELS if (spec.arch, spec.headdim, spec.mask) == (
        ARCHS[headdim], headdim, "sparse") and spec.v == "vraw" and spec.q == "qraw")


@pytest.fixture(scope="module")
def kernels() -> Build:
    simbuild.build_engine()
    return simbuild.build_matrix(map(_spec, ARCHS))


def failure_of(build: Build, case: Selection, headdim: int, seeds: tuple[int, ...] = SEEDS) -> str | None:
    """Fault of a selection, in any order of threads; None where there is none."""
    try:
        made = [_run(build, case, headdim, seed) for seed in seeds]
    except SimulatorError as error:
        return error.reports[0].kind
    if any(not torch.equal(one, other) for found in made for one, other in zip(made[0], found)):
        return "seeds differ"
    emulated = _emulated(build, case, headdim)
    names = "mask", "s8 of k", "scales of k", "means of k", "s8 of q", "scales of q"
    wrong = [name for name, one, other in zip(names, made[0], emulated) if not torch.equal(one, other)]
    q, k = case.tensors()
    return next(iter([*wrong, *failures(case, q, k, made[0][0])]), None)


def _run(build: Build, case: Selection, headdim: int, seed: int) -> list[torch.Tensor]:
    return _selected(SimulatorBackend(build, ARCHS[headdim], seed), case)


@functools.cache
def _emulated(build: Build, case: Selection, headdim: int) -> list[torch.Tensor]:
    return _selected(EmulationBackend(SimulatorBackend(build, ARCHS[headdim]).manifest, ARCHS[headdim]), case)


def _selected(backend: object, case: Selection) -> list[torch.Tensor]:
    """The mask, and what is pooled; how alike rows are has no bits that are promised."""
    q, k = case.tensors()
    rows_q, rows_k = case.block_size if isinstance(case.block_size, tuple) else (case.block_size,) * 2
    with handing(backend):
        blocks = sage_aot.sparse.select_blocks(q, k, **case.arguments).blocks
        of_k = sage_aot.sparse.pool_blocks(k, rows_k, centre=True, means=True, layout=case.layout)
        of_q = sage_aot.sparse.pool_blocks(q, rows_q, layout=case.layout)
    k_hat, k_scale, _ = _parts(of_k)
    q_hat, q_scale, _ = _parts(of_q)
    return [blocks, k_hat, k_scale, of_k.means, q_hat, q_scale]


def _parts(pooled: sage_aot.sparse.PooledBlocks) -> Iterator[torch.Tensor]:
    return iter(views_of(Pooling(*pooled.shape, "f32", pooled.block_rows, False), pooled._data))


@pytest.mark.parametrize(("headdim", "name"), [(headdim, name) for headdim in ARCHS for name in CASES
                                               if headdim == 64 or name in ("keep", "mass", "floats", "odd")])
def test_selection(kernels, headdim, name):
    assert failure_of(kernels, of_headdim(CASES[name], headdim), headdim) is None


# --- planted bugs -----------------------------------------------------------------------------------------------------

_POOL, _CHOOSE = "select/pool_blocks.cuh", "select/choose_blocks.cuh"

NAMED: dict[str, tuple[str, str, Operation]] = {
    "rows behind the last count": (_POOL, "PoolBlocks::add_rows", OffByOne("first + r * kRowsAtOnce >= rows")),
    "a block's mean over all rows of a block": (
        _POOL, "PoolBlocks::run", Put("params.seqlen - first_row", instead="params.block_rows")),
    "the sample's mean left out": (_POOL, "PoolBlocks::add_rows", Left("x[i] - centre[i]")),
    "a mean that is not finite": (_POOL, "PoolBlocks::add_rows", Put("finite_or_zero(x[i] - centre[i])",
                                                                     instead="x[i] - centre[i]")),
    "means without the sample's": (_POOL, "PoolBlocks::store", Left("mean + shared.centre[c]")),
    "means of channels that do not exist": (_POOL, "PoolBlocks::store", OffByOne("c < params.headdim")),
    "the scale of one warp": (_POOL, "PoolBlocks::store", Drop("amax = fmaxf(amax, shared.of_warps[0][w]);")),
    "unlike rows that are alike": (_POOL, "PoolBlocks::alike", First("part >= 0.0f ? fminf(part, 1.0f) : 0.0f")),
    "sums read before they are there": (_POOL, "PoolBlocks::run", Drop("__syncthreads();", 2)),
    "the kv head of the first q head": (
        _CHOOSE, "ChooseBlocks::Group::Group", Left("batch * params.num_kv_heads + own / params.q_heads_per_kv_head")),
    "the same amount for every head": (
        _CHOOSE, "ChooseBlocks::Group::Group", Put("params.amounts[own]", instead="params.amounts[0]")),
    "scores read before they are there": (_CHOOSE, "ChooseBlocks::run", Drop("__syncthreads();")),
    "the future is visible": (_CHOOSE, "ChooseBlocks::Row::Row", Sign("last_query + own + 1")),
    "aligned top-left": (_CHOOSE, "ChooseBlocks::Row::Row", Left("params.seqlen_kv - params.seqlen_q")),
    "near without the last query's block": (
        _CHOOSE, "ChooseBlocks::Row::Row", Left("(last_query + own) / params.block_k + params.near_kept")),
    "the last dense keys are not": (
        _CHOOSE, "ChooseBlocks::Row::Row", Sign("params.seqlen_kv - params.dense_last_keys")),
    "dense queries from the second on": (
        _CHOOSE, "ChooseBlocks::Row::Row", Put("first_query < params.dense_first_queries",
                                 instead="first_query + params.block_q < params.dense_first_queries")),
    "unlike queries see no more": (
        _CHOOSE, "ChooseBlocks::Row::Row",
        Drop("every |= params.q_alike[group.q_index + row] < params.least_alike;")),
    "an s8 product's upper half": (_CHOOSE, "ChooseBlocks::load_queries", Put("16 * (i / 2)", instead="16 * (i % 2)")),
    "the scale of another block of keys": (
        _CHOOSE, "ChooseBlocks::score",
        Put("params.k_scale[group.k_index + at]", instead="params.k_scale[group.k_index + first]")),
    "kept blocks in addition to the share": (
        _CHOOSE, "ChooseBlocks::count", Put("four.x >= least", instead="four.x >= least && four.x != kKept")),
    "kept blocks' mass counts twice": (_CHOOSE, "ChooseBlocks::choose", Left("row.amount * all.mass - kept")),
    "ties beyond the share": (_CHOOSE, "ChooseBlocks::store", OffByOne("rank < ties")),
    "ragged blocks weigh as whole ones": (
        _CHOOSE, "ChooseBlocks::weight", Put("params.seqlen_kv - column * params.block_k", instead="params.block_k")),
    "the order of negative scores": (_CHOOSE, "ChooseBlocks::key_of", Second("bits >> 31 ? 0xffffffff : 0x80000000")),
    "a band of a larger block": (_CHOOSE, "ChooseBlocks::mark", Sign("to += pitch")),
}
"""Bugs by name: what a reviewer might miss."""

HARMLESS: dict[tuple[str, Operation], str] = {
    ("ChooseBlocks::choose", OffByOne("mass(row, keys, key, all.highest) >= wanted")): "of one sum alone",
}
"""Bugs that change nothing anybody could see, and why."""

BUGS = {name: Bug(*bug) for name, bug in NAMED.items()}
BUGS |= {str(bug): bug for bug in one_a_function(candidates("select"), list(BUGS.values()), HARMLESS)}


@pytest.fixture(scope="module")
def planted(kernels: Build) -> Build:
    """The kernels with every bug, none of which is switched on."""
    folder = PROJECT.build / "switched" / "selection"
    return simbuild.build_matrix([_spec(64)], plant_switched(list(BUGS.values()), folder), kernels)


def test_every_bug_can_be_switched():
    assert [name for name, bug in BUGS.items() if not bug.can_be_switched] == []


@pytest.mark.parametrize("name", CASES)
def test_switches_alone_change_nothing(planted, name):
    assert failure_of(planted, CASES[name], 64, SEEDS[:1]) is None


@pytest.mark.parametrize("name", BUGS)
def test_bug_is_caught(planted, name):
    simulator.plant(list(BUGS).index(name) + 1)
    try:
        found = (failure_of(planted, case, 64, SEEDS[:1]) for case in CASES.values())
        assert any(found), "no case shows it: add one to selection_checks.py, or say in HARMLESS why it does no harm"
    finally:
        simulator.plant(0)
