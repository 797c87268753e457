"""The fuzzer of tests/gpu: what it draws, how it reduces a failure, and which errors its bounds let pass."""

from __future__ import annotations

import ast
import dataclasses
import json
import math
from pathlib import Path
from types import SimpleNamespace

import fuzz
import fuzz_checks
import fuzz_oracle
import pytest
import torch
from fuzz_cases import (
    EDGES,
    LATE,
    OPTION_WEIGHTS,
    WEIGHTS,
    Case,
    complete,
    draw_call,
    draw_case,
    fields_of_json,
    make_tensors,
    reductions,
    shrink,
)

from sage_aot._backends.emulation import attention as emulation
from sage_aot._backends.emulation import selection as choice
from sage_aot._backends.emulation.backend import EmulationBackend
from sage_aot._backends.emulation.backward import gradients
from sage_aot._backends.emulation.quantize import quantize
from sage_aot._call import forms, pipeline
from sage_aot._call import sparse as calls
from sage_aot._call.backends import default_library
from sage_aot._problem.check import check
from sage_aot._problem.given import Given
from sage_aot._problem.mask import Mask
from sage_aot._problem.options import OPTIONS
from sage_aot._problem.problem import heads_first
from sage_aot._problem.tensors import TENSORS
from sage_aot._tools.compare import Measure, against_emulation
from sage_aot.integrations import _serve

BUILT = {"sm80": {"qk": {"int4", "int8"}, "pv_accum": {"f32"}, "p": {"exp2"}},
         "sm89": {"qk": {"int4", "int8"}, "pv_accum": {"two_level_f32", "two_level_f16"}, "p": {"exp2"}},
         "sm90": {"qk": {"int8"}, "pv_accum": {"f32"}, "p": {"linear", "exp2"}}}

HARD = Case("sm89", 7, 2, 2, 2, 140, 129, 72, is_causal=True, scale=0.7, layout="NHD", qk="int8", smooth_q=True,
            smooth_v=True, dtype="f16", kind="outlier", strides="sliced", out="misaligned", stream="side")


def cases(count: int, seed: int = 0, longest: int = 4500) -> list[Case]:
    return [draw_call(seed, index, BUILT, longest) for index in range(count)]


@pytest.fixture
def subject() -> fuzz_checks.Subject:
    return fuzz_checks.Subject("cpu", [default_library().folder])


# --- cases ------------------------------------------------------------------------------------------------------------


def test_every_value_of_every_option_is_drawn():
    drawn = cases(3000)
    for name, weights in WEIGHTS.items():
        assert {getattr(case, name) for case in drawn} == {value for value, weight in weights.items() if weight}, name
    assert {case.arch for case in drawn} == set(BUILT)
    assert {1, 2, 63, 64, 65, 127, 128, 129, 255, 256} < {case.headdim for case in drawn}
    for length in ("seqlen_q", "seqlen_kv"):
        assert {0, *EDGES} < {getattr(case, length) for case in drawn}
        assert max(getattr(case, length) for case in drawn) > 3000


def test_every_optional_tensor_is_drawn():
    drawn = set()
    for case in cases(300, longest=130):
        inputs = fuzz_checks.Inputs.of(case, "cpu")
        tensors = {"key_mask": inputs.key_mask, **inputs.of_queries}
        drawn |= {name for name, tensor in tensors.items() if tensor is not None}
    assert TENSORS.keys() <= drawn


def test_most_choices_are_among_several_blocks():
    choosing = [case for case in cases(3000) if case.sparse != "none" and case.entry == "attn"]
    assert len(choosing) > 150
    assert sum(case.seqlen_kv >= 350 for case in choosing) > 0.7 * len(choosing)


def test_what_is_drawn_late_changes_nothing_else():
    for index in range(200):
        case, call = (draw(3, index, BUILT, 300) for draw in (draw_case, draw_call))
        assert all(getattr(case, name) == next(iter(WEIGHTS[name])) for name in LATE)
        assert (case.arch, case.seed, case.kind, case.is_causal) == (call.arch, call.seed, call.kind, call.is_causal)


