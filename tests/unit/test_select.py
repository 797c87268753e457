"""Which kernels a problem gets on which GPU."""

from __future__ import annotations

import dataclasses
from itertools import product

import pytest
from records import manifest_of, record_of

from sage_aot._manifest import Manifest
from sage_aot._problem import Problem
from sage_aot._select import built_archs, nearest_arch, select
from sage_aot._spec import KernelSpec
from sage_aot.errors import CubinError, UnsupportedError

F16 = [("f16", "f32")]
PV = {"sm80": F16, "sm86": F16, "sm89": [("e4m3", "two_level_f16"), ("e4m3", "two_level_f32")], "sm90": F16}
"""Per arch, the types of P and V that are built, with their accumulators."""
PROBLEM = Problem(batch=1, num_q_heads=2, num_kv_heads=2, seqlen_q=64, seqlen_kv=64, headdim=128, dtype="bf16",
                  is_causal=False, softmax_scale=1.0, qk_bits=8, smooth_q=False, smooth_k=True,
                  smooth_v=False, pv_accum="auto")


def manifest(archs=PV, without=()) -> Manifest:
    attn = [KernelSpec("attn", arch, headdim, bits, *pv, mask, v, q)
            for arch, headdim, bits, mask, v, q in product(archs, (64, 128), (8, 4), ("full", "causal"),
                                                           ("vraw", "vsmooth"), ("qraw", "qsmooth"))
            if arch != "sm90" or bits == 8
            for pv in PV[arch]]
    specs = {spec for a in attn for spec in (a, *a.companions)}
    return manifest_of(record_of(spec) for spec in specs if spec.name not in without)


@pytest.mark.parametrize(("capability", "arch"), [
    ((8, 0), "sm80"), ((8, 6), "sm86"), ((8, 7), "sm86"), ((8, 9), "sm89"), ((9, 0), "sm90"),
])
def test_arch_is_exact_or_the_nearest_lower_minor(capability, arch):
    assert nearest_arch(capability, manifest()) == arch


@pytest.mark.parametrize("capability", [(7, 5), (10, 0), (12, 0)])
def test_other_majors_are_refused_by_name(capability):
    message = rf"compute capability {capability[0]}\.{capability[1]}; kernels are built for sm80, sm86, sm89, sm90"
    with pytest.raises(UnsupportedError, match=message):
        nearest_arch(capability, manifest())


def test_a_lower_gpu_than_any_built_is_refused():
    with pytest.raises(UnsupportedError, match="built for sm86"):
        nearest_arch((8, 0), manifest(archs=["sm86"]))


def test_archs_are_ordered_by_capability():
    several = {**manifest().kernels}
    spec = KernelSpec("attn", "sm120", 64, 8, "e4m3", "two_level_f32", "full", "vraw", "qraw")
    several[spec.name] = record_of(spec)
    assert built_archs(dataclasses.replace(manifest(), kernels=several))[-1] == "sm120"


@pytest.mark.parametrize(("headdim", "kernel"), [(1, 64), (64, 64), (65, 128), (96, 128), (128, 128)])
def test_head_dim_is_the_least_that_holds_the_problem(headdim, kernel):
    chosen = select((8, 9), dataclasses.replace(PROBLEM, headdim=headdim), manifest())
    assert chosen.attn.spec == KernelSpec("attn", "sm89", kernel, 8, "e4m3", "two_level_f32", "full", "vraw", "qraw")
    assert chosen.quant.spec == chosen.attn.spec.companion("quant")
    assert chosen.stats.spec == chosen.attn.spec.companion("stats")


@pytest.mark.parametrize(("changes", "axes"), [
    ({"is_causal": True}, {"mask": "causal"}),
    ({"qk_bits": 4}, {"qk": 4}),
    ({"smooth_q": True}, {"q": "qsmooth"}),
    ({"smooth_v": True}, {"v": "vsmooth"}),
    ({"smooth_k": False}, {}),
    ({"qk_bits": 4, "smooth_q": True, "smooth_v": True}, {"qk": 4, "q": "qsmooth", "v": "vsmooth"}),
])
def test_axes_are_those_of_the_problem(changes, axes):
    plain = KernelSpec("attn", "sm80", 128, 8, "f16", "f32", "full", "vraw", "qraw")
    chosen = select((8, 0), dataclasses.replace(PROBLEM, **changes), manifest())
    assert chosen.attn.spec == dataclasses.replace(plain, **axes)
    assert chosen.quant.spec.qk == chosen.attn.spec.qk


