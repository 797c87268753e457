"""The call on CPU tensors: the emulation against float64, over everything that a caller may vary."""

from __future__ import annotations

import dataclasses
import math
from fractions import Fraction
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import sage_aot
from sage_aot._backends.emulation.arithmetic import fma, pv_tile
from sage_aot._backends.emulation.backend import emulated_arch
from sage_aot._backends.emulation.quantize import statistics_of_k
from sage_aot._call.backends import default_library
from sage_aot._launch.choose import Gpu, built_archs, kernels_of, wanted_values
from sage_aot._problem.check import check
from sage_aot._problem.given import Given
from sage_aot._problem.options import Options
from sage_aot._tools import info, reference
from sage_aot.errors import UnsupportedError

ARCHS = built_archs(default_library().manifest)
LEAST_COSINE = {"f16": 0.9999, "e4m3": 0.999}
ACCUMULATORS = [("sm80", "f32"), ("sm89", "two_level_f32"), ("sm89", "two_level_f16"), ("sm120", "f32")]


def draw(q_shape, kv_shape, kind="normal", dtype=torch.bfloat16, seed=0):
    return reference.inputs(kind, q_shape, kv_shape, dtype, torch.Generator().manual_seed(seed))


@pytest.fixture(params=ARCHS)
def pv(request, monkeypatch):
    """The PV type of the arch that CPU calls emulate, for each arch that is built."""
    monkeypatch.setenv("SAGE_AOT_EMULATE", request.param)
    found, = {record.spec.pv for record in default_library().manifest.attention(request.param)} - {"nvfp4"}
    return found


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("p", ["auto", "exp2"])
def test_bits_do_not_depend_on_the_default_dtype(pv, p, dtype, default_dtype):
    q, k, v = draw((1, 2, 130, 16), (1, 2, 200, 16))
    expected = sage_aot.attn(q, k, v, p=p, return_lse=p != "auto")
    default_dtype(dtype)
    torch.testing.assert_close(sage_aot.attn(q, k, v, p=p, return_lse=p != "auto"), expected, rtol=0, atol=0)
    assert all(map(torch.equal, draw((1, 2, 130, 16), (1, 2, 200, 16)), (q, k, v)))


def test_a_sink_has_the_weight_that_its_class_says():
    """The sink's mean score is that of its class; the scores of the other 4095 keys are N(0, 1)."""
    for kind, nats in (("sink13", 13.0), ("sink15", 15.0)):
        q, k, v = (x.double() for x in draw((1, 2, 64, 128), (1, 2, 4096, 128), kind))
        scores = q @ k.transpose(2, 3) / 128**0.5
        assert scores[..., 0].mean() == pytest.approx(nats, rel=0.05) and abs(scores[..., 1:].mean()) < 0.05
        assert scores[..., 1:].std() == pytest.approx(1.0, rel=0.05)
        assert v[:, :, 1:].mean(2).std() == pytest.approx(1.0, rel=0.3) and v[:, :, 0].abs().mean() < 0.1


def test_heavy_channels_are_those_that_the_class_says():
    for kind, of_q, of_k, count in (("heavy1", 12.0, 12.0, 1), ("heavy4", 1.0, 30.0, 4)):
        q, k, _ = (x.float().square().mean((0, 1, 2)).sqrt() for x in draw((2, 2, 500, 64), (2, 2, 500, 64), kind))
        assert sorted((k > 5).nonzero().flatten().tolist()) == list(range(3, 3 + count))
        assert k[3].item() == pytest.approx(of_k, rel=0.1) and q[3].item() == pytest.approx(of_q, rel=0.1)
        assert k[0].item() == pytest.approx(1.0, rel=0.1) and q[0].item() == pytest.approx(1.0, rel=0.1)


@pytest.mark.parametrize("arch", ["sm89", "sm90"])
def test_keys_behind_a_sink_count(monkeypatch, arch):
    """P relative to the row's maximum so far would lose these keys: a relative L2 above 0.04 at 8K keys."""
    monkeypatch.setenv("SAGE_AOT_EMULATE", arch)
    q, k, v = draw((1, 1, 64, 128), (1, 1, 8192, 128), "sink15")
    out, lse = sage_aot.attn(q, k, v, return_lse=True)
    expected, expected_lse = reference.attention(q, k, v)
    assert reference.relative_l2(out, expected) < 0.03
    assert (lse - expected_lse).abs().max() < 0.08  # that of one score, the sink's


