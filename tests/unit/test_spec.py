"""Kernel names, and the rules that tile sizes keep."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from sage_aot._spec import AXES, KIND_AXES, KINDS, KernelSpec, Tile, capability_of, is_ptx, target_of

ATTN = KernelSpec("attn", "sm89", 128, 8, "e4m3", "two_level_f32", "causal", "vraw", "qraw")
TILE = Tile(block_m=128, block_n=64, warp_m=32, stages=2, min_blocks=2)


def every_spec():
    values = {**AXES, "arch": ("sm80", "sm90", "sm120", "ptx80")}
    for kind in KINDS:
        for combination in itertools.product(*(values[axis] for axis in KIND_AXES[kind])):
            yield KernelSpec(kind, **dict(zip(KIND_AXES[kind], combination)))


def test_names_round_trip_and_are_unique():
    specs = list(every_spec())
    assert [KernelSpec.from_name(spec.name) for spec in specs] == specs
    assert len({spec.name for spec in specs}) == len(specs)


def test_name_spells_every_axis_in_order():
    assert ATTN.name == "sage_attn_sm89_d128_qk8_pve4m3_acc2f32_causal_vraw_qraw"


@pytest.mark.parametrize(("name", "message"), [
    ("", "expected a name such as"),
    ("sage_attn_sm89_d128_qk8_pve4m3_acc2f32_causal_vraw", "expected a name such as"),
    ("sage_quant_sm89_d128_qk8_pve4m3_vraw", "expected a name such as"),
    ("sage_attn_sm89_d128_qk8_pve4m3_acc2f32_causal_vraw_vsmooth",
     r"\['qraw', 'qsmooth'\] for the axis 'q', got 'vsmooth'"),
    ("sage_attn_sm89_d128_qk8_pve4m3_causal_vraw_qraw", "expected a name such as"),
    ("sage_attn_sm89_d128_qk8_pve4m3_acctwo_causal_vraw_qraw",
     r"expected one of \['acc2f16', 'acc2f32', 'accf32'\] for the axis 'pv_accum', got 'acctwo'"),
    ("sage_attn_sm89_d128", "expected a name such as"),
    ("sage_attn_sm89_d128_qk8_pve4m3_acc2f32_causal_vraw_qraw_more", "expected a name such as"),
    ("sage_attn_ada_d128_qk8_pve4m3_acc2f32_causal_vraw_qraw", "expected an arch such as 'sm89', got 'ada'"),
    ("sage_attn_sm89_d96_qk8_pve4m3_acc2f32_causal_vraw_qraw",
     r"expected one of \['d128', 'd64'\] for the axis 'headdim', got 'd96'"),
])
def test_bad_names_are_refused(name, message):
    with pytest.raises(ValueError, match=message):
        KernelSpec.from_name(name)


@pytest.mark.parametrize(("pv", "accumulator", "spelt"), [
    ("f16", "f32", "pvf16_accf32"), ("e4m3", "two_level_f32", "pve4m3_acc2f32"),
    ("e4m3", "two_level_f16", "pve4m3_acc2f16"),
])
def test_names_of_the_accumulators(pv, accumulator, spelt):
    spec = dataclasses.replace(ATTN, pv=pv, pv_accum=accumulator)
    assert spec.name == f"sage_attn_sm89_d128_qk8_{spelt}_causal_vraw_qraw"
    assert KernelSpec.from_name(spec.name) == spec
    assert spec.companions == dataclasses.replace(ATTN, pv=pv).companions  # quantizers take either


def test_companions_share_axes():
    assert ATTN.companion("quant").name == "sage_quant_sm89_d128_qk8_pve4m3"
    assert ATTN.companion("stats").name == "sage_stats_sm89_d128"
    with pytest.raises(ValueError, match="does not determine"):
        ATTN.companion("stats").companion("attn")


def test_names_of_the_other_kinds():
    smoothed = dataclasses.replace(ATTN, qk=4, v="vsmooth", q="qsmooth")
    assert smoothed.name == "sage_attn_sm89_d128_qk4_pve4m3_acc2f32_causal_vsmooth_qsmooth"
    assert smoothed.companion("quant").name == "sage_quant_sm89_d128_qk4_pve4m3"
    assert smoothed.companion("delta").name == "sage_delta_sm89_d128"


def test_the_delta_kernel_comes_only_where_q_is_smoothed():
    assert [spec.kind for spec in ATTN.companions] == ["quant", "stats"]
    smoothed = dataclasses.replace(ATTN, q="qsmooth")
    assert [spec.kind for spec in smoothed.companions] == ["quant", "stats", "delta"]
    assert smoothed.companions[:2] == ATTN.companions


@pytest.mark.parametrize(("arch", "capability", "target"), [
    ("sm80", (8, 0), "sm_80"), ("sm89", (8, 9), "sm_89"), ("sm120", (12, 0), "sm_120"), ("ptx80", (8, 0), "compute_80"),
])
def test_what_an_arch_is(arch, capability, target):
    assert (capability_of(arch), target_of(arch), is_ptx(arch)) == (capability, target, arch == "ptx80")


@pytest.mark.parametrize(("changes", "reason"), [
    ({"arch": "sm86"}, "no FP8"),
    ({"arch": "sm90", "qk": 4}, "no INT4"),
    ({"qk": 4}, None),
    ({"pv_accum": "two_level_f16"}, None),
    ({"pv_accum": "f32"}, "those of e4m3 need two levels"),
    ({"pv": "f16"}, "f16 products add up in f32"),
    ({"pv": "f16", "pv_accum": "two_level_f16"}, "f16 products add up in f32"),
    ({"pv": "f16", "pv_accum": "f32"}, None),
    ({}, None),
])
def test_impossible_kernels(changes, reason):
    found = dataclasses.replace(ATTN, **changes).impossible()
    assert found is None if reason is None else reason in found


@pytest.mark.parametrize(("changes", "message"), [
    ({}, None),
    ({"block_m": 0}, "block_m must be a positive integer, got 0"),
    ({"stages": True}, "stages must be a positive integer, got True"),
    ({"warp_m": 64}, "warp_m must be 16 or 32"),
    ({"block_m": 144}, "block_m must be a multiple of warp_m = 32, got 144"),
    ({"block_m": 2048}, "1 to 32 warps, got 64"),
    ({"block_n": 96}, "block_n must be 64, 128 or 256, got 96"),
    ({"block_n": 192}, "block_n must be 64, 128 or 256, got 192"),
    ({"block_n": 512}, "block_n must be 64, 128 or 256, got 512"),
    ({"block_n": 256}, None),
    ({"stages": 1}, "stages must be at least 2"),
])
def test_tile_rules(changes, message):
    problems = dataclasses.replace(TILE, **changes).invalid()
    assert problems == [] if message is None else any(message in problem for problem in problems)


def test_shared_memory_of_a_kernel():
    q, k, v, scales = 128 * 128, 64 * 128, 64 * 128, 128
    assert TILE.shared_bytes(ATTN) == q + 2 * (k + v + scales)
    assert TILE.shared_bytes(dataclasses.replace(ATTN, pv="f16")) == q + 2 * (k + 2 * v + scales)


@pytest.mark.parametrize("bits", [8, 4])
def test_shared_memory_of_a_smoothed_q(bits):
    smoothed = dataclasses.replace(ATTN, qk=bits, q="qsmooth")
    q, k, v, delta, scales = 128 * 16 * bits, 64 * 16 * bits, 64 * 128, 64 * 4, 128
    assert TILE.shared_bytes(smoothed) == q + 2 * (k + v + delta + scales)
    assert TILE.shared_bytes(smoothed) - TILE.shared_bytes(dataclasses.replace(smoothed, q="qraw")) == 2 * delta