def test_scores_are_as_large_as_a_case_says():
    for scores in filter(None, WEIGHTS["scores"]):
        case = Case("sm80", 3, 2, 2, 2, 40, 50, 64, scores=scores)
        q, k, _ = (x.double() for x in make_tensors(case, "cpu"))
        largest = (q @ k.repeat_interleave(2, 1).mT).abs().max() / 8
        assert largest == pytest.approx(scores, rel=0.05)


def test_most_calls_have_a_kernel():
    drawn = [draw_case(0, index, BUILT, 4500) for index in range(2000)]
    missing = [case for case in drawn for option, built in BUILT[case.arch].items()
               if getattr(case, option) not in ("auto", *built)]
    assert 0 < len(missing) < 40
    assert {name for name in ("qk", "pv_accum", "p") for case in missing
            if getattr(case, name) not in ("auto", *BUILT[case.arch][name])} == {"qk", "pv_accum", "p"}
    linear = [case for case in drawn if (case.arch, case.p) == ("sm90", "linear")]
    assert {case.return_lse for case in linear} == {True, False}
    assert sum(case.headdim > 128 for case in linear) < len(linear) / 10


def test_options_are_those_of_the_table():
    assert list(Case("sm80").arguments) == [*OPTIONS, "return_lse"]
    assert vars(HARD.options).items() <= HARD.arguments.items()
    for name, option in OPTIONS.items():
        assert tuple(WEIGHTS[name]) == option.samples and option.default in option.samples
    for name, weights in OPTION_WEIGHTS.items():
        assert tuple(WEIGHTS[name].values()) == weights, "a weight for every sample, and no more"
    assert OPTIONS.keys() < WEIGHTS["wrong"].keys()


def test_a_seed_always_draws_the_same():
    assert cases(50) == cases(50)
    assert not set(cases(50)) & set(cases(50, seed=1))
    torch.testing.assert_close(make_tensors(HARD, "cpu"), make_tensors(HARD, "cpu"), rtol=0, atol=0, equal_nan=True)


def test_a_case_is_a_line_of_json():
    for case in (Case("sm80"), HARD, *cases(300)):
        text = case.to_json()
        assert Case.from_json(text) == case and "\n" not in text
    assert Case("sm80").to_json() == '{"arch": "sm80"}'
    assert fields_of_json('{"window": [3, 0], "kind": "huge"}') == {"window": (3, 0), "kind": "huge"}


def test_lengths_are_bounded():
    assert all(max(case.seqlen_q, case.seqlen_kv) <= 70 for case in cases(300, longest=70))


@pytest.mark.parametrize("strides", WEIGHTS["strides"])
@pytest.mark.parametrize("layout", WEIGHTS["layout"])
def test_strides_are_what_they_are_called(layout, strides):
    case = dataclasses.replace(HARD, layout=layout, strides=strides, seqlen_q=129, group=1)
    q, k, v = make_tensors(case, "cpu")
    assert {heads_first(t, layout).shape for t in (q, k, v)} == {(2, 2, 129, 72)}
    assert all(t.stride(-1) == 1 and t.isfinite().all() for t in (q, k, v))
    assert q.is_contiguous() == (strides in ("contiguous", "expanded_heads", "expanded_batch"))
    assert (0 in k.stride()) == strides.startswith("expanded")
    if strides == "fused":
        assert q.untyped_storage().data_ptr() == v.untyped_storage().data_ptr()
    if strides == "misaligned":
        assert q.data_ptr() % 16
    if strides == "padded":
        assert all(step % 8 == 0 for step in q.stride()[:-1])


# --- reducing a failure -----------------------------------------------------------------------------------------------


def test_reductions_end():
    assert list(reductions(Case("sm89", 3))) == []
    assert shrink(HARD, lambda case: True) == Case("sm89", 7)
    assert shrink(HARD, lambda case: False) == HARD


def test_shrinking_keeps_remainders():
    minimal = shrink(HARD, lambda case: case.seqlen_kv % 64 == 1 and case.seqlen_kv > 1 and case.group == 2)
    assert minimal == Case("sm89", 7, group=2, seqlen_kv=65)