@pytest.mark.parametrize(("capability", "asked", "accumulator"), [
    ((8, 0), "auto", "f32"), ((8, 6), "auto", "f32"), ((8, 9), "auto", "two_level_f32"), ((9, 0), "auto", "f32"),
    ((8, 0), "f32", "f32"), ((8, 9), "two_level_f32", "two_level_f32"), ((8, 9), "two_level_f16", "two_level_f16"),
])
def test_the_accumulator_is_the_one_asked_for_or_the_archs_first(capability, asked, accumulator):
    chosen = select(capability, dataclasses.replace(PROBLEM, pv_accum=asked), manifest())
    assert chosen.attn.spec.pv_accum == accumulator
    assert chosen.quant.spec == chosen.attn.spec.companion("quant")


def test_the_order_of_the_manifest_does_not_choose_the_accumulator():
    backwards = dict(reversed(manifest().kernels.items()))
    chosen = select((8, 9), PROBLEM, dataclasses.replace(manifest(), kernels=backwards))
    assert chosen.attn.spec == select((8, 9), PROBLEM, manifest()).attn.spec


@pytest.mark.parametrize(("capability", "arch", "asked", "instead"), [
    ((8, 0), "sm80", "two_level_f16", "f32"), ((9, 0), "sm90", "two_level_f32", "f32"),
    ((8, 9), "sm89", "f32", "two_level_f32"),
])
def test_accumulators_that_an_arch_lacks_are_refused(capability, arch, asked, instead):
    message = f"no kernel for {arch}, head dim 128, .*pv_accum='{asked}'; use pv_accum='{instead}'\\. This folder holds"
    with pytest.raises(UnsupportedError, match=message):
        select(capability, dataclasses.replace(PROBLEM, pv_accum=asked), manifest())


def test_the_delta_kernel_is_chosen_only_where_q_is_smoothed():
    assert select((8, 0), PROBLEM, manifest()).delta is None
    assert select((8, 0), PROBLEM, manifest(without=["sage_delta_sm80_d128"])).delta is None
    smoothed = select((8, 0), dataclasses.replace(PROBLEM, smooth_q=True), manifest())
    assert smoothed.delta.spec.name == "sage_delta_sm80_d128"


@pytest.mark.parametrize("changes", [{}, {"smooth_q": True}, {"smooth_v": True, "is_causal": True}])
def test_bits_that_an_arch_lacks_are_refused_in_the_words_of_the_call(changes):
    message = "no kernel for sm90, head dim 128, qk_bits=4, is_causal=.*; use qk_bits=8\\. This folder holds what was"
    with pytest.raises(UnsupportedError, match=message):
        select((9, 0), dataclasses.replace(PROBLEM, qk_bits=4, **changes), manifest())


@pytest.mark.parametrize(("left", "changes"), [("d64", {"headdim": 65}), ("causal", {}), ("d64", {"qk_bits": 4})])
def test_a_narrowed_build_says_so(left, changes):
    """No other head dim or mask is proposed: that would be another problem."""
    kernels = {name: record for name, record in manifest().kernels.items() if f"_{left}_" in name}
    with pytest.raises(UnsupportedError, match="nor with any other options. This folder holds what was built"):
        select((8, 9), dataclasses.replace(PROBLEM, **changes), dataclasses.replace(manifest(), kernels=kernels))


@pytest.mark.parametrize("kind", ["quant", "stats", "delta"])
def test_a_missing_companion_is_an_incomplete_folder(kind):
    name = KernelSpec("attn", "sm90", 128, 8, "f16", "f32", "full", "vraw", "qsmooth").companion(kind).name
    with pytest.raises(CubinError, match=f"but not {name}"):
        select((9, 0), dataclasses.replace(PROBLEM, smooth_q=True), manifest(without=[name]))
