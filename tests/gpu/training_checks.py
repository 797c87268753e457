"""One trained call of the fuzzer, sage_aot.train_attn and its backward pass, and all that is expected of it.

The gradients of the kernels are held against those of the emulation, which gets the kernels' own output and
log-sum-exp. Three things differ: ex2.approx and rcp.approx (2^-22), the order of the sums of dO·Vᵀ, and thereby the
rounding of a P or dS that lies close to the middle of two integers (a flip). A flip moves a row by a part of its
quantization error, so bounds are of rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from fuzz_cases import Case
from fuzz_kernels import against_emulated
from fuzz_spy import Spy

import sage_aot
from sage_aot._backends.emulation.backend import gradients_of, sequence_entries
from sage_aot._call.backends import handing
from sage_aot._launch.backward import backward_kernels, multiplies_halves
from sage_aot._problem.given import Given
from sage_aot._problem.problem import Problem, heads_first
from sage_aot._problem.sequences import Sequences
from sage_aot._tools.compare import Measure, same

ROW_BOUND = 0.025
"""Most error of a row of a gradient, as a share of the largest row of its head, by L2 norms. In one of
1,300 calls (seed 9011) one value rounded to its other neighbour at a key of large norm, which moved a row of the
gradient of q by 0.0208."""

CANCELLED = 2.0**-18
"""Error of dS where dO·Vᵀ and D cancel, as a share of |dO|·|V|: both are sums in f32, in other orders."""


class Trained(NamedTuple):
    """Results of a trained call, in the call's layout."""

    out: torch.Tensor
    grad_q: torch.Tensor
    grad_k: torch.Tensor
    grad_v: torch.Tensor


def measure_training(case: Case, spy: Spy, tensors: tuple[torch.Tensor, ...], key_mask: torch.Tensor | None = None,
                     sequences: Sequences | None = None) -> list[Measure]:
    """Make a trained call of kernels, and hold it against the emulation."""
    grad_out = make_grad_out(case, tensors[0])
    with handing(spy):
        made = train(case, tensors, grad_out, key_mask, sequences)
    return against_emulated_training(spy, made, grad_out)


def make_grad_out(case: Case, q: torch.Tensor) -> torch.Tensor:
    """The gradient of the output, of a size that grows with the seed, with strides of its own; of some seeds zeros from
    a row on, as behind padding. Queries in front of all keys, which see none, have the largest."""
    if q.dim() == 3:  # of sequences
        one = dataclasses.replace(case, batch=1, seqlen_q=q.shape[0], layout="NHD", lengths="one", is_causal=False)
        return make_grad_out(one, q[None])[0]
    generator = torch.Generator(q.device).manual_seed(case.seed + 1)
    magnitude = 10.0 ** -(case.seed % 4)
    if case.strides == "expanded_heads":  # as of a sum
        return torch.full((), magnitude, dtype=q.dtype, device=q.device).expand_as(q)
    grad = (torch.randn(q.shape, generator=generator, device=q.device) * magnitude).to(q.dtype)
    if case.seed % 13 == 0:
        heads_first(grad, case.layout)[:, :, case.seed % (case.seqlen_q + 1):] = 0.0
    if case.is_causal:  # whatever stands where a query sees no key
        heads_first(grad, case.layout)[:, :, :max(0, case.seqlen_q - case.seqlen_kv)] *= 1000.0
    if case.planted.startswith("v:"):
        grad[0, 0, 0, 0] = torch.inf
        heads_first(grad, case.layout)[0, -1, min(32, case.seqlen_q - 1), -1] = torch.nan
    if case.strides in ("transposed", "fused"):
        return grad.transpose(1, 2).contiguous().transpose(1, 2)
    if case.strides == "misaligned":
        return torch.nn.functional.pad(grad, (1, 0))[..., 1:]
    if case.seed % 3 == 2:  # as of an output that is permuted
        return grad.to(memory_format=torch.channels_last)
    return grad