@pytest.fixture
def defect(monkeypatch):
    """A backend that is wrong only for causal calls whose last tile, not the first, holds one key."""
    class Defective(EmulationBackend):
        def bind(self, plan, given, out):
            right, problem = super().bind(plan, given, out), plan.problem

            def wrong(given, out, lse):
                right(given, out, lse)
                if problem.options.is_causal and problem.seqlen_kv % 64 == 1 and problem.seqlen_kv > 1:
                    heads_first(out, problem.options.layout)[:, :, -1] += 100.0

            return wrong

    monkeypatch.setattr(fuzz_checks, "EmulationBackend", Defective)


def test_a_planted_defect_is_found_and_reduced(defect, capsys, tmp_path):
    log = tmp_path / "fuzz.log"
    fixed = json.dumps({"planted": "none", "seqlen_kv": 129, "wrong": "nothing", "headdim": 64, "lengths": "one"})
    assert fuzz.main(["--device", "cpu", "--calls", "4", "--longest", "130", "--fixed", fixed, "--log", str(log)]) == 1
    text = capsys.readouterr().out
    assert text == log.read_text() and "FAILED output, float64\n" in text
    again = next(line for line in text.splitlines() if "again:" in line)
    case = Case.from_json(again.split("--case ")[1].strip("'"))
    assert case == Case(case.arch, case.seed, is_causal=True, seqlen_kv=65)
    assert fuzz.main(["--device", "cpu", "--case", case.to_json()]) == 1
    assert fuzz.main(["--device", "cpu", "--case", dataclasses.replace(case, seqlen_kv=64).to_json()]) == 0


@pytest.mark.kernels("sm80", "sm89", "sm90")
def test_what_is_raised_is_a_failure(subject):
    class Raising(EmulationBackend):
        def bind(self, plan, given, out):
            return lambda *arguments: 1 / 0

    backend = Raising(default_library().manifest, "sm80")
    verdict = subject.examine(Case("sm80"), backend)
    assert verdict.failure == ("raised", "ZeroDivisionError: division by zero")
    assert subject.examine(Case("sm80", wrong="dtype"), backend).failure is None
    assert subject.examine(Case("sm80")).failure is None


