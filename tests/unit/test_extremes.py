"""Values at the ends of their ranges, emulated: scores of any size, inputs up to the largest finite numbers, and V of
one value. Right answers are float64's."""

from __future__ import annotations

import math
import os
from fractions import Fraction

import numpy as np
import pytest
import torch

import sage_aot
from sage_aot._backends.emulation.arithmetic import fma_down, to_f32

OPTIONS = [("sm80", {}), ("sm80", {"qk": "int4"}), ("sm89", {}), ("sm89", {"qk": "int4"}),
           ("sm89", {"pv_accum": "two_level_f16"}), ("sm90", {}), ("sm90", {"smooth_q": True}), ("sm120", {}),
           ("sm120", {"pv_accum": "two_level_f32"}), ("sm120", {"qk": "nvfp4", "smooth_q": True})]
"""An arch and options for every softmax and every way in which P·V adds up."""

LARGEST = {"int8": 0.07, "int4": 0.45, "nvfp4": 0.4}
"""Relative L1 of N(0, 1) whose scores are large, by the type of Q and K: quantization decides which of two keys with
nearly equal scores a row takes, whatever the size of the scores."""


@pytest.fixture(params=OPTIONS, ids=lambda request: f"{request[0]}-{'-'.join(map(str, request[1].values()))}")
def options(request, monkeypatch):
    """Options of a call, on the arch that CPU calls emulate for them."""
    arch, of_call = request.param
    monkeypatch.setenv("SAGE_AOT_EMULATE", arch)
    return of_call


def draw(rows=256, seed=0, heads=2, headdim=64):
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(1, heads, rows, headdim, generator=generator) for _ in range(3))


def with_scores(q, k, largest):
    """q and k as bf16 values in f32, scaled alike so that their largest score is so large."""
    factor = math.sqrt(largest / ((q.double() @ k.double().mT).abs().max().item() / math.sqrt(q.shape[-1])))
    return ((x * factor).bfloat16().float() for x in (q, k))


def exact(q, k, v, is_causal=False):
    scores = q.double() @ k.double().mT / math.sqrt(q.shape[-1])
    if is_causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril(scores.shape[-1] - scores.shape[-2])
        scores = scores.masked_fill(~seen, -math.inf)
    return scores.softmax(-1) @ v.double(), scores.logsumexp(-1)


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_scores_of_any_size(options, is_causal):
    """No row is lost, and the error does not grow, up to 1e30."""
    for largest in (1e4, 1e6, 1e7, 1e8, 1e9, 1e10, 1e15, 1e20, 1e30):
        q, k, v = draw()
        q, k = with_scores(q, k, largest)
        out, lse = sage_aot.attn(q, k, v, is_causal=is_causal, return_lse=True, **options)
        right, right_lse = exact(q, k, v, is_causal)
        assert not (out == 0).all(-1).any() and out.isfinite().all() and lse.isfinite().all()
        assert (out - right).abs().sum() <= LARGEST[options.get("qk", "int8")] * right.abs().sum(), largest
        assert (lse - right_lse).abs().mean() <= LARGEST[options.get("qk", "int8")] * right_lse.abs().mean(), largest


def test_keys_with_equal_scores_share_a_row_whatever_their_size(options):
    """Half of the keys are one key, the other half its opposite: a row takes the mean of V over its half."""
    _, _, v = draw(128)
    signs = torch.where(torch.arange(128) % 2 == 0, 1.0, -1.0)[None, None, :, None]
    key = torch.ones(1, 2, 1, 64) * signs
    for size in (1.0, 1e3, 1e6, 1e12):
        out, lse = sage_aot.attn(key * size, key, v, return_lse=True, smooth_k=False, **options)
        right, right_lse = exact(key * size, key, v)
        assert (out - right).abs().max() <= 0.1
        assert ((lse - right_lse).abs() <= 0.05 + 2.0**-6 * right_lse.abs()).all()


@pytest.mark.parametrize("slope", [0.2, 0.4])
def test_scores_that_fall_from_key_to_key(options, slope):
    """Weights fall by e**slope a key: references that followed them all the way down would take the sums beyond f32."""
    q, k, v = draw(768)
    q, falling = q[:, :, :70].clone(), torch.arange(768, 0, -1.0)
    q[..., 0], k[..., 0] = 8.0, slope * falling
    out, lse = sage_aot.attn(q, k, v, return_lse=True, **options)
    right, right_lse = exact(q, k, v)
    assert out.isfinite().all() and lse.isfinite().all()
    assert (out - right).abs().sum() <= 0.6 * right.abs().sum()