def train(case: Case, tensors: tuple[torch.Tensor, ...], grad_out: torch.Tensor, key_mask: torch.Tensor | None,
          sequences: Sequences | None) -> Trained:
    """Make the public call and its backward pass; or two of each, whose tensors require a part of the gradients."""
    gradients: list[torch.Tensor] = []
    for part in ((0,), (1, 2)) if case.gradients == "apart" else ((0, 1, 2),):
        leaves = [tensor.detach().requires_grad_(i in part) for i, tensor in enumerate(tensors)]
        with torch.enable_grad():
            if sequences is None:
                out = sage_aot.train_attn(*leaves, key_mask=key_mask, is_causal=case.is_causal, scale=case.scale,
                                          layout=case.layout)
            else:
                out = sage_aot.train_attn_varlen(*leaves, **sequences._asdict(), is_causal=case.is_causal,
                                                 scale=case.scale)
            gradients += torch.autograd.grad(out, [leaves[i] for i in part], grad_out)
    return Trained(out.detach(), *gradients)


def against_emulated_training(spy: Spy, made: Trained, grad_out: torch.Tensor) -> list[Measure]:
    """Compare what the kernels of a trained call left behind with the emulation of what they were handed."""
    handed = spy.handed
    assert handed is not None and handed.lse is not None
    plan, given = handed.plan, handed.given
    problem = plan.problem
    measures = against_emulated(spy, read_quantized=False)
    halves = multiplies_halves(backward_kernels(plan, spy.manifest))
    expected = gradients_of(plan, halves, given, made.out, handed.lse, grad_out)
    q, k, v = given.tensors[:3]
    group = problem.num_q_heads // problem.num_kv_heads
    products = grad_out.float().abs().nan_to_num(0.0, 0.0).amax() * v.float().abs().nan_to_num(0.0, 0.0).amax()
    cancelled = CANCELLED * problem.headdim**0.5 * products * abs(problem.softmax_scale)
    noise = {"q": cancelled * k.float().abs().nan_to_num(0.0, 0.0).amax(),
             "k": cancelled * q.float().abs().nan_to_num(0.0, 0.0).amax() * group, "v": torch.zeros_like(cancelled)}
    for name, got, wanted in zip("qkv", made[1:], expected):
        for part in _entries(problem, given, name):
            measures += _of_gradient(name, part(got).float(), part(wanted), noise[name], torch.finfo(got.dtype))
    return measures


def _entries(problem: Problem, given: Given, name: str) -> Iterator[Callable[[torch.Tensor], torch.Tensor]]:
    """Views, heads first, of the batch entries of q, k or v: of all, or of each sequence with rows of it."""
    if not problem.tokens:
        yield lambda x: heads_first(x, problem.options.layout)
        return
    for own in sequence_entries(problem, given):
        rows = own.rows if name == "q" else own.keys
        if rows.start < rows.stop:
            yield lambda x, rows=rows: x[rows].transpose(0, 1)[None]


def _of_gradient(name: str, got: torch.Tensor, expected: torch.Tensor, noise: torch.Tensor,
                 info: torch.finfo) -> list[Measure]:
    """Measure where the gradient is finite, and the error of each row there."""
    finite = expected.abs() < info.max
    near = (expected.abs() > (1 - 5 * ROW_BOUND) * info.max) & (expected.abs() < (1 + 5 * ROW_BOUND) * info.max)
    holes = same(f"finite elements of grad_{name}", got.isfinite(), finite).without(near)
    error, expected = (torch.where(finite & got.isfinite(), x, 0.0) for x in (got - expected, expected))
    error, expected = error.double(), expected.double()  # squares of large values are beyond f32
    norm = expected.norm(dim=-1)
    rounding = info.eps * norm + info.smallest_normal * info.eps * error.shape[-1]
    bound = ROW_BOUND * norm.amax(-1, keepdim=True) + rounding + noise * error.shape[-1] ** 0.5
    return [holes, Measure(f"grad_{name}, emulation", error.norm(dim=-1) / bound, error.norm(dim=-1), norm)]
