"""SageAttention3's NVFP4: rounding, groups, accuracy, and the call that asks for it."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

import nvfp4 as bench
import sage_aot
from sage_aot._backends.emulation import nvfp4
from sage_aot._backends.emulation.backend import EmulationBackend
from sage_aot._call import pipeline
from sage_aot._call.backends import default_library
from sage_aot._problem.given import Given
from sage_aot._problem.options import Options
from sage_aot._tools import reference

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
pytestmark = pytest.mark.kernels("sm120")


@pytest.fixture
def on_sm120(monkeypatch):
    monkeypatch.setenv("SAGE_AOT_EMULATE", "sm120")


# --- rounding and groups ----------------------------------------------------------------------------------------------


def test_e2m1_is_the_nearest_number_and_of_two_the_even_one():
    assert torch.equal(nvfp4.to_e2m1(E2M1), E2M1)
    middles = (E2M1[1:] + E2M1[:-1]) / 2
    even = torch.where(torch.arange(7) % 2 == 0, E2M1[:-1], E2M1[1:])
    assert torch.equal(nvfp4.to_e2m1(middles), even)
    assert torch.equal(nvfp4.to_e2m1(middles.nextafter(torch.tensor(0.0))), E2M1[:-1])
    assert torch.equal(nvfp4.to_e2m1(-middles.nextafter(torch.tensor(9.0))), -E2M1[1:])
    assert nvfp4.to_e2m1(torch.tensor([7.0, -1e30])).tolist() == [6.0, -6.0]


def test_the_largest_of_a_group_becomes_6_or_4_whichever_errs_less():
    six = torch.tensor([6.0, 3.0, 1.0, 0.5] * 4)
    four = torch.tensor([4.0, 3.0, 2.0, 1.0] * 4)
    for exact in (six, four, 2 * six, 0.25 * four):
        assert torch.equal(nvfp4.to_nvfp4(exact), exact)
    x = torch.randn(4000, 16, generator=torch.Generator().manual_seed(0))
    error = (nvfp4.to_nvfp4(x) - x).square().sum(-1)
    assert (error <= (bench.to_six(x) - x).square().sum(-1) * (1 + 1e-5)).all()
    assert error.sum() < 0.9 * (bench.to_six(x) - x).square().sum()


def test_a_group_of_zeros_and_a_group_too_small_for_its_scale():
    assert torch.equal(nvfp4.to_nvfp4(torch.zeros(16)), torch.zeros(16))
    assert torch.equal(nvfp4.to_nvfp4(torch.full((16,), 1e-4)), torch.zeros(16))  # less than half of 2^-9, times 4


def test_columns_are_keys_in_another_order_within_32():
    order = nvfp4.columns_of_keys(128)
    assert torch.equal(order.sort()[0], torch.arange(128))
    assert torch.equal(order // 32, torch.arange(128) // 32)
    for lane in range(4):  # its own columns are those of its accumulators: keys 2t and 2t + 1 of each 8
        assert {int(key) % 8 // 2 for key in order.view(-1, 4, 8)[:, lane].flatten()} == {lane}


def test_a_huge_value_moves_its_own_group_alone():
    v = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
    moved = v.clone()
    moved[21, 2] = 400.0
    changed = nvfp4.v_to_nvfp4(moved) != nvfp4.v_to_nvfp4(v)
    order = nvfp4.columns_of_keys(64).tolist()
    group = order.index(21) // nvfp4.GROUP
    own = set(order[nvfp4.GROUP * group: nvfp4.GROUP * (group + 1)])
    assert changed[21, 2] and not changed[:, [0, 1, 3]].any()
    assert set(changed[:, 2].nonzero().flatten().tolist()) <= own


def test_p_shares_scales_with_the_columns_that_v_shares_scales_with():
    """One key with all of the weight: its group alone has a scale that is not zero, and P there is exact."""
    scores = torch.full((1, 64), -40.0)
    scores[0, 37] = 0.0
    p, rounded = nvfp4.p_of(scores, torch.ones_like(scores), torch.tensor([-bench.LOG2_LARGEST]))
    assert rounded[0, 37] == nvfp4.LIMIT and rounded.count_nonzero() == 1
    assert p[0, 37] == pytest.approx(nvfp4.LIMIT, rel=1e-6) and p.count_nonzero() <= nvfp4.GROUP


# --- the call ---------------------------------------------------------------------------------------------------------


def draw(headdim=64, keys=150):
    return reference.inputs("normal", (1, 4, 130, headdim), (1, 2, keys, headdim), torch.bfloat16,
                             torch.Generator().manual_seed(2))


def test_nobody_gets_nvfp4_who_did_not_ask(on_sm120):
    q, k, v = draw()
    asked, default = sage_aot.attn(q, k, v, qk="nvfp4"), sage_aot.attn(q, k, v)
    assert torch.equal(default, sage_aot.attn(q, k, v, qk="int8"))
    assert not torch.equal(asked, default)
    assert Options(qk="nvfp4").resolved.smooth_q is True and Options(qk="nvfp4").resolved.rotate is False


@pytest.mark.parametrize(("options", "message"), [
    ({"smooth_q": False}, r"qk='nvfp4', smooth_q=False.*; use "),
    ({"pv_accum": "two_level_f32"}, r"qk='nvfp4'.*pv_accum='two_level_f32'; use "),
])
def test_what_no_kernel_of_nvfp4_computes_is_refused(on_sm120, options, message):
    with pytest.raises(sage_aot.UnsupportedError, match=message):
        sage_aot.attn(*draw(), qk="nvfp4", **options)


def test_a_head_dim_beyond_128_is_refused(on_sm120):
    message = "no kernel for sm120, head dim 256, .*qk='nvfp4'.*use qk='int8'"
    with pytest.raises(sage_aot.UnsupportedError, match=message):
        sage_aot.attn(*draw(headdim=160), qk="nvfp4")


@pytest.mark.parametrize("arch", ["sm80", "sm89", "sm90", "sm100"])
def test_other_gpus_have_no_nvfp4(monkeypatch, arch):
    monkeypatch.setenv("SAGE_AOT_EMULATE", arch)
    with pytest.raises(sage_aot.UnsupportedError, match=rf"no kernel for {arch}, .*qk='nvfp4'.*; use qk='int"):
        sage_aot.attn(*draw(), qk="nvfp4")
    assert sage_aot.supports(*draw(), qk="nvfp4")


def test_explain_says_which_kernel_and_that_it_ran_on_no_gpu():
    found = str(sage_aot.explain(capability=(12, 0), headdim=128, qk="nvfp4"))
    assert "sage_attn_sm120_d128_qknvfp4_pvnvfp4_accf32_full_vraw_qsmooth\n" in found.split("taken")[0]
    assert "the kernels of sm120 were not run on hardware" in found
    assert "not run on hardware" not in str(sage_aot.explain(capability=(9, 0), headdim=128))


def test_the_main_loop_has_the_products_of_a_tile_and_no_others():
    """The tile has 16 rows and 128 keys: 64 channels or keys a product, 8 columns."""
    records = [record for record in default_library().manifest.every_attention() if record.spec.qk == "nvfp4"]
    assert records
    for record in records:
        headdim, keys = record.spec.headdim, record.tile.block_n
        assert record.main_loop.matrix == keys // 8 * (headdim // 64) + headdim // 8 * (keys // 64)
        assert set(record.opcodes) == {"OMMA.SF.16864.F32.E2M1.E2M1.UE4M3.4X"}
        assert record.machine.spill_bytes == 0 and record.fact("shared_bytes") <= 99 * 1024


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("changes", [{"layout": "NHD"}, {"is_causal": True}, {"smooth_v": True, "rotate": True},
                                     {"scale": -0.05, "smooth_k": False}], ids=str)
def test_options_of_a_call(on_sm120, dtype, changes):
    q, k, v = (x.to(dtype) for x in draw(headdim=72, keys=131))
    layout = changes.get("layout", "HND")
    given = [x.transpose(1, 2).contiguous() if layout == "NHD" else x for x in (q, k, v)]
    out, lse = sage_aot.attn(*given, qk="nvfp4", return_lse=True, **changes)
    expected, expected_lse = reference.attention(q, k, v, scale=changes.get("scale"),
                                                 is_causal=changes.get("is_causal", False))
    out = out.transpose(1, 2) if layout == "NHD" else out
    assert reference.measure(out, expected).cosine > 0.975
    assert (lse - expected_lse).abs().max() < 0.5


def test_keys_of_several_blocks_and_quantized_before(on_sm120):
    q, k, v = draw(keys=700)
    kv = sage_aot.quantize_kv(k, v, qk="nvfp4")
    assert torch.equal(sage_aot.attn(q, kv), sage_aot.attn(q, k, v, qk="nvfp4"))
    manifest = default_library().manifest
    given = Given("dense", q, k, v)
    calls = [pipeline.prepare(EmulationBackend(manifest, "sm120", splits), given, Options(qk="nvfp4"))
             for splits in (1, 3)]
    outs = []
    for call in calls:
        out = torch.empty_like(q)
        call.run(given, out, None)
        outs.append(out.float())
    assert (outs[0] - outs[1]).abs().max() < 0.1 and not torch.equal(*outs)


# --- accuracy ---------------------------------------------------------------------------------------------------------

LEAST_COSINE = {"normal": 0.980, "sharp": 0.950, "channel means": 0.998, "small K": 0.980, "sink": 0.9995,
                "strong sink": 0.995}
"""Least cosine of attention in NVFP4 with float64, by class of inputs."""

CAUSAL_COSINE = {**LEAST_COSINE, "channel means": 0.9975}
"""Least cosine where some rows see few keys, over which errors of V do not average."""


@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("headdim", [64, 128])
@pytest.mark.parametrize("kind", bench.CLASSES)
def test_accuracy_is_never_worse_than_as_published(kind, headdim, is_causal, group):
    kv_heads = 12 // group if kind == "channel means" else 2  # the error depends on a head's means
    queries = 1024 if is_causal and "sink" not in kind else 128
    shape = {"queries": queries, "heads": group * kv_heads, "kv_heads": kv_heads}
    own, published = (bench.accuracy(method, kind, headdim, is_causal=is_causal, **shape)
                      for method in (bench.kernels, bench.published))
    assert own.cosine >= (CAUSAL_COSINE if is_causal else LEAST_COSINE)[kind]
    assert own.cosine >= published.cosine - 1e-5 and own.relative_l1 < published.relative_l1
    if kind == "normal":
        assert own.relative_l1 <= 0.20
    if kind in ("small K", "channel means"):
        assert own.relative_l1 < 0.95 * published.relative_l1


@pytest.mark.parametrize("headdim", [64, 128])
def test_a_smoothed_v_holds_under_a_causal_mask_too(headdim):
    found = bench.accuracy(partial(bench.kernels, smooth_v=True), "channel means", headdim, is_causal=True, heads=4,
                           kv_heads=4)
    assert found.cosine >= LEAST_COSINE["channel means"]


@pytest.mark.parametrize("headdim", [64, 128])
def test_p_in_one_level_loses_what_lies_far_below_a_sink(headdim):
    one = bench.accuracy(partial(bench.published, two_level=False), "sink", headdim, queries=128)
    assert one.relative_l1 > 2 * bench.accuracy(bench.published, "sink", headdim, queries=128).relative_l1