def largest_of(dtype):
    return torch.finfo(dtype).max


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("further", [{}, {"smooth_k": False}, {"smooth_v": True}, {"rotate": True}, {"scale": 1e6}],
                         ids=str)
def test_finite_inputs_give_finite_outputs(options, dtype, further):
    """Elements of either sign near the largest that their dtype holds, with ordinary ones."""
    generator = torch.Generator().manual_seed(3)
    for which in ("q", "k", "v", "qkv"):
        tensors = {}
        for name in "qkv":
            x = torch.randn(1, 2, 70, 64, generator=generator)
            share = torch.rand(x.shape, generator=generator) - 0.5
            largest = (share + share.sign() * 0.5) * largest_of(dtype)
            tensors[name] = (largest if name in which else x).to(dtype)
        out, lse = sage_aot.attn(**tensors, return_lse=True, **{**options, **further})
        assert out.isfinite().all(), which
        assert lse.isfinite().all(), which


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("further", [{}, {"smooth_v": True}], ids=str)
def test_vast_values_of_a_key_leave_outputs_finite(options, dtype, further):
    """Keys that a sample has or does not have, that rows look at or away from, alone or with another key whose values
    are as vast, of the other sign."""
    q, k, v = draw(200, seed=4)
    vast, away = largest_of(dtype), torch.arange(200, 0, -1.0) * 0.4
    for key in (0, 1, 37, 130, 199):
        for sharp in (None, away, away.flip(0)):
            for other in (0.0, -1.0):
                own_q, own_k, own_v = q.clone(), k.clone(), v.clone()
                if sharp is not None:
                    own_q[..., 0], own_k[..., 0] = 8.0, sharp
                own_v[:, 0, (key + 70) % 200, ::4] += other * vast
                own_v[:, 0, key, ::2] = vast
                out = sage_aot.attn(*(x.to(dtype) for x in (own_q, own_k, own_v)), **{**options, **further})
                assert out.isfinite().all(), (key, sharp, other)


def test_vast_values_of_a_key_are_right_up_to_1e19(options):
    """N(0, 1) otherwise: errors of a channel's values are those of the vast one. Up to 1e30 with f16 P·V."""
    vast = 1e30 if os.environ["SAGE_AOT_EMULATE"] == "sm80" else 1e19
    q, k, v = draw(70)
    for key in range(0, 70, 3):
        own = v.clone()
        own[:, :, key, 5] = vast
        out, right = sage_aot.attn(q, k, own, **options), exact(q, k, own)[0]
        error = (out - right)[..., 5].abs().sum() / right[..., 5].abs().sum()
        assert error <= LARGEST[options.get("qk", "int8")], key


@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_scores_of_one_key_stay_finite_up_to_the_largest_elements(options, sign):
    """Rows and keys that are all one value: sums of products reach the bound of the type of Q and K."""
    for exponent in range(340, 386, 2):
        size = min(10 ** (exponent / 10), 3e38)
        q, k = (torch.full((1, 1, 1, 64), value).bfloat16() for value in (sign * size, size))
        out, lse = sage_aot.attn(q, k, torch.ones_like(k), return_lse=True, **options)
        assert (out - 1.0).abs().max() <= (0.2 if options.get("qk") == "nvfp4" else 0.01), size
        assert lse.isfinite().all(), size


def test_a_row_far_from_the_mean_of_queries(options):
    """The difference of the row and the mean is beyond f32, though the sum of all rows is not."""
    q, k, v = draw(70)
    q = torch.full_like(q, -largest_of(torch.float32) / 35)
    q[:, :, 0] *= -35
    k[:, :, 7] += 2.0  # which that row sees alone
    out = sage_aot.attn(q, k, v, scale=1e-12, **{**options, "smooth_q": True})[:, :, 0]
    assert (out - v[:, :, 7]).abs().max() <= (0.8 if options.get("qk") == "nvfp4" else 0.2)