@pytest.mark.parametrize("kind", reference.INPUT_CLASSES)
@pytest.mark.parametrize("headdim", [32, 64, 96, 128, 200, 256])
@pytest.mark.parametrize("is_causal", [False, True])
def test_accuracy_against_float64(pv, kind, headdim, is_causal):
    q, k, v = draw((1, 4, 150, headdim), (1, 2, 190, headdim), kind)
    out, lse = sage_aot.attn(q, k, v, is_causal=is_causal, return_lse=True)
    expected, expected_lse = reference.attention(q, k, v, is_causal=is_causal)
    assert reference.measure(out, expected).cosine > LEAST_COSINE[pv]
    assert (lse - expected_lse).abs().max() < (0.02 if kind == "normal" else 0.5)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("headdim", [64, 128, 256])
def test_f16_accumulators_are_another_way_to_the_same(monkeypatch, headdim, is_causal):
    monkeypatch.delenv("SAGE_AOT_EMULATE", raising=False)
    q, k, v = draw((1, 4, 150, headdim), (1, 2, 700, headdim))
    out, lse = sage_aot.attn(q, k, v, is_causal=is_causal, pv_accum="two_level_f16", return_lse=True)
    default, default_lse = sage_aot.attn(q, k, v, is_causal=is_causal, return_lse=True)
    expected, expected_lse = reference.attention(q, k, v, is_causal=is_causal)
    assert reference.measure(out, expected).cosine > 0.999
    assert (lse - expected_lse).abs().max() < 0.02
    assert not torch.equal(out, default) and not torch.equal(lse, default_lse)
    named = sage_aot.attn(q, k, v, is_causal=is_causal, pv_accum="two_level_f32", return_lse=True)
    assert torch.equal(named[0], default) and torch.equal(named[1], default_lse)


def test_f16_accumulators_hold_the_largest_tile(monkeypatch):
    """Every P of a tile and every V at its largest, with one sign: the sum is the largest possible, 224 · 4.5 · 64."""
    monkeypatch.delenv("SAGE_AOT_EMULATE", raising=False)
    q, k = torch.zeros(1, 1, 64, 64, dtype=torch.bfloat16), torch.ones(1, 1, 256, 64, dtype=torch.bfloat16)
    for value in (3.0, -3.0):
        out = sage_aot.attn(q, k, torch.full_like(k, value), pv_accum="two_level_f16")
        assert torch.equal(out, torch.full_like(q, value))


@pytest.mark.parametrize(("pv_accum", "kept"), [
    ("f32", [2049.0, 2051.0, -16385.0]), ("two_level_f32", [2049.0, 2051.0, -16384.0]),
    ("two_level_f16", [2048.0, 2052.0, -16384.0])])
def test_what_an_accumulator_keeps_of_a_tile(pv_accum, kept):
    """An accumulator keeps all bits after each product of 32 keys, or 13 mantissa bits with the rest cut off, or rounds
    to f16's ten."""
    p = torch.zeros(1, 1, 3, 64)
    p[..., 0], p[..., 32] = torch.tensor([2048.0, 2050.0, -16384.0]), torch.tensor([1.0, 1.0, -1.0])
    assert pv_tile(p, torch.ones(1, 1, 64, 1), pv_accum).flatten().tolist() == kept


@pytest.mark.parametrize(("arch", "pv_accum"), [("sm80", "two_level_f16"), ("sm90", "two_level_f16"), ("sm89", "f32")])
def test_accumulators_that_an_arch_lacks_are_refused(monkeypatch, arch, pv_accum):
    monkeypatch.setenv("SAGE_AOT_EMULATE", arch)
    with pytest.raises(UnsupportedError, match=f"no kernel for {arch}, .*pv_accum='{pv_accum}'; use pv_accum="):
        sage_aot.attn(*draw((1, 1, 4, 64), (1, 1, 4, 64)), pv_accum=pv_accum)


