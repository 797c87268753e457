"""Kernel names, and the rules that tile sizes keep."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from sage_aot._families import FAMILIES
from sage_aot._kernels.axes import AXES, least_headdim
from sage_aot._kernels.spec import (
    KINDS,
    AttnSpec,
    capability_of,
    is_ptx,
    spec_of,
    statistics_entry,
    target_of,
)
from sage_aot._kernels.tile import Tile

ATTN = AttnSpec("sm89", 128, "int8", "e4m3", "two_level_f32", "exp2", "causal", "vraw", "qraw")
TILES = {"mma": Tile(block_m=128, block_n=64, warp_m=32, stages=2, min_blocks=2),
         "wgmma": Tile(block_m=128, block_n=128, warp_m=16, stages=4, min_blocks=1)}


def every_spec():
    values = {**AXES, "arch": ("sm80", "sm90", "sm120", "ptx80")}
    for kind in KINDS.values():
        for combination in itertools.product(*(values[axis] for axis in kind.axes())):
            yield kind(*combination)


def test_names_round_trip_and_are_unique():
    specs = list(every_spec())
    assert [spec_of(spec.name) for spec in specs] == specs
    assert len({spec.name for spec in specs}) == len(specs)
    assert {type(spec) for spec in specs} == set(KINDS.values())


def test_name_spells_every_axis_in_order():
    assert ATTN.name == "sage_attn_sm89_d128_qkint8_pve4m3_acc2f32_causal_vraw_qraw"


@pytest.mark.parametrize(("name", "message"), [
    ("", "expected a name such as"),
    ("sage_attn_sm89_d128_qkint8_pve4m3_acc2f32_causal_vraw", "expected a name such as"),
    ("sage_quant_sm89_d128_qkint8_pve4m3_vraw", "expected a name such as"),
    ("sage_attn_sm89_d128_qkint8_pve4m3_acc2f32_causal_vraw_vsmooth",
     r"\['qraw', 'qsmooth'\] for the axis 'q', got 'vsmooth'"),
    ("sage_attn_sm89_d128_qkint8_pve4m3_causal_vraw_qraw", "expected a name such as"),
    ("sage_attn_sm89_d128_qkint8_pve4m3_acctwo_causal_vraw_qraw",
     r"expected one of \['acc2f16', 'acc2f32', 'accf32'\] for the axis 'pv_accum', got 'acctwo'"),
    ("sage_attn_sm89_d128", "expected a name such as"),
    ("sage_mean_sm89_d128", "expected a name such as"),
    ("sage_attn_sm89_d128_qk8_pve4m3_acc2f32_causal_vraw_qraw",
     r"expected one of \['qkint4', 'qkint8', 'qknvfp4'\] for the axis 'qk', got 'qk8'"),
    ("sage_attn_sm89_d128_qkint8_pve4m3_acc2f32_causal_vraw_qraw_more",
     r"expected one of \['plinear'\] for the axis 'p', got 'causal'"),
    ("sage_attn_sm89_d128_qkint8_pve4m3_acc2f32_pexp2_causal_vraw_qraw",
     r"expected one of \['plinear'\] for the axis 'p', got 'pexp2'"),
    ("sage_attn_sm89_d128_qkint8_pve4m3_acc2f32_plinear_causal_vraw_qraw_more", "expected a name such as"),
    ("sage_attn_ada_d128_qkint8_pve4m3_acc2f32_causal_vraw_qraw", "expected an arch such as 'sm89', got 'ada'"),
    ("sage_attn_sm89_d96_qkint8_pve4m3_acc2f32_causal_vraw_qraw",
     r"expected one of \['d128', 'd256', 'd64'\] for the axis 'headdim', got 'd96'"),
])
def test_bad_names_are_refused(name, message):
    with pytest.raises(ValueError, match=message):
        spec_of(name)


@pytest.mark.parametrize(("pv", "accumulator", "spelt"), [
    ("f16", "f32", "pvf16_accf32"), ("e4m3", "two_level_f32", "pve4m3_acc2f32"),
    ("e4m3", "two_level_f16", "pve4m3_acc2f16"),
])
def test_names_of_the_accumulators(pv, accumulator, spelt):
    spec = dataclasses.replace(ATTN, pv=pv, pv_accum=accumulator)
    assert spec.name == f"sage_attn_sm89_d128_qkint8_{spelt}_causal_vraw_qraw"
    assert spec_of(spec.name) == spec
    assert spec.companion("quant") == dataclasses.replace(ATTN, pv=pv).companion("quant")  # quantizers take either


def test_exponentials_are_no_part_of_a_name():
    linear = dataclasses.replace(ATTN, p="linear")
    assert linear.name == "sage_attn_sm89_d128_qkint8_pve4m3_acc2f32_plinear_causal_vraw_qraw"
    assert ATTN.name == "sage_attn_sm89_d128_qkint8_pve4m3_acc2f32_causal_vraw_qraw"
    assert [spec_of(spec.name) for spec in (ATTN, linear)] == [ATTN, linear]
    for kind in ("pack", "quant", "delta", "merge"):
        assert linear.companion(kind) == ATTN.companion(kind)


@pytest.mark.parametrize(("changes", "trains"), [
    ({}, True), ({"headdim": 64}, True), ({"headdim": 256}, False), ({"qk": "int4"}, False), ({"v": "vsmooth"}, False),
    ({"q": "qsmooth"}, False), ({"p": "linear"}, False), ({"pv": "f16", "pv_accum": "f32", "mask": "full"}, True)])
def test_kernels_that_have_a_backward_pass(changes, trains):
    assert dataclasses.replace(ATTN, **changes).trains == trains


def test_companions_share_axes():
    assert ATTN.companion("quant").name == "sage_quant_sm89_d128_qkint8_pve4m3"
    assert ATTN.companion("delta").name == "sage_delta_sm89_d128"
    with pytest.raises(ValueError, match="does not determine"):
        ATTN.companion("delta").companion("attn")


def test_quantizers_have_an_entry_point_for_each_kind_of_rows():
    for spec in (ATTN, ATTN.companion("pack"), ATTN.companion("merge")):
        assert spec.entries == (spec.name,)
    delta, quant = ATTN.companion("delta"), ATTN.companion("quant")
    assert delta.entries == tuple(f"{delta.name}_{rows}" for rows in ("bf16", "f16", "any"))
    assert quant.entries == tuple(f"{quant.name}_{rows}{of}" for of in ("", "_statistics")
                                  for rows in ("bf16", "f16", "any"))
    assert quant.entries[3:] == tuple(map(statistics_entry, quant.entries[:3]))


def test_names_of_the_other_kinds():
    smoothed = dataclasses.replace(ATTN, qk="int4", v="vsmooth", q="qsmooth")
    assert smoothed.name == "sage_attn_sm89_d128_qkint4_pve4m3_acc2f32_causal_vsmooth_qsmooth"
    assert smoothed.companion("quant").name == "sage_quant_sm89_d128_qkint4_pve4m3"
    assert smoothed.companion("delta").name == "sage_delta_sm89_d128"


def test_values_are_by_axis_in_the_order_of_the_name():
    assert ATTN.values == {"arch": "sm89", "headdim": 128, "qk": "int8", "pv": "e4m3", "pv_accum": "two_level_f32",
                           "p": "exp2", "mask": "causal", "v": "vraw", "q": "qraw"}
    assert ATTN.companion("delta").values == {"arch": "sm89", "headdim": 128}
    assert tuple(ATTN.values) == ATTN.axes() == ("arch", *AXES)


def test_the_order_of_the_kinds_is_that_in_which_a_call_runs_them():
    assert list(KINDS) == ["pool", "choose", "pack", "lists", "quant", "delta", "attn", "merge", "bwdprep", "bwdkv",
                           "bwdq", "bwdqkv", "bwdsum"]


@pytest.mark.parametrize(("headdim", "kernel"), [(1, 64), (64, 64), (65, 128), (128, 128), (129, 256), (256, 256)])
def test_the_least_head_dim_that_holds_a_calls(headdim, kernel):
    assert least_headdim(headdim) == kernel


@pytest.mark.parametrize(("arch", "capability", "target"), [
    ("sm80", (8, 0), "sm_80"), ("sm89", (8, 9), "sm_89"), ("sm120", (12, 0), "sm_120"), ("ptx80", (8, 0), "compute_80"),
])
def test_what_an_arch_is(arch, capability, target):
    assert (capability_of(arch), target_of(arch), is_ptx(arch)) == (capability, target, arch == "ptx80")


@pytest.mark.parametrize(("changes", "reason"), [
    ({"arch": "sm86"}, "no FP8"),
    ({"arch": "sm90", "qk": "int4"}, "no INT4"),
    ({"qk": "int4"}, None),
    ({"pv_accum": "two_level_f16"}, None),
    ({"pv_accum": "f32"}, "too few without a second level"),
    ({"arch": "sm90", "pv_accum": "f32"}, "too few without a second level"),
    ({"arch": "sm120", "pv_accum": "f32"}, None),
    ({"arch": "sm120", "qk": "nvfp4", "pv": "nvfp4", "pv_accum": "f32"}, None),
    ({"arch": "sm120", "qk": "nvfp4", "pv": "nvfp4"}, "a second level would gain nothing"),
    ({"qk": "nvfp4", "pv": "nvfp4", "pv_accum": "f32"}, "no NVFP4 in mma.sync before sm120"),
    ({"pv": "f16"}, "f16 products add up in f32"),
    ({"pv": "f16", "pv_accum": "two_level_f16"}, "f16 products add up in f32"),
    ({"pv": "f16", "pv_accum": "f32"}, None),
    ({}, None),
])
def test_impossible_kernels(changes, reason):
    found = dataclasses.replace(ATTN, **changes).impossible()
    assert found is None if reason is None else reason in found


WGMMA_RULE = "warp_m must be 16, block_m 128 or 192 and block_n 64 or 128, got "


@pytest.mark.parametrize(("family", "changes", "message"), [
    ("mma", {}, None),
    ("mma", {"block_m": 0}, "block_m must be a positive integer, got 0"),
    ("mma", {"stages": True}, "stages must be a positive integer, got True"),
    ("mma", {"warp_m": 64}, "warp_m must be 16 or 32"),
    ("mma", {"warp_m": 16}, None),
    ("mma", {"block_m": 144}, "block_m must be a multiple of warp_m = 32, got 144"),
    ("mma", {"block_m": 192}, None),
    ("mma", {"block_m": 1024}, None),
    ("mma", {"block_m": 1056}, "1 to 32 warps, got 33"),
    ("mma", {"block_n": 96}, "block_n must be 32, 64 or 128, got 96"),
    ("mma", {"block_n": 192}, "block_n must be 32, 64 or 128, got 192"),
    ("mma", {"block_n": 512}, "block_n must be 32, 64 or 128, got 512"),
    ("mma", {"block_n": 32}, None),
    ("mma", {"stages": 1}, "stages must be at least 2"),
    ("wgmma", {}, None),
    ("wgmma", {"block_m": 192}, None),
    ("wgmma", {"block_m": 256}, WGMMA_RULE + "16, 256 and 128"),
    ("wgmma", {"block_m": 64}, WGMMA_RULE + "16, 64 and 128"),
    ("wgmma", {"block_n": 64}, None),
    ("wgmma", {"block_n": 32}, WGMMA_RULE + "16, 128 and 32"),
    ("wgmma", {"warp_m": 32}, WGMMA_RULE + "32, 128 and 128"),
    ("wgmma", {"block_m": "wide"}, "block_m must be a positive integer, got 'wide'"),
    ("wgmma", {"stages": 1}, "stages must be at least 2"),
    ("mma", {"v_stages": 1}, None),
    ("mma", {"v_stages": 0}, "v_stages must be a positive integer, got 0"),
    ("mma", {"v_stages": 1, "stages": 3}, "v_stages may be 1 with stages 2"),
    ("wgmma", {"v_stages": 1}, "v_stages is of the mma family, got 1"),
])
def test_tile_rules_of_a_family(family, changes, message):
    problems = FAMILIES[family].broken_rules(TILES[family]._replace(**changes))
    assert len(problems) == (message is not None)
    assert not problems or message in problems[0]


def test_every_rule_that_a_tile_breaks_is_told():
    problems = FAMILIES["mma"].broken_rules(Tile(block_m=144, block_n=96, warp_m=32, stages=1, min_blocks=1))
    assert [problem.split()[0] for problem in problems] == ["block_m", "block_n", "stages"]


def test_families_go_by_their_names():
    assert {name: family.name for name, family in FAMILIES.items()} == {"mma": "mma", "wgmma": "wgmma"}
    assert [name for name, family in FAMILIES.items() if family.persistent] == ["wgmma"]