@pytest.mark.parametrize("smoothing", [{}, {"smooth_q": True}], ids=str)
def test_scores_of_means_stay_finite(options, smoothing):
    """The product of a query and K's mean, and of Q's mean and a key, are scores of their own: of 1e63 here."""
    q, k, v = draw(70)
    for large_q, large_k in ((1e38, 1e25), (1e25, 1e38)):
        rows = [(x / 8 + offset) * large for x, offset, large in ((q, 0.5, large_q), (k, -0.5, large_k))]
        out, lse = sage_aot.attn(*rows, v, return_lse=True, **{**options, **smoothing})
        assert out.isfinite().all() and lse.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_largest_value_comes_back(options, dtype):
    """Rounding V to FP8, or P, would take it beyond what the dtype holds."""
    q, k, _ = (x.to(dtype) for x in draw(33))
    v = torch.full_like(k, largest_of(dtype))
    v[..., ::2] *= -1
    out = sage_aot.attn(q, k, v, **options)
    assert torch.equal(out, v) or options.get("qk") == "nvfp4" and (out.double() / v.double() - 1.0).abs().max() <= 0.2


@pytest.mark.parametrize("further", [{}, {"smooth_v": True}], ids=str)
def test_a_constant_v_comes_back(options, further):
    """V comes back in f32, whatever the weights: few keys, equal scores, peaked scores. Not with NVFP4, whose sums of P
    are taken before rounding (docs/decisions.md), but where V is smoothed."""
    bound = 0.2 if options.get("qk") == "nvfp4" and not further else 1e-3
    entries = torch.tensor([(sigma, value) for sigma in (0.0, 0.3, 1.0, 4.0, 30.0) for value in (1.0, -0.37)])
    sigma, value = entries.T[..., None, None, None]  # of each batch entry
    for keys in (1, 2, 3, 5, 17, 100, 300):
        q, k, _ = draw(keys, seed=keys)
        for is_causal in (False, True):
            out = sage_aot.attn(q * sigma, k * sigma, value * torch.ones_like(k), is_causal=is_causal,
                                **{**options, **further})
            off = (out / value - 1.0).abs().amax((1, 2, 3))
            assert (off <= bound).all(), (keys, is_causal, entries[off > bound])


@pytest.mark.parametrize("arch", ["sm80", "sm89", "sm90"])
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_gradients_do_not_explode(monkeypatch, arch, is_causal):
    """P is at most 1, however large the scores: no gradient exceeds what the products of largest elements can make, and
    dV is right where rows see one key."""
    monkeypatch.setenv("SAGE_AOT_EMULATE", arch)
    for largest in (1e5, 1e7, 1e8, 1e10, 1e20, 1e30):
        q, k, v = draw()
        q, k = with_scores(q, k, largest)
        grad = draw(seed=5)[0].bfloat16()
        leaves = [x.bfloat16().requires_grad_() for x in (q, k, v)]
        sage_aot.train_attn(*leaves, is_causal=is_causal).backward(grad)
        exact_leaves = [x.detach().double().requires_grad_() for x in leaves]
        exact(*exact_leaves, is_causal)[0].backward(grad.double())
        dq, dk, dv = (x.grad.double() for x in leaves)
        right = exact_leaves[2].grad
        assert (dv - right).abs().sum() <= 0.15 * right.abs().sum(), largest
        of_scores = (grad.double().abs() @ v.double().abs().mT).max() / math.sqrt(q.shape[-1])
        assert dq.abs().max() <= 2 * of_scores * k.abs().max()
        assert dk.abs().max() <= 2 * of_scores * q.abs().max() * q.shape[2]


@pytest.mark.parametrize("arch", ["sm80", "sm89", "sm90"])
@pytest.mark.parametrize("which", ["q", "k", "qk"])
def test_gradients_are_finite_beyond_all_scores(monkeypatch, arch, which):
    monkeypatch.setenv("SAGE_AOT_EMULATE", arch)
    leaves = [(x * (1e37 if name in which else 1.0)).bfloat16().requires_grad_() for name, x in zip("qkv", draw(70))]
    sage_aot.train_attn(*leaves).backward(draw(70, seed=5)[0].bfloat16())
    assert all(x.grad.isfinite().all() for name, x in zip("qkv", leaves) if name not in which)
    assert not any(x.grad.isnan().any() for x in leaves)