def test_smoothing_k_pays_where_channels_have_offsets(pv):
    q, k, v = draw((1, 2, 128, 64), (1, 2, 256, 64), "outlier")
    expected, _ = reference.attention(q, k, v)
    error = {smooth: reference.measure(sage_aot.attn(q, k, v, smooth_k=smooth), expected).relative_l1
             for smooth in (True, False)}
    assert error[True] < (0.6 if pv == "f16" else 0.8) * error[False]  # FP8 adds its own error to both


def test_rows_without_keys_are_zero(pv):
    q, k, v = draw((1, 1, 70, 64), (1, 1, 40, 64))
    out, lse = sage_aot.attn(q, k, v, is_causal=True, return_lse=True)
    assert (out[:, :, :30] == 0).all() and (lse[:, :, :30] == -math.inf).all()
    assert lse[:, :, 30:].isfinite().all() and (out[:, :, 30:] != 0).any()


def test_layouts_agree_and_out_is_written():
    q, k, v = draw((2, 4, 33, 64), (2, 2, 47, 64))
    expected = sage_aot.attn(q, k, v)
    nhd = [t.transpose(1, 2).contiguous() for t in (q, k, v)]
    assert torch.equal(sage_aot.attn(*nhd, layout="NHD").transpose(1, 2), expected)
    out = torch.full_like(q, math.nan)
    assert sage_aot.attn(q, k, v, out=out) is out
    assert torch.equal(out, expected)


def test_strided_inputs_give_the_same():
    q, k, v = draw((1, 2, 40, 64), (1, 2, 40, 64))
    fused = torch.stack([q, k, v], 3).flatten(3)  # [1, 2, 40, 3 · 64]: heads of a fused projection
    parts = fused.split(64, -1)
    assert not parts[0].is_contiguous()
    assert torch.equal(sage_aot.attn(*parts), sage_aot.attn(q, k, v))


def test_inputs_stay_as_they_are():
    tensors = draw((1, 2, 40, 64), (1, 2, 40, 64), "outlier")
    before = [t.clone() for t in tensors]
    sage_aot.attn(*tensors, is_causal=True)
    assert all(torch.equal(t, b) for t, b in zip(tensors, before))


@pytest.mark.parametrize("scale", [0.0, 0.02, 1.0, -0.1])
def test_any_scale(scale):
    q, k, v = draw((1, 1, 40, 64), (1, 1, 90, 64))
    expected, _ = reference.attention(q, k, v, scale=scale)
    assert reference.measure(sage_aot.attn(q, k, v, scale=scale), expected).cosine > 0.998


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_output_has_the_dtype_of_the_inputs(dtype):
    q, k, v = draw((1, 1, 5, 64), (1, 1, 7, 64), dtype=dtype)
    assert sage_aot.attn(q, k, v).dtype == dtype


def test_f32_of_bf16_values_gives_the_same(pv):
    q, k, v = draw((1, 2, 70, 40), (1, 1, 90, 40), "outlier")
    expected = sage_aot.attn(q, k, v, return_lse=True)
    out, lse = sage_aot.attn(q.float(), k.float(), v.float(), return_lse=True)
    assert out.dtype == torch.float32 and torch.equal(out.bfloat16(), expected[0]) and torch.equal(lse, expected[1])
    assert not torch.equal(out, expected[0].float())


def test_v_beyond_f16_and_below_its_least_normal(pv):
    q, k, v = draw((1, 1, 64, 64), (1, 1, 64, 64))
    for size in (1e6, 1e-12):
        scaled = (v.float() * size).bfloat16()
        expected, _ = reference.attention(q, k, scaled)
        assert reference.measure(sage_aot.attn(q, k, scaled), expected).cosine > LEAST_COSINE[pv]


def test_channels_of_zeros_and_heads_of_zeros(pv):
    q, k, v = draw((1, 2, 64, 64), (1, 2, 64, 64))
    v[..., 3] = 0.0
    k[:, 0], q[:, 1] = 0.0, 0.0
    out = sage_aot.attn(q, k, v)
    expected, _ = reference.attention(q, k, v)
    assert (out[..., 3] == 0).all() and out.isfinite().all()
    assert reference.measure(out, expected).cosine > LEAST_COSINE[pv]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_query_that_is_not_finite_spoils_its_own_row_only(pv, value):
    q, k, v = draw((1, 1, 64, 64), (1, 1, 64, 64))
    clean, _ = sage_aot.attn(q, k, v, return_lse=True)
    q[0, 0, 9, 5] = value
    out, lse = sage_aot.attn(q, k, v, return_lse=True)
    others = [row for row in range(64) if row != 9]
    assert out[0, 0, 9].isnan().all() and out[0, 0, others].isfinite().all()
    assert torch.equal(lse[0, 0].isnan(), torch.arange(64) == 9) and lse[0, 0, others].isfinite().all()
    unshared = [row for row in others if row % 8 != 1]  # rows that share its scale change by a rounding
    assert torch.equal(out[0, 0, unshared], clean[0, 0, unshared])


