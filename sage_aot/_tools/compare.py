"""A kernel's output against the emulation's, within bounds that only rounding explains.

The fuzzer and ``sage-aot verify`` both judge by this module. A check yields, element by element, the error in units of
its bound.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import torch

from sage_aot._backends.emulation.arithmetic import E4M3_LIMIT, within
from sage_aot._backends.emulation.attention import attend
from sage_aot._backends.emulation.quantize import Quantized
from sage_aot._launch.plan import Plan


@dataclass(frozen=True)
class Bound:
    """The most that an output may differ from the emulation's, relative to Σ p·|v| / Σ p, after rounding to its dtype.

    Kernel and emulation compute the same exponents bit for bit, also of a smoothed Q: delta_s and the FMA that adds it
    round in one order. Three things differ: ex2.approx (2^-22), the order and the precision of the sums of P and of
    P·V, and thereby the rounding of a P that lies close to the middle of two values of its type (a flip). `tight`
    covers all but flips, which happen to few rows. `loose` is one flip of the heaviest key that can flip.
    """

    tight: float
    loose: float


BOUNDS = {
    # Sums in f32, which a tensor core cuts off; a flip moves P by 2^-11 to 2^-10.
    ("f16", "f32"): Bound(2**-13, 2**-9),
    # Tensor cores add FP8 products 16 or 32 at a time. They align the products and the accumulator to the largest of
    # them, and cut each off 13 bits below it: an error of up to 2^-9 of the largest a step, some steps a tile. Where
    # few keys have values in a channel, the accumulator is the largest in most steps: 1.7 · 2^-8 was seen where the
    # heaviest key has a small value. The emulation takes 32 products and cuts their sum. A flip moves P by up to 2/17.
    # The heaviest key's P, 448, cannot flip.
    ("e4m3", "two_level_f32"): Bound(1.75 * 2**-8, 0.13),
    # As above, and sums in f16 are rounded by 2^-11 a step.
    ("e4m3", "two_level_f16"): Bound(2**-8, 0.13),
    # Block-scaled products keep f32: what is left are flips of keys of little weight, of which each row has some.
    ("e4m3", "f32"): Bound(2**-9, 0.13),
    # As above. A flip moves P by as much as a quarter of itself, and that of a scale 16 keys by up to an eighth.
    ("nvfp4", "f32"): Bound(2**-8, 0.4),
}
"""Per type of P and V, and accumulator of P·V."""

LEAST_FLIPPED, FLIPPED = 2, 1 / 200
"""Rows of a call that may lie beyond the tight bound: this number, and this share of all. A wrong scale puts every
eighth row beyond it, or all rows."""

SMALLEST_NORMAL = 2.0**-126
"""The smallest normal f32."""

UNRESOLVED = 2.0**-50
"""Error allowed with e4m3 P, as a share of V's largest value. Where the keys with nearly all of a row's weight have
zeros in a channel of V̂, only the other keys contribute to the output. A row reference may not fall far enough for
their P, and tensor cores drop their products in sums with larger ones."""


@dataclass(frozen=True)
class Measure:
    """One check: an error in units of its bound for each element of `got` and `expected`."""

    name: str
    excess: torch.Tensor  # f32, of any shape; at most 1 where nothing is wrong
    got: torch.Tensor  # of that shape
    expected: torch.Tensor

    def without(self, mask: torch.Tensor) -> Measure:
        """Return the check without the elements of a mask."""
        return dataclasses.replace(self, excess=self.excess.masked_fill(mask, 0.0))

    def describe(self) -> str:
        """The worst element: its index, both values, its error, and how many elements are beyond the bound."""
        position = torch.unravel_index(self.excess.argmax(), self.excess.shape)
        place = [int(i) for i in position]
        return (f"at {place} of {list(self.excess.shape)}: got {self.got[position].item():.9g}, expected "
                f"{self.expected[position].item():.9g}; {self.excess[position].item():.3g} times the bound, "
                f"{int((self.excess > 1).sum())} places beyond it")


def same(name: str, got: torch.Tensor, expected: torch.Tensor) -> Measure:
    equal = (got == expected) | (got.isnan() & expected.isnan())
    return Measure(name, torch.where(equal, 0.0, math.inf), got, expected)


def close(name: str, got: torch.Tensor, expected: torch.Tensor, bound: torch.Tensor) -> Measure:
    """Check that values are within `bound`; infinities must be equal, and NaN is never close."""
    excess = torch.where(got == expected, 0.0, (got - expected).abs() / bound)
    return Measure(name, excess.nan_to_num(nan=math.inf, posinf=math.inf), got, expected)


def against_emulation(plan: Plan, quantized: Quantized, out: torch.Tensor, lse: torch.Tensor | None,
                      key_ranks: torch.Tensor | None = None, sinks: torch.Tensor | None = None,
                      elements: torch.Tensor | None = None) -> list[Measure]:
    """Compare a kernel's output, [batch, heads, seq, headdim], and log-sum-exp, [batch, heads, seq] float32 or None,
    with the emulation's. `quantized`: the inputs as the emulation quantized them; `key_ranks`, `sinks`
    and `elements`: as `attend` takes them."""
    expected, expected_lse, weight = _emulated(plan, quantized, key_ranks, with_lse=lse is not None, sinks=sinks,
                                              elements=elements)
    bound = _bound(plan)
    got, info, expected = out.float(), torch.finfo(out.dtype), within(expected, out.dtype)
    rounding = info.eps / 2 * expected.abs() + info.smallest_normal * info.eps + rounding_of_merge(
        plan, quantized, expected)
    # P, and alpha · O, flush to zero below f32's normal range: an error in units of V's largest value.
    flushed = SMALLEST_NORMAL / bound.tight * max(1.0, (E4M3_LIMIT * _largest_scale(quantized)).max().item())
    error = ((got - expected).abs() - rounding).clamp(min=0.0) / (weight + flushed + _unresolved(plan, quantized))
    error = torch.where((got == expected) | got.isnan() & expected.isnan(), 0.0, error)
    error = error.nan_to_num(nan=math.inf, posinf=math.inf)
    measures = [Measure("output, emulation", error / bound.loose, got, expected),
                _few("rows beyond the tight bound", (error > bound.tight).any(-1), quantized.q),
                _channel_means(error, bound)]
    return measures + ([] if lse is None else [_lse_measure(plan, quantized, lse, expected_lse)])


def rounding_of_merge(plan: Plan, quantized: Quantized, expected: torch.Tensor) -> torch.Tensor:
    """Rounding of the merge of splits: a few units in the last place of f32, of an output and of V's mean, which each
    split's output contains. `expected`: [batch, heads, seq, headdim]."""
    problem = plan.problem
    mean = quantized.v_mean.repeat_interleave(problem.num_q_heads // problem.num_kv_heads, 1)
    parts = expected.abs() + mean[:, :, None, : problem.headdim].abs()
    return 2.0**-21 * parts if plan.splits > 1 else torch.zeros_like(parts)


def _unresolved(plan: Plan, quantized: Quantized) -> torch.Tensor:
    """The error that UNRESOLVED allows: [batch, heads, 1, headdim], in units of the output."""
    problem = plan.problem
    largest = E4M3_LIMIT * _largest_scale(quantized).repeat_interleave(problem.num_q_heads // problem.num_kv_heads, 1)
    factor = 0.0 if plan.kernels.attn.spec.pv == "f16" else UNRESOLVED
    return factor * largest[:, :, None, : problem.headdim]


def _largest_scale(quantized: Quantized) -> torch.Tensor:
    """Largest scale of V over all KV tiles: [batch, kv heads, headdim]."""
    return quantized.v_scale * quantized.v_factor.amax(-1, keepdim=True)


def _bound(plan: Plan) -> Bound:
    attn = plan.kernels.attn
    bound = BOUNDS[attn.spec.pv, attn.spec.pv_accum]  # of one KV tile; steps grow with the tiles up to a promotion
    return dataclasses.replace(bound, tight=(2 if attn.facts.get("pairs") else 1) * bound.tight)


def _lse_measure(plan: Plan, quantized: Quantized, lse: torch.Tensor, expected: torch.Tensor) -> Measure:
    flip = 2.0**-10 if plan.kernels.attn.spec.pv == "f16" else 0.0  # f16 P is summed after rounding
    # row_bias, the same bit for bit on both sides, may cancel nearly all of the log-sum-exp: its last bits then remain.
    rest = 2.0**-22 * quantized.row_bias[:, :, : plan.problem.seqlen_q].abs()
    bound = 1e-4 + flip + 2.0**-20 * expected.abs() + rest
    return close("lse, emulation", lse, expected, bound).without(lse.isnan() & expected.isnan())


def _few(name: str, beyond: torch.Tensor, q: torch.Tensor) -> Measure:
    """Number of rows beyond the tight bound, in units of the number allowed. Rows of equal Q̂ count as one: what flips
    one of them flips all."""
    different = torch.unique(q[:, :, : beyond.shape[2]][beyond], dim=0)
    count = torch.tensor(len(different), device=beyond.device)
    allowed = torch.full_like(count[None], LEAST_FLIPPED + FLIPPED * beyond.numel(), dtype=torch.float32)
    return Measure(name, count / allowed, count[None], allowed)


def _channel_means(error: torch.Tensor, bound: Bound) -> Measure:
    """The mean error of each channel of a head; the limit allows for a few flipped rows."""
    mean = error.mean(2)
    limit = torch.full_like(mean, bound.tight + bound.loose * (LEAST_FLIPPED / error.shape[2] + FLIPPED))
    return Measure("channel means, emulation", mean / limit, mean, limit)


def _emulated(plan: Plan, quantized: Quantized, key_ranks: torch.Tensor | None, *, with_lse: bool,
              sinks: torch.Tensor | None,
              elements: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The emulation's output, log-sum-exp, and Σ p·|v| / Σ p, from one run of twice the batch: the second half has |v|.
    """
    twice = {f.name: getattr(quantized, f.name) for f in dataclasses.fields(Quantized)}
    twice = {name: torch.cat([x, x]) if isinstance(x, torch.Tensor) else x for name, x in twice.items()}
    twice["v"] = torch.cat([quantized.v, quantized.v.abs()])
    # the mean of V takes part where a sink has a share of each row, which follows from the row's sum
    of_mean = torch.zeros_like(quantized.v_mean) if sinks is None else quantized.v_mean.abs()
    twice["v_mean"] = torch.cat([quantized.v_mean, of_mean])
    out, lse = attend(plan, Quantized(**twice), key_ranks, with_lse=with_lse, sinks=sinks,
                      elements=None if elements is None else torch.cat([elements, elements]))
    batch, rows, headdim = plan.problem.batch, plan.problem.seqlen_q, plan.problem.headdim
    out = out[:, :, :rows, :headdim]
    return out[:batch], lse[:batch, :, :rows], out[batch:]
