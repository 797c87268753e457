"""`sage_aot.attn` end to end on the simulator: checks, selection, plan, packing, quantizers, attention."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from fuzz_cases import Case, draw_case
from simulated import Simulated
from simulator import SimulatorBackend

import sage_aot
from sage_aot._call.backends import handing
from sage_aot._tools import reference

BUILT = {"sm80": {"qk": {"int4", "int8"}, "pv_accum": {"f32"}, "p": {"exp2"}},
         "sm89": {"qk": {"int4", "int8"}, "pv_accum": {"two_level_f32", "two_level_f16"}, "p": {"exp2"}}}
DRAWN = [dataclasses.replace(draw_case(1, index, BUILT, longest=130), kv_heads=1, batch=1) for index in range(40)]
"""Calls as the fuzzer draws them: any length, stride, dtype, values that are not finite, wrong arguments."""


@pytest.fixture(scope="module")
def simulated(built) -> Simulated:
    return Simulated(built)


def test_a_call(built):
    """The call is as a user makes it; the simulator stands in the place of the emulation."""
    q, k, v = reference.inputs("normal", (1, 2, 40, 64), (1, 1, 90, 64), torch.bfloat16,
                                torch.Generator().manual_seed(0))
    with handing(SimulatorBackend(built, "sm80")):
        out, lse = sage_aot.attn(q, k, v, is_causal=True, return_lse=True)
    expected, expected_lse = reference.attention(q, k, v, is_causal=True)
    assert reference.measure(out, expected).cosine > 0.9999
    assert (lse - expected_lse).abs().max() < 0.05


@pytest.mark.parametrize("name", ["sm80_d64_qkint8_pvf16_accf32_causal_vraw_qraw"])
@pytest.mark.parametrize("asked", ["q", "k", "v", "qv"])
def test_gradients_that_are_asked_for_alone(built, name, asked):
    """Gradients have the bits that they have among all three. A launch that writes another gradient is a fault."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = reference.inputs("normal", (1, 2, 40, 64), (1, 1, 90, 64), torch.bfloat16, generator)
    grad = torch.randn(q.shape, generator=generator).to(q.dtype)
    found = []
    for names in ("qkv", asked):
        leaves = {name: x.clone().requires_grad_(name in names) for name, x in zip("qkv", (q, k, v))}
        with handing(SimulatorBackend(built, "sm80")):
            out = sage_aot.train_attn(*leaves.values(), is_causal=True)
            found.append(dict(zip(names, torch.autograd.grad(out, [leaves[name] for name in names], grad))))
    assert all(torch.equal(gradient, found[0][name]) for name, gradient in found[1].items())


@pytest.mark.parametrize("case", DRAWN, ids=range(len(DRAWN)))
def test_calls_that_the_fuzzer_draws(simulated, case):
    verdict, _ = simulated.check(case, seed=3)
    assert verdict.failure is None, f"{case.to_json()}: {verdict.failure}"


@pytest.mark.parametrize("planted", ["q:nan", "k:inf", "v:nan"])
def test_what_is_not_finite(simulated, planted):
    case = Case("sm89", 4, 1, 1, 2, 70, 130, 64, is_causal=True, smooth_q=False, planted=planted)
    verdict, _ = simulated.check(case, seed=4)
    assert verdict.failure is None, verdict.failure