@pytest.mark.parametrize("arch", ["sm80", "sm89", "sm90"])
@pytest.mark.parametrize("of_grad", [1.0, 1e-6])
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_gradients_of_large_q_and_small_k(monkeypatch, arch, of_grad, is_causal):
    """Ordinary scores, of which one factor is large: errors are those of N(0, 1). Two q heads read a KV head."""
    monkeypatch.setenv("SAGE_AOT_EMULATE", arch)
    grad = (draw(seed=5)[0] * of_grad).bfloat16()
    for factor in (1.0, 1e14, 1e18, 1e22, 1e-14, 1e-18, 1e-22, *((1e25, 1e-25) if of_grad == 1.0 else ())):
        q, k, v = draw()
        leaves = [x.bfloat16().requires_grad_() for x in (q * factor, k[:, :1] / factor, v[:, :1])]
        sage_aot.train_attn(*leaves, is_causal=is_causal).backward(grad)
        exact_leaves = [x.detach().double().requires_grad_() for x in leaves]
        exact(exact_leaves[0], *(x.expand_as(q) for x in exact_leaves[1:]), is_causal)[0].backward(grad.double())
        for x, right in zip(leaves, exact_leaves):
            assert (x.grad.double() - right.grad).norm() <= 0.03 * right.grad.norm(), factor


def test_f16_rows_that_see_one_key_have_no_gradient_of_scores(monkeypatch):
    """dS is P · (dP - D), and D equals dP where one key has all the weight: f16 P·V keeps such outputs to 11 bits. FP8
    P·V rounds V to four, and D with it: docs/training.md."""
    for arch, bound in (("sm80", 4e-3), ("sm89", 0.05), ("sm90", 0.05)):
        monkeypatch.setenv("SAGE_AOT_EMULATE", arch)
        q, k, v = (x[:, :, :1].bfloat16().requires_grad_() for x in draw())
        grad = draw(seed=5)[0][:, :, :1].bfloat16()
        sage_aot.train_attn(q, k, v).backward(grad)
        of_scores = (grad.float() * v.float()).abs().sum(-1).max() / math.sqrt(q.shape[-1])
        assert q.grad.abs().max() <= bound * of_scores * k.abs().max(), arch
        assert k.grad.abs().max() <= bound * of_scores * q.abs().max(), arch


def test_numbers_are_rounded_as_f32_rounds_them():
    rng = np.random.default_rng(0)
    for x, y in (rng.standard_normal((2000, 2)) * 2.0 ** rng.integers(-30, 30, (2000, 2))).astype(np.float32):
        assert to_f32(float(x) * float(y)) == float(x * y)
        assert to_f32(1.0 / float(x)) == float(np.float32(1.0) / x)


def test_fma_down_is_the_largest_float_that_is_no_larger():
    rng = np.random.default_rng(0)
    def draw_floats(size):
        return (rng.standard_normal(size) * 2.0 ** rng.integers(-40, 40, size)).astype(np.float32)
    a, b, c = (draw_floats(2000) for _ in range(3))
    c[:500] = (-a[:500].astype(np.float64) * b[:500]).astype(np.float32)  # what is left is a rounding
    found = fma_down(*map(torch.from_numpy, (a, b, c))).numpy()
    for x, y, z, got in zip(a, b, c, found):
        right = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
        assert Fraction(float(got)) <= right < Fraction(float(np.nextafter(got, np.float32(np.inf))))
    assert fma_down(*(torch.tensor([x]) for x in (-math.inf, 1.0, -1.0))).item() == -math.inf


@pytest.mark.parametrize("alike", [32, 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("arch", "pv_accum"), [
    ("sm80", "auto"), ("sm89", "auto"), ("sm89", "two_level_f16"), ("sm90", "auto")])
def test_a_key_keeps_its_values_where_all_others_have_those_of_one(arch, pv_accum, dtype, alike, monkeypatch):
    """Samples of the first `alike` channels are one value; the others share a factor with them."""
    monkeypatch.setenv("SAGE_AOT_EMULATE", arch)
    only_first = torch.arange(256).expand(256, 256) == 0
    for seed in range(4):
        q, k, v = draw(seed=seed, heads=1)
        v[:, :, 1:, :alike] = v[:, :, 1:2, :alike]
        q, k, v = (x.to(dtype) for x in (q, k, v))
        out = sage_aot.attn(q, k, v, smooth_v=True, attn_mask=only_first, pv_accum=pv_accum).float()
        expected = v[:, :, :1].float().expand_as(out)
        error, size = ((x.abs().unflatten(-1, (2, 32)).sum((0, 1, 2, 4))) for x in (out - expected, expected))
        assert (error < 0.06 * size).all()
