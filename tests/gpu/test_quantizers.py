"""The quantizers against the emulation, bit for bit."""

from __future__ import annotations

import math

import pytest
import torch
from layout import read_back
from variants import QUANTIZERS, each_padded_quantizer, run

from sage_aot._backends.emulation.quantize import quantize
from sage_aot._tools import reference

pytestmark = pytest.mark.gpu


def ways(spec):
    """Options that decide what is done to rows before they are rounded, and how."""
    found = [{"rotate": False}, {"rotate": True}]
    return [*found, {"rotate": True, "clip": False}] if spec.qk == "int4" else found


def draw(spec, q_shape, kv_shape, seed):
    """N(0, 1) in bf16; shapes are (batch, heads, seq)."""
    generator = torch.Generator("cuda").manual_seed(seed)
    return reference.inputs("normal", (*q_shape, spec.headdim), (*kv_shape, spec.headdim), torch.bfloat16, generator)


def compare(spec, q, k, v, **options):
    result = run(spec, q, k, v, **options)
    found = read_back(result)
    expected = quantize(result.plan.problem, result.plan.kernels, q.cpu(), k.cpu(), v.cpu())
    for name in ("q", "k", "v", "q_scale", "k_scale", "v_scale", "k_mean", "k_factor", "q_unit", "v_mean", "v_factor",
                 "k_spoilt", "v_spoilt"):
        assert torch.equal(found[name], getattr(expected, name)), name
    spoilt = expected.row_bias.isnan()
    assert torch.equal(found["row_bias"].isnan(), spoilt)
    assert torch.equal(found["row_bias"][~spoilt], expected.row_bias[~spoilt])
    if spec.q == "qsmooth":
        assert torch.equal(found["q_mean"], expected.q_mean)
        keys = slice(result.plan.problem.seqlen_kv)  # the padding is never seen
        assert torch.equal(found["delta_s"][..., keys], expected.delta_s[..., keys])
    return result


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", reference.INPUT_CLASSES)
@pytest.mark.parametrize("spec", QUANTIZERS, ids=[spec.name for spec in QUANTIZERS])
def test_bits_of_every_quantizer(spec, kind, dtype):
    generator = torch.Generator("cuda").manual_seed(1)
    q, k, v = reference.inputs(kind, (2, 4, 300, spec.headdim), (2, 2, 1100, spec.headdim), dtype, generator)
    for options in ways(spec):
        compare(spec, q, k, v, **options)


@each_padded_quantizer(1, 33, 40, 80, 100, 129, 160, 200)
def test_bits_of_padded_head_dims(spec, headdim):
    generator = torch.Generator("cuda").manual_seed(2)
    q, k, v = reference.inputs("outlier", (1, 2, 65, headdim), (1, 1, 130, headdim), torch.bfloat16, generator)
    for options in ways(spec):
        compare(spec, q, k, v, **options)


@pytest.mark.parametrize("spec", QUANTIZERS, ids=[spec.name for spec in QUANTIZERS])
def test_bits_at_the_ends_of_the_ranges(spec):
    q, k, v = draw(spec, (1, 2, 130), (1, 2, 200), seed=3)
    q[0, 0], k[0, 0], v[..., 7] = 0.0, 0.0, 0.0
    q[0, 1, :64] *= 1e30
    k[0, 1] *= 1e-30
    v[..., 9] *= 1e36
    v[..., 11] *= 1e-36
    compare(spec, q, k, v, scale=1e-10)
    compare(spec, q, k, v, smooth_k=False)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("spec", QUANTIZERS, ids=[spec.name for spec in QUANTIZERS])
def test_bits_next_to_what_is_not_finite(spec, value):
    """Nothing of it reaches a mean or a scale; where it was is remembered."""
    q, k, v = draw(spec, (1, 2, 200), (1, 2, 700), seed=4)
    q[0, 0, 150, 3] = k[0, 0, 411, 7] = k[0, 0, 600, 1] = v[0, 1, 333, 9] = v[0, 1, 20, 9] = v[0, 1, 650, 30] = value
    for options in ways(spec):
        compare(spec, q, k, v, **options)


@pytest.mark.parametrize("spec", QUANTIZERS, ids=[spec.name for spec in QUANTIZERS])
def test_bits_where_sums_are_beyond_f32(spec):
    q, k, v = draw(spec, (1, 1, 100), (1, 1, 300), seed=5)
    q[..., 2], k[..., 3], v[..., 4] = 1e38, 1e38, 1e38
    compare(spec, q, k, v)
    few = v[:, :, :3].clone()
    few[0, 0, :, 5] = few.new_tensor([3e38, -3e38, -3e38])  # less their mean, these are beyond f32
    compare(spec, q, k[:, :, :3], few)


@pytest.mark.parametrize("spec", QUANTIZERS, ids=[spec.name for spec in QUANTIZERS])
def test_f32_that_less_its_mean_would_be_beyond_f32_stays_finite(spec):
    q, k, v = (x.float() for x in draw(spec, (1, 1, 100), (1, 1, 300), seed=6))
    q[..., 7], k[..., 7], v[..., 8] = 0.0, -1e35, -1e35
    k[0, 0, 250, 7] = v[0, 0, 250, 8] = torch.finfo(torch.float32).max
    result = compare(spec, q, k, v, rotate=False)  # of rotated rows the error of 4 bits takes a score beyond f32
    assert result.out.isfinite().all() and result.lse.isfinite().all()
