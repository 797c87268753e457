"""The backward kernels in torch: exact gradients with rounding off, errors with rounding, and what is not finite."""

from __future__ import annotations

import dataclasses
from functools import cache, partial
from typing import NamedTuple

import pytest
import torch

from sage_aot._backends.emulation.attention import attend
from sage_aot._backends.emulation.backend import EmulationBackend
from sage_aot._backends.emulation.backward import GRAD_GROUPS, TILE_ROWS, Rounded, Saved, gradients, saved_of
from sage_aot._backends.emulation.quantize import quantize
from sage_aot._call import pipeline
from sage_aot._call.backends import default_library
from sage_aot._launch.backward import backward_kernels, multiplies_halves
from sage_aot._launch.plan import LOG2_E
from sage_aot._problem.check import check
from sage_aot._problem.given import Given
from sage_aot._problem.options import Options
from sage_aot._tools import reference

ARCHS = ("sm80", "sm89", "sm90")  # P·V in f16, and twice in FP8; sm90 multiplies P and dS in 16 bits
FORMS = ("sm80", "sm90")  # P and dS as integers of 8 bits, and in 16
CAUSAL = [False, True]


class Inputs(NamedTuple):
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    grad_out: torch.Tensor


def draw(queries: int, keys: int, heads: tuple[int, int] = (4, 2), headdim: int = 64, sigma: float = 1.0,
         dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Inputs:
    """N(0, 1), of q and k times sigma; heads: of q, and of k and v."""
    generator = torch.Generator().manual_seed(seed)
    q_shape, kv_shape = (1, heads[0], queries, headdim), (1, heads[1], keys, headdim)
    q, k, v, grad_out = (torch.randn(shape, generator=generator, dtype=torch.float64)
                         for shape in (q_shape, kv_shape, kv_shape, q_shape))
    return Inputs(*(x.to(dtype) for x in (sigma * q, sigma * k, v, grad_out)))


def saved_exactly(q, k, v, out, lse, scale: float) -> Saved:
    """Tensors that a forward pass without quantization leaves."""
    q_scale = torch.full_like(lse, abs(scale) * LOG2_E)
    return Saved(q if scale > 0 else -q, k, q_scale, torch.ones_like(k[..., 0]), v, out, lse)


def without_rounding(inputs: Inputs, scale: float, is_causal: bool, halves: bool) -> tuple[torch.Tensor, ...]:
    """dq, dk and dv in float64."""
    q, k, v, grad_out = inputs
    out, lse = reference.attention(q, k, v, scale=scale, is_causal=is_causal)
    return gradients(saved_exactly(q, k, v, out, lse, scale), grad_out, scale, is_causal, rounding=False, halves=halves)


class Forward(NamedTuple):
    saved: Saved
    scale: float  # of the softmax
    halves: bool  # whether the backward pass multiplies P and dS in 16 bits


def forward(inputs: Inputs, arch: str = "sm80", **options) -> Forward:
    """Tensors that the forward pass of an arch's kernels leaves to train_attn."""
    q, k, v, _ = inputs
    manifest = default_library().manifest
    given = Given("dense", q, k, v)
    problem = check(given, Options(smooth_q=False, rotate=False, p="exp2", **options))
    plan = pipeline.plan_of(EmulationBackend(manifest, arch), problem, -1)
    quantized = quantize(problem, plan.kernels, q, k, v)
    quantized = dataclasses.replace(quantized, row_bias=0.0 * quantized.row_bias)  # of a NaN still one
    out, lse = attend(plan, quantized)
    saved = saved_of(quantized, v, out[:, :, : q.shape[2], : q.shape[3]].to(q.dtype), lse)
    return Forward(saved, problem.softmax_scale, multiplies_halves(backward_kernels(plan, manifest)))


def with_rounding(inputs: Inputs, arch: str = "sm80", **options) -> tuple[torch.Tensor, ...]:
    """out, dq, dk and dv."""
    saved, scale, halves = forward(inputs, arch, **options)
    return saved.out, *gradients(saved, inputs.grad_out, scale, options.get("is_causal", False), halves=halves)


def errors(found: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return torch.tensor([reference.relative_l2(a, b) for a, b in zip(found, expected)])


# --- formulas: with rounding off --------------------------------------------------------------------------------------


class ExactAttention(torch.autograd.Function):
    """Attention in float64 whose backward pass is that of the kernels without rounding."""

    @staticmethod
    def forward(ctx, q, k, v, scale, is_causal):
        out, lse = reference.attention(q, k, v, scale=scale, is_causal=is_causal)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.call = scale, is_causal
        return out

    @staticmethod
    def backward(ctx, grad_out):
        scale, is_causal = ctx.call
        saved = saved_exactly(*ctx.saved_tensors, scale)
        return *gradients(saved, grad_out, scale, is_causal, rounding=False), None, None


@pytest.mark.parametrize("is_causal", CAUSAL)
@pytest.mark.parametrize("queries, keys, scale", [(5, 9, 0.4), (6, 4, 0.4), (3, 5, -0.3)])
def test_gradcheck(queries, keys, scale, is_causal):
    q, k, v, _ = (x.requires_grad_() for x in draw(queries, keys, headdim=8, dtype=torch.float64))
    assert torch.autograd.gradcheck(partial(_attention, scale, is_causal), (q, k, v))


def _attention(scale, is_causal, q, k, v):
    return ExactAttention.apply(q, k, v, scale, is_causal)


@pytest.mark.parametrize("is_causal", CAUSAL)
@pytest.mark.parametrize("queries, keys", [(70, 130), (130, 70), (64, 128), (1, 65), (200, 1)])
@pytest.mark.parametrize("scale", [0.125, -0.2])
@pytest.mark.parametrize("halves", [False, True])
def test_formulas_against_autograd(queries, keys, scale, is_causal, halves):
    """Several tiles on both sides, the last ones with rows that do not exist; two q heads a kv head."""
    inputs = draw(queries, keys, headdim=16, dtype=torch.float64)
    expected = reference.gradients(*inputs, scale=scale, is_causal=is_causal)[1:]
    for found, gradient in zip(without_rounding(inputs, scale, is_causal, halves), expected):
        assert found.shape == gradient.shape and found.dtype == torch.float64
        torch.testing.assert_close(found, gradient, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("arch", FORMS)
def test_queries_that_see_no_key_have_gradients_of_zero(arch):
    inputs = draw(130, 70)
    changed = inputs._replace(grad_out=inputs.grad_out.clone())
    changed.grad_out[:, :, :60] *= 1e4
    _, dq, dk, dv = with_rounding(inputs, arch, is_causal=True)
    _, other_dq, other_dk, other_dv = with_rounding(changed, arch, is_causal=True)
    assert (dq[:, :, :60] == 0).all() and (dq[:, :, 61:] != 0).any(-1).all()  # of one key dS is zero
    assert torch.equal(dq, other_dq) and torch.equal(dk, other_dk)
    assert torch.equal(dv, other_dv)  # though rows 60 to 63 of dO share scales with rows before them


# --- errors: with rounding --------------------------------------------------------------------------------------------

# Relative L2 of O, dQ, dK and dV at 1024 queries and keys of 64 channels, q and k of N(0, sigma²), all else of N(0, 1).
# The first table is of P and dS with a scale per row. Where P·V is of FP8, O has more of an error, and with it D, and
# dQ and dK; dV has not.
ERRORS = {1.0: (0.018, 0.020, 0.020, 0.019), 3.0: (0.044, 0.080, 0.081, 0.044), 5.0: (0.065, 0.183, 0.187, 0.066)}
ERRORS_FP8 = {1.0: (0.038, 0.020, 0.020, 0.019), 3.0: (0.044, 0.098, 0.094, 0.044), 5.0: (0.065, 0.217, 0.210, 0.066)}
ERRORS_HALVES = {**ERRORS_FP8, 1.0: (0.038, 0.015, 0.013, 0.011)}
ERRORS_OF_ARCH = {"sm80": ERRORS, "sm89": ERRORS_FP8, "sm90": ERRORS_HALVES}


@cache
def drawn_with_gradients(sigma: float, seed: int) -> tuple[Inputs, tuple[torch.Tensor, ...]]:
    inputs = draw(1024, 1024, (2, 2), sigma=sigma, seed=seed)
    return inputs, reference.gradients(*inputs)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("sigma", ERRORS)
def test_errors_are_those_of_8_bits(sigma, arch):
    drawn = [drawn_with_gradients(sigma, seed) for seed in range(3)]
    found = torch.stack([errors(with_rounding(inputs, arch), expected) for inputs, expected in drawn]).mean(0)
    limits = torch.tensor(ERRORS_OF_ARCH[arch][sigma])
    assert (found < 1.1 * limits).all(), found


@pytest.mark.parametrize("is_causal", CAUSAL)
@pytest.mark.parametrize("queries, keys, headdim, dtype, options", [
    (70, 130, 64, torch.bfloat16, {}), (130, 70, 96, torch.float16, {}),
    (100, 200, 40, torch.bfloat16, {"scale": -0.1}),
])
@pytest.mark.parametrize("arch", ARCHS)
def test_errors_of_ragged_calls(queries, keys, headdim, dtype, options, is_causal, arch):
    """Channels of Q̂ and K̂ are padded to those of the kernel."""
    inputs = draw(queries, keys, headdim=headdim, dtype=dtype)
    expected = reference.gradients(*inputs, is_causal=is_causal, **options)
    found = with_rounding(inputs, arch, is_causal=is_causal, **options)
    assert [x.shape for x in found] == [x.shape for x in expected]
    limit = torch.tensor([0.03 if arch == "sm80" else 0.045, 0.03, 0.03, 0.03])  # O of FP8 P·V has more of an error
    assert (errors(found, expected) < limit).all(), errors(found, expected)


def test_a_mean_of_k_changes_dq_little():
    """The sum of dS over keys is zero, so that the mean that smoothing takes off K has no part in dQ. The sum of
    rounded dS is not zero: times the mean it would do harm."""
    inputs = draw(1024, 1024, (2, 2))
    mean = 5.0 * torch.randn(64, generator=torch.Generator().manual_seed(1))
    shifted = inputs._replace(k=(inputs.k.float() + mean).bfloat16())
    dq, dq_shifted = with_rounding(inputs)[1], with_rounding(shifted)[1]
    assert reference.relative_l2(dq_shifted, reference.gradients(*shifted)[1]) < 0.03
    assert reference.relative_l2(dq_shifted, dq) < 0.03


@pytest.mark.parametrize("arch", FORMS)
def test_gradients_are_as_large_as_grad_out(arch):
    """Bit for bit for powers of two, down to gradients of 1e-12: scales are f32."""
    inputs = draw(130, 200, sigma=2.0)
    _, *found = with_rounding(inputs, arch, is_causal=True)
    for factor in (2.0, 2.0**-30, 2.0**20):
        _, *scaled = with_rounding(inputs._replace(grad_out=inputs.grad_out * factor), arch, is_causal=True)
        for gradient, of_scaled in zip(found, scaled):
            assert torch.equal(of_scaled, gradient * factor) and gradient.abs().max() > 1e-3


@pytest.mark.parametrize("arch", FORMS)
def test_a_grad_out_of_zeros_gives_zeros(arch):
    inputs = draw(70, 70)
    assert all((x == 0).all() for x in with_rounding(inputs._replace(grad_out=0 * inputs.grad_out), arch)[1:])


# --- rounding ---------------------------------------------------------------------------------------------------------


def test_rows_8_apart_share_a_scale_of_dO():
    grad = torch.rand(2 * TILE_ROWS, 16, generator=torch.Generator().manual_seed(0)) - 0.5
    grad[TILE_ROWS + 19] *= 100.0
    codes, scale = Rounded().round_grad(grad)
    shared = (scale > 0.1).nonzero().flatten()
    assert shared.tolist() == list(range(TILE_ROWS + 19 % GRAD_GROUPS, 2 * TILE_ROWS, GRAD_GROUPS))
    assert torch.equal(codes, codes.round()) and codes.abs().max() == 127.0
    assert ((codes * scale[:, None] - grad).abs() <= 0.501 * scale[:, None]).all()
    in_groups = codes.unflatten(0, (2, -1, GRAD_GROUPS)).abs().amax((1, 3))
    assert (in_groups == 127.0).all()


@pytest.mark.parametrize("limit", [127, 255])
def test_a_row_has_a_scale_that_takes_its_largest_to_the_limit(limit):
    """Rows are products with the columns' factors; a row too small has zeros, and one with a NaN the scale NaN."""
    generator = torch.Generator().manual_seed(0)
    x, factor = torch.rand(40, 64, generator=generator), torch.rand(1, 64, generator=generator) + 0.1
    x[0], x[1], x[2, 5] = 0.0, 1e-39, torch.nan
    codes, scale = Rounded().round_rows(x, factor, limit)
    assert (codes[:2] == 0).all() and scale[2].isnan() and codes.isfinite().all()
    assert (codes[3:].amax(-1) == limit).all()
    assert ((codes * scale - x * factor).abs() <= 0.501 * scale)[3:].all()


# --- not finite -------------------------------------------------------------------------------------------------------

SPOILT = 70  # a row in the second tile of four


def nan_rows(gradient: torch.Tensor) -> list[list[int]]:
    """Rows of each head that are NaN, which they must be in all channels."""
    spoilt = gradient[0].isnan()
    assert torch.equal(spoilt.any(-1), spoilt.all(-1))
    return [of_head.nonzero().flatten().tolist() for of_head in spoilt.any(-1)]


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("is_causal", CAUSAL)
@pytest.mark.parametrize("arch", FORMS)
def test_a_grad_out_that_is_not_finite(value, is_causal, arch):
    """A value in grad_out reaches dQ of its query, and dK and dV of the keys that this query sees."""
    inputs = draw(200, 200)
    inputs.grad_out[0, 1, SPOILT, 3] = value
    _, dq, dk, dv = (nan_rows(x) for x in with_rounding(inputs, arch, is_causal=is_causal))
    assert dq == [[], [SPOILT], [], []]
    assert dk == dv == [list(range(SPOILT + 1 if is_causal else 200)), []]


@pytest.mark.parametrize("is_causal", CAUSAL)
@pytest.mark.parametrize("arch", FORMS)
def test_a_value_that_is_not_finite(is_causal, arch):
    """A value in V reaches dQ of the queries that see it, and dK of the keys that these see; dV has no part of it."""
    inputs = draw(200, 200)
    inputs.v[0, 1, SPOILT, 3] = torch.nan
    _, dq, dk, dv = with_rounding(inputs, arch, is_causal=is_causal)
    seeing = list(range(SPOILT if is_causal else 0, 200))
    assert nan_rows(dq) == [[], [], seeing, seeing]
    assert nan_rows(dk) == [[], list(range(200))]
    assert dv.isfinite().all()


def test_a_query_that_is_not_finite():
    """The query's log-sum-exp is NaN, and so is its P."""
    inputs = draw(200, 200)
    inputs.q[0, 1, SPOILT, 3] = torch.nan
    _, dq, dk, dv = (nan_rows(x) for x in with_rounding(inputs, is_causal=True))
    assert dq == [[], [SPOILT], [], []]
    assert dk == dv == [list(range(SPOILT + 1)), []]