# --- checks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("planted", WEIGHTS["planted"])
def test_a_short_run_passes(planted, capsys):
    fixed = json.dumps({"planted": planted, "scores": None, "values": "drawn"})
    assert fuzz.main(["--device", "cpu", "--calls", "30", "--longest", "150", "--fixed", fixed]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("30 of 30 calls")


def passes(**fixed):
    return fuzz.main(["--device", "cpu", "--calls", "6", "--longest", "80", "--fixed", json.dumps(fixed)]) == 0


@pytest.mark.parametrize("scores", [1e-6, 1e2, 1e6, 1e10])
def test_scores_of_any_size_pass(scores):
    assert passes(scores=scores, values="drawn", lengths="one", wrong="nothing")


@pytest.mark.kernels("sm80", "sm89")
@pytest.mark.parametrize("arch", ["sm80", "sm89"])
def test_values_of_ones_pass(arch):
    assert passes(arch=arch, values="ones", scores=None, kind="normal", qk="auto", pv_accum="auto", seqlen_kv=5)


@pytest.mark.kernels("sm120")
@pytest.mark.parametrize("smooth_v", [False, True])
def test_values_of_ones_pass_in_nvfp4(smooth_v):
    assert passes(arch="sm120", values="ones", scores=None, kind="normal", qk="nvfp4", smooth_q="auto", pv_accum="auto",
                  smooth_v=smooth_v, seqlen_kv=5, headdim=64, entry="attn", wrong="nothing", dtype="f32")


@pytest.mark.kernels("sm80", "sm89", "sm90")
def test_bad_arguments_must_be_refused(subject):
    for wrong in WEIGHTS["wrong"]:
        verdict = subject.examine(Case("sm80", wrong=wrong))
        assert verdict.failure is None and (wrong == "nothing" or verdict.variant == "ArgumentError")
    for lengths in WEIGHTS["lengths"]:
        assert subject.examine(Case("sm90", qk="int4", lengths=lengths)).variant == "UnsupportedError"
    assert subject.examine(Case("sm80", pv_accum="two_level_f16")).variant == "UnsupportedError"
    assert subject.examine(Case("sm89", pv_accum="two_level_f16")).variant == "attn"


def emulated_as_kernel(subject, case, change):
    """The worst excess of a call whose kernel is the emulation on quantized tensors that `change` altered."""
    tensors = make_tensors(case, "cpu")
    plan = pipeline.plan_of(subject.backend(case), check(Given("dense", *tensors), case.options), -1)
    q, k, v = (heads_first(tensor, case.layout) for tensor in tensors)
    quantized = quantize(plan.problem, plan.kernels, q, k, v)
    out, lse = emulation.attend(plan, change(quantized))
    out, lse = out[:, :, : case.seqlen_q, : case.headdim].to(q.dtype), lse[:, :, : case.seqlen_q]
    return max(fuzz_checks._worst(against_emulation(plan, quantized, out, lse)).values())


def scaled(name, group, factor):
    """A change that multiplies one scale of the last head by `factor`."""
    def change(quantized):
        scale = getattr(quantized, name).clone()
        scale[-1, -1, group] *= factor
        return dataclasses.replace(quantized, **{name: scale})
    return change


def unchanged(quantized):
    return quantized


@pytest.mark.parametrize("excesses", [(0.5, math.nan, 0.75), (math.nan, 2.0), (0.0, math.nan)])
def test_the_worst_of_several_entries_keeps_nan(excesses):
    nan, largest = (fuzz_checks._worst([Measure("output", torch.tensor([x]), torch.zeros(1), torch.zeros(1))
                                        for x in found])["output"]
                    for found in (excesses, [x for x in excesses if x == x]))
    assert math.isnan(nan) and largest == max(x for x in excesses if x == x)


def without_delta_s_of_a_tile(quantized):
    delta_s = quantized.delta_s.clone()
    delta_s[-1, -1, :, 64:128] = 0.0
    return dataclasses.replace(quantized, delta_s=delta_s)


@pytest.mark.kernels("sm80")
@pytest.mark.parametrize("smooth_q", [False, True])
@pytest.mark.parametrize("kind", ["normal", "outlier"])
@pytest.mark.parametrize(("arch", "pv_accum"), [("sm80", "f32"), ("sm89", "two_level_f32"), ("sm89", "two_level_f16")])
def test_bounds_let_pass_another_rounding_and_no_wrong_scale(subject, monkeypatch, arch, pv_accum, kind, smooth_q):
    case = Case(arch, 5, 1, 2, 2, 100, 200, 64, kind=kind, smooth_q=smooth_q, pv_accum=pv_accum)
    exp2 = torch.exp2
    with monkeypatch.context() as patch:
        patch.setattr(torch, "exp2", lambda x: exp2(x) * (1 + 2.0**-22))
        patch.setattr(emulation, "pv_tile", lambda p, v, pv_accum: p @ v)  # no accumulator cuts or rounds
        assert emulated_as_kernel(subject, case, unchanged) < 1
    rows, keys = torch.arange(100), torch.arange(200)
    one_group_of_rows = rows[(rows // 32 == 1) & (rows % 8 == 3)]
    one_group_of_keys = keys[(keys // 64 == 1) & (keys % 8 // 2 == 3)]
    assert emulated_as_kernel(subject, case, scaled("q_scale", one_group_of_rows, 1.05)) > 1
    assert emulated_as_kernel(subject, case, scaled("k_scale", one_group_of_keys, 0.95)) > 1
    assert emulated_as_kernel(subject, case, scaled("v_scale", 0, 1.05)) > 1
    if smooth_q:
        assert emulated_as_kernel(subject, case, without_delta_s_of_a_tile) > 1


# --- planted bugs: of the product's Python, which the emulation and the kernels share ---------------------------------


class Defective(EmulationBackend):
    """A backend whose calls, less the output, get what `change` makes of their arguments by name, and whose results
    `spoil` alters."""

    def __init__(self, arch, change=None, spoil=None):
        super().__init__(default_library().manifest, arch)
        self.change, self.spoil = change, spoil

    def bind(self, plan, given, out):
        right = super().bind(plan, given, out)

        def wrong(given, out, lse):
            given = given._replace(**self.change(given) if self.change else {})
            right(given, out, lse)
            if self.spoil:
                self.spoil(right, given, out, lse)

        return wrong


def plain_strides(x):
    """The memory behind a tensor, read as if that were contiguous."""
    return x.as_strided(x.shape, torch.empty(x.shape).stride(), x.storage_offset())


def next_key_in_one_head(right, given, out, lse):
    """The causal mask of the third head is off by one."""
    off = torch.empty_like(out)
    right_mask = Mask.visible_keys
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Mask, "visible_keys", lambda mask, rows, queries, keys: right_mask(mask, rows, queries - 1, keys))
        right(given, off, None)
    out[:, 2] = off[:, 2]


def natural_and_binary(right, given, out, lse):
    lse[:, 1] /= math.log(2.0)


def one_row_of_zeros(right, given, out, lse):
    out[:, :, 0] = 0.0


def shifted(name, step, dim):
    return lambda given: {name: getattr(given, name).roll(step, dim)}


def neighbours_key(given):
    begins = given.cu_seqlens_k.clone()
    begins[1:-1] += 1
    return {"cu_seqlens_k": begins}


GROUPED = Case("sm89", 3, 2, 2, 2, 70, 90, 64)
SERVED_BUGS = {
    "causal mask off by one in one head": (
        dataclasses.replace(GROUPED, is_causal=True), {"spoil": next_key_in_one_head}),
    "kv heads of another group": (GROUPED, {"change": shifted("k", 1, 1)}),
    "v heads of another group, many keys": (
        dataclasses.replace(GROUPED, seqlen_kv=1100, seqlen_q=20), {"change": shifted("v", 1, 1)}),
    "another batch entry's v": (GROUPED, {"change": shifted("v", 1, 0)}),
    "strides of k ignored": (
        dataclasses.replace(GROUPED, strides="transposed"), {"change": lambda given: {"k": plain_strides(given.k)}}),
    "strides of q ignored": (
        dataclasses.replace(GROUPED, strides="sliced"), {"change": lambda given: {"q": plain_strides(given.q)}}),
    "lse of one head in another base": (GROUPED, {"spoil": natural_and_binary}),
    "lse off by 0.1": (GROUPED, {"spoil": lambda right, given, out, lse: lse.add_(0.1)}),
    "one more key masked out": (
        dataclasses.replace(GROUPED, mask_kind="few", seqlen_kv=226), {"change": shifted("key_mask", 1, 1)}),
    "a sequence sees its neighbour's key": (
        dataclasses.replace(GROUPED, lengths="mixed", seed=11, batch=4), {"change": neighbours_key}),
    "rows of zeros for large scores": (
        dataclasses.replace(GROUPED, scores=1e4), {"spoil": one_row_of_zeros}),
    "scores twice as large": (
        dataclasses.replace(GROUPED, scores=1.0), {"change": lambda given: {"q": given.q * 2}}),
    "one key, rows of which are not its v": (
        dataclasses.replace(GROUPED, seqlen_kv=1), {"spoil": lambda right, given, out, lse: out.mul_(1.3)}),
    "NaN where nothing is spoilt": (GROUPED, {"spoil": lambda right, given, out, lse: out[1, 1, 5].fill_(math.nan)}),
    "NaN that is lost": (
        dataclasses.replace(GROUPED, planted="v:nan"), {"spoil": lambda right, given, out, lse: out.nan_to_num_()}),
    "a channel that is not written": (GROUPED, {"spoil": lambda right, given, out, lse: out[..., 63].zero_()}),
    "an input that changes": (GROUPED, {"spoil": lambda right, given, out, lse: given.k.add_(1.0)}),
    "the causal mask of sdpa": (
        dataclasses.replace(GROUPED, is_causal=True, entry="sdpa"), {"change": shifted("v", 1, 2)}),
    "v of sdpa with another group's heads": (
        dataclasses.replace(GROUPED, entry="sdpa"), {"change": shifted("v", 1, 1)}),
}


@pytest.mark.kernels("sm89")
@pytest.mark.parametrize("bug", SERVED_BUGS)
def test_planted_bugs_of_a_backend_are_caught(subject, bug):
    case, defect = SERVED_BUGS[bug]
    case = complete(case)
    assert subject.examine(case).failure is None
    assert subject.examine(case, Defective(case.arch, **defect)).failure is not None


DECODING = dataclasses.replace(GROUPED, seqlen_q=1, group=4)


def regroup_otherwise(patch):
    """Heads of a group as rows of one head, but heads h, h + kv heads, ... of q."""
    right = forms._by_group

    def wrong(of_heads, kv_heads, layout):
        rows = right(of_heads, kv_heads, layout)
        order = torch.arange(rows.shape[1] * rows.shape[2]).view(rows.shape[2], rows.shape[1]).T.reshape(-1)
        return rows.flatten(1, 2)[:, order].view(rows.shape)

    patch.setattr(forms, "_by_group", wrong)


def regroup_causal_rows(patch):
    """Heads of a group as rows of one head under a causal mask too, which then tells them apart."""
    patch.setattr(forms, "rows_see_alike", lambda asked: True)


def bottom_right_sdpa(patch):
    serve = _serve.serve
    patch.setattr(_serve, "serve", lambda call, *others: serve(call._replace(bottom_right=True), *others))


def sdpa_without_its_mask(patch):
    serve = _serve.serve
    patch.setattr(_serve, "serve", lambda call, *others: serve(call._replace(mask=None), *others))


def sdpa_that_serves_nothing(patch):
    patch.setattr(_serve, "why_not_computed", lambda call, options: "no reason")


def supports_nothing(patch):
    patch.setattr("sage_aot.supports", lambda *arguments, **options: "no reason")


def supports_everything(patch):
    patch.setattr("sage_aot.supports", lambda *arguments, **options: None)


CHOOSING = Case("sm89", 4, 2, 2, 2, 300, 500, 64)
"""A case whose choice leaves blocks out by each rule; everything else of it follows from the seed."""


def choice_of_one_more(patch):
    by_keep = choice._BY["keep"]
    patch.setitem(choice._BY, "keep", lambda choosing, scores, visible, kept, free, amount: by_keep(
        choosing, scores, visible, kept, free, amount + 1.0 / visible.shape[-1]))


def choice_of_the_worst(patch):
    scores = choice._scores
    patch.setattr(choice, "_scores", lambda *arguments: -scores(*arguments))


def choice_of_the_future(patch):
    patch.setattr(choice, "_visible", lambda choosing: torch.ones(choosing.q.blocks, choosing.k.blocks).bool())


def choice_without_what_is_kept(patch):
    patch.setattr(choice, "_kept", lambda choosing: torch.zeros(choosing.q.blocks, choosing.k.blocks).bool())


def choice_that_a_call_does_not_take(patch):
    attend = calls._attend
    patch.setattr(calls, "_attend", lambda q, k, v, asked, optional, *others: attend(
        q, k, v, asked, optional | {"block_mask": None}, *others))


def tail_that_counts_once(patch):
    patch.setattr(calls, "math", SimpleNamespace(log=lambda keys: 0.0))


def tail_of_all_blocks(patch):
    tail_of = calls._tail_of
    patch.setattr(calls, "_tail_of", lambda *arguments: torch.ones_like(tail_of(*arguments)))


def tail_of_other_values(patch):
    over_means = calls._over_means
    patch.setattr(calls, "_over_means", lambda q, means, *others: over_means(q, (means[0], means[1].roll(1, 2)),
                                                                             *others))


CALL_BUGS = {
    "one block more than is chosen": (dataclasses.replace(CHOOSING, sparse="keep"), choice_of_one_more),
    "the worst blocks instead of the best": (dataclasses.replace(CHOOSING, sparse="tau"), choice_of_the_worst),
    "the worst blocks by their mass": (dataclasses.replace(CHOOSING, sparse="mass"), choice_of_the_worst),
    "blocks behind the queries": (
        dataclasses.replace(CHOOSING, sparse="keep", is_causal=True), choice_of_the_future),
    "blocks that are chosen in any case": (dataclasses.replace(CHOOSING, sparse="keep"), choice_without_what_is_kept),
    "all blocks instead of those chosen": (
        dataclasses.replace(CHOOSING, sparse="keep"), choice_that_a_call_does_not_take),
    "a tail whose blocks count as one key": (dataclasses.replace(CHOOSING, sparse="tail"), tail_that_counts_once),
    "a tail of the blocks that are chosen": (dataclasses.replace(CHOOSING, sparse="tail"), tail_of_all_blocks),
    "a tail of other blocks' values": (
        dataclasses.replace(CHOOSING, sparse="tail", kind="biased_v"), tail_of_other_values),
    "heads of a group regrouped otherwise": (DECODING, regroup_otherwise),
    "rows of a group under a causal mask": (
        dataclasses.replace(DECODING, is_causal=True, seqlen_kv=9), regroup_causal_rows),
    "sdpa aligned bottom-right": (dataclasses.replace(GROUPED, entry="sdpa", is_causal=True), bottom_right_sdpa),
    "sdpa without its mask": (dataclasses.replace(GROUPED, entry="sdpa", mask_kind="left"), sdpa_without_its_mask),
    "sdpa that serves nothing": (dataclasses.replace(GROUPED, entry="sdpa"), sdpa_that_serves_nothing),
    "supports() of a call that is taken": (GROUPED, supports_nothing),
    "supports() of a call that is refused": (dataclasses.replace(GROUPED, wrong="keys"), supports_everything),
    "supports() of a kernel that is missing": (
        dataclasses.replace(GROUPED, arch="sm80", pv_accum="two_level_f16"), supports_everything),
}


@pytest.mark.kernels("sm80", "sm89")
@pytest.mark.parametrize("bug", CALL_BUGS)
def test_planted_bugs_of_a_call_are_caught(subject, monkeypatch, bug):
    case, plant = CALL_BUGS[bug]
    case = complete(case)
    assert subject.examine(case).failure is None
    plant(monkeypatch)
    assert subject.examine(case).failure is not None


TRAINED = complete(dataclasses.replace(GROUPED, seqlen_q=130, seqlen_kv=140, group=3, entry="train_attn"))
GRADIENT_BUGS = {
    "dK of one head of a group": lambda dq, dk, dv: (dq, dk - dk.roll(1, 1), dv),
    "dV of another kv head": lambda dq, dk, dv: (dq, dk, dv.roll(1, 1)),
    "dQ without the scale, in one head": lambda dq, dk, dv: (torch.cat([dq[:, :-1], dq[:, -1:] * 8], 1), dk, dv),
    "dK of the opposite sign": lambda dq, dk, dv: (dq, -dk, dv),
    "dV off by a tenth": lambda dq, dk, dv: (dq, dk, dv * 1.1),
    "dQ of the next row": lambda dq, dk, dv: (dq.roll(1, 2), dk, dv),
    "dQ of zeros": lambda dq, dk, dv: (dq * 0.0, dk, dv),
}


@pytest.mark.kernels("sm89")
@pytest.mark.parametrize("bug", GRADIENT_BUGS)
def test_planted_bugs_of_gradients_are_caught(subject, monkeypatch, bug):
    assert subject.examine(TRAINED).failure is None
    monkeypatch.setattr("sage_aot._backends.emulation.backend.gradients",
                        lambda *arguments: GRADIENT_BUGS[bug](*gradients(*arguments)))
    assert subject.examine(TRAINED).failure is not None


@pytest.mark.kernels("sm80")
def test_a_mean_of_ones_must_be_one(subject):
    case = Case("sm80", 3, 2, 2, 2, 70, 90, 64, values="ones", dtype="f32")
    assert subject.examine(case).failure is None
    planted = Defective("sm80", spoil=lambda right, given, out, lse: out.mul_(1.003))
    assert subject.examine(case, planted).worst["a mean of one value"] > 1


def test_a_mean_of_ones_is_one_but_for_nvfp4_without_smoothing():
    plain = fuzz_checks.arithmetic_of(Case("sm80"))
    loose = [(pv, smooth_v) for pv in ("f16", "e4m3", "nvfp4") for smooth_v in (False, True)
             if dataclasses.replace(plain, pv=pv, smooth_v=smooth_v).of_equal_values > 0.002]
    assert loose == [("nvfp4", False)]


def test_a_linear_p_keeps_the_oracles_bounds_and_comes_near_them():
    """A factor that all P have in common is left out. P is by the byte, as docs/math.md has it."""
    linear = dataclasses.replace(fuzz_checks.arithmetic_of(Case("sm90")), linear_p=True)
    x = torch.arange(-20.0, math.log2(448.0), 2.0**-12, dtype=torch.float64)
    byte = (8 * (x + 7) - 0.45884).clamp(min=0).round().clamp(max=126)
    exponent, mantissa = (byte // 8).long(), byte % 8
    p = torch.where(exponent > 0, torch.ldexp(8 + mantissa, exponent - 10), mantissa * 2.0**-9)
    ratio = (p / x.exp2())[exponent > 0]
    common = (ratio.max() + ratio.min()) / 2
    error, exact = (p - common * x.exp2()).abs(), common * x.exp2()
    assert (error <= linear.of_p * exact + 56 * linear.lost_of_p).all()
    assert (error / exact)[exponent > 0].max() > 0.99 * linear.of_p
    assert error[byte == 0].max() > 0.98 * 56 * linear.lost_of_p


@pytest.mark.parametrize("sink", [6.0, 8.0])
def test_an_error_of_the_log_sum_exp_changes_the_share_of_a_sink_within_bounds(sink):
    """The log-sum-exp of 400 keys, whose scores are near zero, is 6. P in f16 adds next to nothing of its own."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, rows, 64, generator=generator) for rows in (50, 400, 400))
    visible = fuzz_oracle.visible_keys(50, 400, is_causal=False)
    expected = fuzz_oracle.expect(q, k, v + 1.0, scale=1e-3, visible=visible, sinks=torch.tensor([sink]),
                                  arithmetic=fuzz_checks.arithmetic_of(Case("sm80")))
    of_sink = (sink - expected.lse).exp()
    for factor in (0.9905, 1.0095):  # of the keys' weights before the softmax
        off = expected.out.abs() * (factor / (1 + (1 - of_sink) * (factor - 1)) - 1).abs()[..., None]
        assert (off <= expected.bound).all()
        assert ((off / expected.units).norm(dim=-1) <= expected.row_bound).all()


def test_a_tail_with_all_of_the_weight_has_finite_bounds():
    """A tail's share is a sum of weights, which may exceed one by its rounding."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, rows, 64, generator=generator) for rows in (40, 700, 700))
    q[..., 0], k[:, :, :64, 0] = 8.0, -200.0
    visible = fuzz_oracle.visible_keys(40, 700, is_causal=False)
    chosen = (torch.arange(700) < 64).expand(visible.shape)
    k, v, visible, counts = fuzz_oracle.Tail.of(k, v, visible, chosen, 64)
    expected = fuzz_oracle.expect(q, k, v, scale=None, visible=visible, counts=counts,
                                  arithmetic=fuzz_checks.arithmetic_of(Case("sm80", sparse="tail")))
    assert expected.bound.isfinite().all() and expected.row_bound.isfinite().all()


def test_the_oracle_knows_nothing_of_the_product():
    source = Path(fuzz_oracle.__file__).read_text()
    imported = {name.split(".")[0] for node in ast.walk(ast.parse(source))
                for name in ([alias.name for alias in node.names] if isinstance(node, ast.Import)
                             else [node.module] if isinstance(node, ast.ImportFrom) else [])}
    assert imported == {"__future__", "dataclasses", "math", "torch", "typing"}