@pytest.mark.parametrize("options", [{}, {"qk": "int4"}, {"smooth_q": True}, {"smooth_k": False}, {"smooth_v": True},
                                     {"rotate": True}], ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(("arch", "pv_accum"), ACCUMULATORS)
def test_a_key_that_is_not_finite_spoils_the_rows_that_see_it(monkeypatch, arch, pv_accum, value, is_causal, options):
    monkeypatch.setenv("SAGE_AOT_EMULATE", arch)
    if arch == "sm120" and "qk" in options:
        options = {"qk": "nvfp4"}  # its type of 4 bits
    q, k, v = draw((2, 4, 150, 64), (2, 2, 170, 64))
    k[0, 1, 100, 5] = k[0, 1, 130, 7] = value
    out, lse = sage_aot.attn(q, k, v, is_causal=is_causal, pv_accum=pv_accum, return_lse=True, **options)
    spoilt = torch.zeros_like(lse, dtype=torch.bool)
    spoilt[0, 2:, 80 if is_causal else 0:] = True  # row 80 is the first that sees key 100
    assert torch.equal(lse.isnan(), spoilt)
    assert torch.equal(out.isnan(), spoilt[..., None].expand_as(out))
    clean = torch.where(k.isfinite(), k, 0.0)  # the rows before see another key 100, of no weight
    expected, _ = reference.attention(q, clean, v, is_causal=is_causal)
    assert reference.measure(out[~spoilt], expected[~spoilt]).cosine > (0.95 if "qk" in options else 0.998)


@pytest.mark.parametrize("options", [{}, {"smooth_v": True}], ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(("arch", "pv_accum"), ACCUMULATORS)
def test_a_value_that_is_not_finite_spoils_its_channel_of_the_rows_that_see_it(monkeypatch, arch, pv_accum, value,
                                                                              is_causal, options):
    monkeypatch.setenv("SAGE_AOT_EMULATE", arch)
    q, k, v = draw((2, 4, 150, 64), (2, 2, 170, 64))
    expected, _ = reference.attention(q, k, v, is_causal=is_causal)
    v[1, 0, 100, 5] = v[1, 0, 130, 5] = v[1, 1, 0, 9] = value
    out, lse = sage_aot.attn(q, k, v, is_causal=is_causal, pv_accum=pv_accum, return_lse=True, **options)
    spoilt = torch.zeros_like(out, dtype=torch.bool)
    spoilt[1, :2, 80 if is_causal else 0:, 5] = True  # row 80 is the first that sees key 100
    spoilt[1, 2:, :, 9] = True
    assert lse.isfinite().all()
    assert torch.equal(out.isnan(), spoilt)
    assert reference.measure(out[~spoilt], expected[~spoilt]).cosine > 0.998


@pytest.mark.parametrize("arch", ["sm80", "sm89"])
def test_what_no_row_sees_spoils_nothing(monkeypatch, arch):
    monkeypatch.setenv("SAGE_AOT_EMULATE", arch)
    q, k, v = draw((1, 1, 70, 64), (1, 1, 40, 64))
    q[0, 0, 7, 3] = k[0, 0, 0, 1] = math.nan
    v[0, 0, 0, 2] = math.inf
    out, lse = sage_aot.attn(q, k, v, is_causal=True, return_lse=True)  # the first 30 rows see no key
    assert (out[:, :, :30] == 0).all() and (lse[:, :, :30] == -math.inf).all()
    assert out[:, :, 30:].isnan().all() and lse[:, :, 30:].isnan().all()


@pytest.mark.parametrize("smooth_v", [False, True])
def test_values_whose_sum_is_beyond_f32(pv, smooth_v):
    q, k, v = draw((1, 1, 64, 64), (1, 1, 300, 64))
    v[..., 2] = 1e38
    out, (expected, _) = sage_aot.attn(q, k, v, smooth_v=smooth_v), reference.attention(q, k, v)
    assert out.isfinite().all() and ((out[..., 2] / expected[..., 2] - 1).abs() < 0.1).all()
    assert reference.measure(out[..., 3:], expected[..., 3:]).cosine > 0.996


def test_values_that_less_their_mean_are_beyond_f32(pv):
    """A mean beyond f32 counts as zero; the other channels keep their means."""
    q, k, v = draw((1, 1, 64, 64), (1, 1, 3, 64))
    v[0, 0, :, 2] = torch.tensor([3e38, -3e38, -3e38])
    v[..., 3] += 8.0
    out, (expected, _) = sage_aot.attn(q, k, v, smooth_v=True), reference.attention(q, k, v)
    assert out.isfinite().all() and (out[..., 2] - expected[..., 2]).abs().max() < 0.3 * 3e38
    assert reference.measure(out[..., 3:], expected[..., 3:]).cosine > 0.98


def test_fma_rounds_once():
    """Sums that f64 rounds to the middle of two f32, from either side and of subnormals too, and random ones against
    exact arithmetic."""
    below, above = (1 + 2.0**-23) * 2.0**-12, (1 - 2.0**-23) * 2.0**-12
    random = torch.randn(3, 300, generator=torch.Generator().manual_seed(1)) * torch.tensor([1.0, 1.0, 1e5])[:, None]
    hard = torch.tensor([[below, -below, below, below], [above, above, -above, above],
                         [1 + 2.0**-23, -1 - 2.0**-23, 1 + 2.0**-23, 1.0]])
    subnormal = torch.tensor([[below * 2.0**-63], [above * 2.0**-63], [2.0**-130 + 2.0**-149]])
    for a, b, c in (*hard.T, *subnormal.T, *-subnormal.T * torch.tensor([1.0, -1.0, 1.0]), *random.T):
        exact = Fraction(a.item()) * Fraction(b.item()) + Fraction(c.item())
        got = fma(a, b, c)
        distances = [abs(Fraction(x.item()) - exact) for x in (got, *(got.nextafter(got.new_tensor(end))
                                                                      for end in (-math.inf, math.inf)))]
        assert distances[0] <= min(distances[1:])
    infinite = torch.tensor([math.inf, math.nan, 3e38])
    assert torch.equal(fma(infinite, torch.tensor(2.0), torch.tensor(1.0)).isfinite(), torch.zeros(3).bool())


def test_equal_keys_leave_the_log_sum_exp_exact(pv):
    """Smoothing leaves zeros of K: a score is then row_bias alone, the query times K's mean, in f32."""
    q, k, v = draw((1, 2, 100, 64), (1, 2, 130, 64))
    k = (5 * k[:, :, :1]).expand_as(k)
    (_, lse), (_, expected) = sage_aot.attn(q, k, v, return_lse=True), reference.attention(q, k, v)
    folding = 0.0 if pv == "f16" else 2.0**-7 * math.log(2.0)  # attn/mma/softmax.cuh: how far the constant of P rounds
    assert ((lse - expected).abs() <= 2e-5 + 1e-5 * expected.abs() + folding).all()


@pytest.mark.parametrize(("q_shape", "kv_shape"), [((1, 2, 0, 64), (1, 2, 5, 64)), ((0, 2, 4, 64), (0, 2, 5, 64)),
                                                   ((1, 0, 4, 64), (1, 2, 5, 64))])
def test_no_queries(q_shape, kv_shape):
    q, k, v = draw(q_shape, kv_shape)
    out, lse = sage_aot.attn(q, k, v, return_lse=True)
    assert out.shape == q.shape and lse.shape == q.shape[:3]


@pytest.mark.parametrize("smooth_q", [False, True])
def test_no_keys(smooth_q):
    q, k, v = draw((1, 2, 3, 64), (1, 2, 0, 64))
    out, lse = sage_aot.attn(q, k, v, smooth_q=smooth_q, return_lse=True)
    assert (out == 0).all() and (lse == -math.inf).all()


def test_one_key_returns_its_value(pv):
    q, k, v = draw((1, 1, 3, 64), (1, 1, 1, 64))
    assert torch.allclose(sage_aot.attn(q, k, v).float(), v.float().expand(1, 1, 3, 64), rtol=0.01)


def test_emulated_arch_is_named_by_the_environment(monkeypatch):
    manifest = default_library().manifest
    monkeypatch.delenv("SAGE_AOT_EMULATE", raising=False)
    assert emulated_arch(manifest) == "sm89"
    monkeypatch.setenv("SAGE_AOT_EMULATE", "")
    assert emulated_arch(manifest) == "sm89"
    monkeypatch.setenv("SAGE_AOT_EMULATE", "sm80")
    assert emulated_arch(manifest) == "sm80"
    monkeypatch.setenv("SAGE_AOT_EMULATE", "sm70")
    with pytest.raises(UnsupportedError, match="SAGE_AOT_EMULATE: expected one of .*ptx80, sm80, .*; got 'sm70'"):
        sage_aot.attn(*draw((1, 1, 1, 64), (1, 1, 1, 64)))


def test_other_devices_are_refused():
    with FakeTensorMode():  # torch without the device makes no other tensors there
        q = torch.empty(1, 1, 4, 64, dtype=torch.bfloat16, device="xpu")
    for call in (sage_aot.attn, sage_aot.train_attn, lambda q, k, v: sage_aot.quantize_kv(k, v)):
        with pytest.raises(sage_aot.ArgumentError, match="must be CUDA or CPU tensors, got device xpu"):
            call(q, q, q)


@pytest.mark.kernels("sm80", "sm90", "ptx80")
def test_info_names_versions_kernels_and_emulation():
    report, manifest = sage_aot.info(), default_library().manifest
    assert f"sage_aot {sage_aot.__version__}" in report and f"torch {torch.__version__}" in report
    assert f"kernels: {len(manifest.kernels)}, complete, compiled by {manifest.compiler}, in " in report
    assert "\n  sm80: compute capability 8.0 and later 8.x except 8.7, driver from 525, not run on hardware\n" in report
    assert "\n  sm90: compute capability 9.0, driver from 525, ran on NVIDIA H200\n" in report
    assert ("\n  ptx80: compute capability 8.0 and later, driver from 575, ran on NVIDIA H200 through its driver's "
            "compiler\n") in report
    assert "CPU tensors: emulation of the sm89 kernels" in report


def test_info_says_that_a_folder_is_narrowed_or_retargeted(monkeypatch):
    manifest = dataclasses.replace(default_library().manifest, complete=False, retarget="sm_90")
    monkeypatch.setattr(info, "default_library", lambda: SimpleNamespace(manifest=manifest, folder="here"))
    assert f"kernels: {len(manifest.kernels)}, narrowed (some of what can be built was left out), " in sage_aot.info()
    assert "built for sm_90 instead of their own archs: for tests only" in sage_aot.info()


def test_info_of_a_machine_without_a_gpu_names_no_defect(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(info, "loaders_installed", lambda: ["cupy-cuda12x 14.2.0"])
    report = sage_aot.info()
    assert "missing:" not in report and "loaders installed: cupy-cuda12x 14.2.0" in report
    assert "a GPU would need a CUDA build of torch (this one is for CPUs)\n" in report
    monkeypatch.setattr(info, "loaders_installed", list)
    assert "a GPU would need a CUDA build of torch (this one is for CPUs)" in sage_aot.info()
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert "a GPU would need a driver for CUDA 13.0, which this torch was built for" in sage_aot.info()


@pytest.mark.kernels("sm80", "sm90", "ptx80")
def test_info_of_a_gpu(monkeypatch):
    """info() names the loader, the driver and the kernels that the GPU would run, or what is missing."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(info, "default_driver", lambda: SimpleNamespace(name="cupy", version="14.2.0", cuda=12080))
    monkeypatch.setattr(info, "gpu_here", lambda device: Gpu((8, 6), 12080, "NVIDIA RTX A5000"))
    report = sage_aot.info()
    assert "\nloader: cupy 14.2.0, driver for CUDA 12.8\n" in report
    assert "\ncuda:0 NVIDIA RTX A5000, compute capability 8.6, driver for CUDA 12.8\n  sage_attn_sm86_" in report
    monkeypatch.setattr(info, "gpu_here", lambda device: Gpu((7, 5), 12080, "NVIDIA T4"))
    assert "\n  missing: no kernels for this GPU (NVIDIA T4, " in sage_aot.info()

    def without():
        raise UnsupportedError("nothing loads")

    monkeypatch.setattr(info, "default_driver", without)
    assert "\nmissing: nothing loads\n" in sage_aot.info()


def test_info_reports_an_arch_that_cannot_be_emulated(monkeypatch):
    monkeypatch.setenv("SAGE_AOT_EMULATE", "sm70")
    assert sage_aot.info().splitlines()[-1].startswith("missing: SAGE_AOT_EMULATE: expected one of ")


def test_info_counts_what_a_kernel_executes():
    record = next(record for record in default_library().manifest.every_attention() if record.main_loop)
    counts = f"{record.main_loop.matrix} matrix and {record.main_loop.other} other instructions in the main loop"
    assert info.describe(record) == f"{record.name}: {record.machine.registers} registers, {counts}"
    bare = dataclasses.replace(record, main_loop=None)
    assert info.describe(bare) == f"{record.name}: {record.machine.registers} registers"


def test_info_says_what_is_missing(monkeypatch, tmp_path):
    monkeypatch.setenv("SAGE_AOT_KERNELS", str(tmp_path))
    assert "missing: no kernels" in sage_aot.info()


@pytest.mark.parametrize("smooth_v", [False, True])
@pytest.mark.parametrize("qk", ["int8", "int4"])
@pytest.mark.parametrize("arch", ["sm80", "sm89"])
def test_smoothing_pays_where_it_should(monkeypatch, arch, qk, smooth_v):
    monkeypatch.setenv("SAGE_AOT_EMULATE", arch)
    q, k, v = draw((1, 2, 256, 64), (1, 2, 256, 64), "outlier")
    v += 8.0
    expected, _ = reference.attention(q, k, v)

    def error(**options):
        return reference.measure(sage_aot.attn(q, k, v, qk=qk, **options), expected).relative_l1

    assert error(smooth_q=True, smooth_v=smooth_v) < 1.05 * error(smooth_q=False, smooth_v=smooth_v)
    if qk == "int4":
        assert error(smooth_q=True) < 0.7 * error(smooth_q=False, smooth_k=False)
    if arch == "sm89" and qk == "int8":
        assert error(smooth_v=True) < 0.5 * error(smooth_v=False)


@pytest.mark.parametrize(("arch", "qk"), [
    ("sm80", "int8"), ("sm80", "int4"), ("sm89", "int8"), ("sm89", "int4"), ("sm90", "int8")])
def test_rotation_takes_off_what_a_large_channel_costs(monkeypatch, arch, qk):
    """The error that remains with rotation is P and V's at 8 bits, and at 4 bits also the rounding of Q and K. At 8
    bits the channels of K in heavy4 are divided where K is not rotated."""
    monkeypatch.setenv("SAGE_AOT_EMULATE", arch)
    for kind in ("heavy1", "heavy4"):
        q, k, v = draw((1, 1, 128, 128), (1, 1, 700, 128), kind)
        expected, _ = reference.attention(q, k, v)
        error, without = (reference.measure(sage_aot.attn(q, k, v, qk=qk, rotate=rotate), expected).relative_l1
                          for rotate in (True, False))
        assert error < (0.75 if (qk, kind) != ("int8", "heavy4") else 1.0) * without
        assert torch.equal(sage_aot.attn(q, k, v, qk=qk), sage_aot.attn(q, k, v, qk=qk, rotate=qk == "int4"))


@pytest.mark.parametrize("arch", ["sm80", "sm89", "sm90"])
def test_channels_of_k_are_divided_unless_q_has_them_too(monkeypatch, arch):
    """The mean of K is next to zero: without smoothing nothing else changes."""
    monkeypatch.setenv("SAGE_AOT_EMULATE", arch)
    for of_q, of_k, at_most in ((1.0, 30.0, 0.6), (30.0, 30.0, 1.1), (30.0, 1.0, 1.1), (1.0, 1.0, 1.1)):
        q, k, v = draw((1, 2, 128, 128), (1, 1, 700, 128))
        q[..., 3:7] *= of_q
        k[..., 3:7] *= of_k
        expected, _ = reference.attention(q, k, v)
        error, without, of_kv = (reference.measure(out, expected).relative_l1 for out in (
            sage_aot.attn(q, k, v), sage_aot.attn(q, k, v, smooth_k=False),
            sage_aot.attn(q, sage_aot.quantize_kv(k, v))))
        assert error < at_most * without
        assert of_kv < (0.75 if of_q < of_k else 1.3) * without


@pytest.mark.parametrize(("of_q", "of_k", "keys", "part", "factor"), [
    (1, 1, 700, "all", 1), (1, 1, 20, "all", 1), (1, 1, 3, "all", 1), (1, 30, 700, "all", 1 / 4), (1, 30, 15, "all", 1),
    (1, 30, 700, "kv", 1 / 2), (30, 30, 700, "all", 1), (30, 1, 700, "all", 1), (1, 4000, 700, "all", 1 / 16),
    (4, 120, 700, "all", 1 / 4)])
def test_divisors_of_channels(of_q, of_k, keys, part, factor):
    """Four of 128 channels are larger, by powers of two or nearly: what is more than a fourth of the excess is theirs.
    Other channels keep their values, and so do ordinary inputs."""
    q, k, _ = draw((1, 4, 300, 128), (1, 2, keys, 128))
    q[..., 3:7] *= of_q
    k[..., 3:7] *= of_k
    problem = dataclasses.replace(check(Given("dense", q, k, k), Options()), part=part)
    kernels = kernels_of("sm90", wanted_values(problem), default_library().manifest)
    _, factors, unit = statistics_of_k(problem, kernels, q.float(), k.float())
    expected = torch.ones(1, 2, 128)
    expected[..., 3:7] = factor
    assert torch.equal(factors, expected) and torch.equal(unit, torch.full((1, 2, 1), 1.0 if factor == 1 else 16.0))


@pytest.mark.parametrize("arch", ["sm80", "sm89"])
def test_clipping_pays_at_4_bits_alone(monkeypatch, arch):
    monkeypatch.setenv("SAGE_AOT_EMULATE", arch)
    q, k, v = draw((1, 1, 256, 128), (1, 1, 1024, 128))
    expected, _ = reference.attention(q, k, v)
    clipped, whole = (reference.measure(sage_aot.attn(q, k, v, qk="int4", clip=clip), expected).relative_l1
                      for clip in (True, False))
    assert clipped < 0.9 * whole
    assert torch.equal(sage_aot.attn(q, k, v, clip=True), sage_aot.attn(q, k, v, clip=False))


def test_4_bits_on_hopper_says_what_to_use(monkeypatch):
    monkeypatch.setenv("SAGE_AOT_EMULATE", "sm90")
    with pytest.raises(UnsupportedError, match="no kernel for sm90, .*qk='int4', .*; use qk='int8'"):
        sage_aot.attn(*draw((1, 1, 4, 64), (1, 1, 4, 64)), qk="int4")


@pytest.mark.parametrize("size", [40.0, 150.0, 300.0])
def test_logits_of_any_size(pv, size):
    q, _, v = draw((1, 1, 100, 64), (1, 1, 100, 64))
    q = (q.float() * size).bfloat16()
    out, (expected, _) = sage_aot.attn(q, q, v), reference.attention(q, q, v)
    ratio = out.double().norm(dim=-1) / expected.norm(dim=-1)
    assert reference.measure(out, expected).cosine > 0.999
    assert 0.9 < ratio.min() and ratio.max() < 1.1


def test_every_family_has_a_softmax_in_the_emulation():
    from sage_aot._backends.emulation.attention import softmax_of
    from sage_aot._families import FAMILIES

    assert all(callable(softmax_of(family).step) for family in FAMILIES)


def test_an_out_of_another_dtype_is_named_as_it_came():
    """The shape is named as it came also where the heads of one query become rows of one head."""
    q, k, v = draw((1, 6, 1, 16), (1, 2, 8, 16))
    with pytest.raises(sage_aot.ArgumentError, match=r"of q, \(1, 6, 1, 16\) .* got \(1, 6, 1, 16\) torch.float64"):
        sage_aot.attn(q, k, v, out=torch.empty_like(q, dtype=torch.float64))
