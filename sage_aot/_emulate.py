"""The kernels in torch: the same scales, roundings and tiles, for CPU tensors and, on any device, as the oracle of the
tests.

The quantizers match those of templates/include/sage/quant/ bit for bit, the order of every sum included. Attention
matches tile by tile up to the order in which a matrix product adds and to ex2.approx; FP8 accumulators keep the
13 mantissa bits that sm89 keeps. Tensors are [batch, heads, seq, headdim]; all arithmetic is f32 unless a cast says
otherwise.
Source: SageAttention2, Algorithm 1, sections 3.1 to 3.4 and appendix A.6.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from sage_aot._plan import KEY_GROUPS, LOG2_E, ROW_GROUPS, V_LIMIT, chunk_rows_of
from sage_aot._problem import Problem
from sage_aot._select import Kernels
from sage_aot._spec import VECTOR, Tile

INT_LIMIT = {8: 127.0, 4: 7.0}
CLIP = {8: 1.0, 4: 0.8}  # quant/quantize.cuh: share of a group's largest value that INT_LIMIT stands for
E4M3_LIMIT = 448.0
SMALLEST_ABS_MAX = 1e-35  # quant/quantize.cuh: below this a group counts as zeros

NO_REFERENCE = -1e30  # attn/softmax.cuh
SMALLEST_SCALE = 1e-37
TOP = {"f32": 7.0, "two_level_f32": 8.807355, "two_level_f16": 7.807355}  # attn/pv_mma.cuh, by accumulator
LAZY_RISE = {"f32": 8.0, "two_level_f32": 0.0, "two_level_f16": 0.0}
LARGEST_FOLDED = {"f32": 1.0, "two_level_f32": 0.015625, "two_level_f16": 0.015625}
WHOLE_REFERENCE = {"f32": True, "two_level_f32": False, "two_level_f16": False}
SUMS_ROUNDED = {"f32": True, "two_level_f32": False, "two_level_f16": False}  # whether row sums are of the rounded P
ALL_FINITE = 2**31 - 1  # params.cuh
SCORE_BIAS = 12582912.0  # attn/softmax.cuh


@dataclass(frozen=True)
class Quantized:
    """Quantized inputs in logical order. Rows and keys are padded to whole tiles, channels to the kernel's head dim."""

    q: torch.Tensor  # [batch, q heads, rows, headdim] f32 holding integers
    k: torch.Tensor  # [batch, kv heads, keys, headdim] f32 holding integers
    v: torch.Tensor  # [batch, kv heads, keys, headdim] f32 holding values of the PV type
    q_scale: torch.Tensor  # [batch, q heads, rows], one value per scale group; scores in log2 units
    k_scale: torch.Tensor  # [batch, kv heads, keys], likewise
    v_scale: torch.Tensor  # [batch, kv heads, headdim]
    q_mean: torch.Tensor  # [batch, q heads, q tiles, headdim]; zero where q is not smoothed
    k_mean: torch.Tensor  # [batch, kv heads, headdim]; zero where k is not smoothed
    v_mean: torch.Tensor  # [batch, kv heads, headdim]; zero where v is not smoothed
    k_finite: torch.Tensor  # [batch, kv heads] i32, keys before the first that is not finite, or ALL_FINITE
    v_finite: torch.Tensor  # [batch, kv heads, headdim] i32, likewise per channel
    row_bias: torch.Tensor  # [batch, q heads, rows], log2 units: q · mean of k
    delta_s: torch.Tensor | None  # [batch, q heads, q tiles, keys], log2 units: q_mean · smoothed k


def attention(problem: Problem, kernels: Kernels, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
              out: torch.Tensor, lse: torch.Tensor | None) -> None:
    """What the three kernels compute, into `out` and `lse`."""
    quantized = quantize(problem, kernels, q, k, v)
    result, result_lse = attend(problem, kernels, quantized)
    out.copy_(result[:, :, : problem.seqlen_q, : problem.headdim])
    if lse is not None:
        lse.copy_(result_lse[:, :, : problem.seqlen_q])


# --- quantization -----------------------------------------------------------------------------------------------------


def quantize(problem: Problem, kernels: Kernels, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Quantized:
    """The kernels before attention: statistics, quantization, and what smoothing Q takes off the scores."""
    spec, tile = kernels.attn.spec, kernels.attn.tile
    k, v = (_pad(tensor.float(), tile.block_n, spec.headdim) for tensor in (k, v))
    q = _pad(q.float(), tile.block_m, spec.headdim)

    k_mean = _mean_over_keys(k, problem, kernels) if problem.smooth_k else torch.zeros_like(k[:, :, 0])
    v_mean = _v_mean(v, problem, kernels) if problem.smooth_v else torch.zeros_like(v[:, :, 0])
    v_finite = _leading(v.isfinite(), 2)
    k, v = _subtract(k, k_mean[:, :, None], problem.seqlen_kv), _subtract(v, v_mean[:, :, None], problem.seqlen_kv)
    k_finite = _leading(k.isfinite().all(-1), -1)
    k, v = _finite_or_zero(k), _finite_or_zero(v)

    q = q * torch.tensor(problem.softmax_scale * LOG2_E, dtype=torch.float32)
    group = problem.num_q_heads // problem.num_kv_heads
    row_bias = _row_bias(q, k_mean.repeat_interleave(group, 1)[:, :, None])
    q_mean = _mean_over_rows(q, problem, kernels)
    q = _subtract(q, q_mean.repeat_interleave(tile.block_m, 2), problem.seqlen_q)
    delta_s = _delta_s(q_mean, k.repeat_interleave(group, 1)) if problem.smooth_q else None

    q_hat, q_scale = _quantize_rows(_finite_or_zero(q), _row_groups(q.shape[2], tile.warp_m), spec.qk, CLIP[spec.qk])
    k_hat, k_scale = _quantize_rows(k, _key_groups(k.shape[2], tile.block_n), spec.qk, CLIP[spec.qk])
    v_hat, v_scale = _quantize_v(v, spec.pv, V_LIMIT[spec.pv_accum])
    return Quantized(q_hat, k_hat, v_hat, q_scale, k_scale, v_scale, q_mean, k_mean, v_mean, k_finite, v_finite,
                     row_bias, delta_s)


def _leading(finite: torch.Tensor, dim: int) -> torch.Tensor:
    """How many are finite before the first that is not, as i32; ALL_FINITE where all are."""
    count = finite.int().cumprod(dim).sum(dim)
    return torch.where(finite.all(dim), ALL_FINITE, count).int()


def _finite_or_zero(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x.isfinite(), x, 0.0)


def _subtract(x: torch.Tensor, mean: torch.Tensor, count: int) -> torch.Tensor:
    """x less a mean in its first `count` rows; the padding stays zero."""
    smooth = x - mean
    smooth[:, :, count:] = 0.0
    return smooth


def _pad(x: torch.Tensor, rows: int, headdim: int) -> torch.Tensor:
    return torch.nn.functional.pad(x, (0, headdim - x.shape[-1], 0, -x.shape[2] % rows))


def _mean_over_keys(x: torch.Tensor, problem: Problem, kernels: Kernels) -> torch.Tensor:
    """Mean over the sequence in the order of quant/statistics.cuh: a thread's rows, then threads, then chunks."""
    rows_at_once = kernels.stats.threads * VECTOR // kernels.attn.spec.headdim
    x = _finite_or_zero(x)[:, :, : problem.seqlen_kv]
    batch, heads, keys, headdim = x.shape
    chunk_rows = chunk_rows_of(keys)
    x = torch.nn.functional.pad(x, (0, 0, 0, -keys % chunk_rows))
    parts = _add_in_order(x.view(batch, heads, -1, chunk_rows // rows_at_once, rows_at_once, headdim), 3)
    return _finite_or_zero(_divide(_add_in_order(_add_in_order(parts, 3), 2), float(keys)))


def _v_mean(v: torch.Tensor, problem: Problem, kernels: Kernels) -> torch.Tensor:
    """The mean of V, or zero where less the mean some value is beyond f32."""
    mean = _mean_over_keys(v, problem, kernels)
    return torch.where((_finite_or_zero(v) - mean[:, :, None]).isfinite().all(2), mean, 0.0)


def _mean_over_rows(q: torch.Tensor, problem: Problem, kernels: Kernels) -> torch.Tensor:
    """Mean of each query tile in the order of quant/quantize.cuh, or zero: a thread's rows, then threads."""
    spec, block_m = kernels.attn.spec, kernels.attn.tile.block_m
    batch, heads, rows, headdim = q.shape
    if not problem.smooth_q:
        return q.new_zeros(batch, heads, rows // block_m, headdim)
    rows_at_once = kernels.quant.threads * VECTOR // spec.headdim
    tiles = _finite_or_zero(q).view(batch, heads, -1, block_m // rows_at_once, rows_at_once, headdim)
    count = (problem.seqlen_q - torch.arange(0, rows, block_m, device=q.device)).clamp(max=block_m).float()
    return _finite_or_zero(_add_in_order(_add_in_order(tiles, 3), 3) / count[:, None])


def _row_bias(q: torch.Tensor, k_mean: torch.Tensor) -> torch.Tensor:
    """q · k_mean per row in the order of quant/quantize.cuh: a lane's channels in FMAs, then halves of the lanes."""
    total = q.new_zeros(*q.shape[:-1], q.shape[-1] // VECTOR)
    for q_channel, k_channel in zip(*(x.unflatten(-1, (-1, VECTOR)).unbind(-1) for x in (q, k_mean))):
        total = _fma(q_channel, k_channel, total)
    while total.shape[-1] > 1:
        lower, upper = total.chunk(2, -1)
        total = lower + upper
    return total[..., 0]


def _delta_s(q_mean: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """q_mean · k per query tile and key, channel after channel in FMAs, as in quant/delta_s.cuh."""
    total = q_mean.new_zeros(*q_mean.shape[:3], k.shape[2])
    for q_channel, k_channel in zip(q_mean.unbind(-1), k.unbind(-1)):
        total = _fma(q_channel[..., None], k_channel[:, :, None], total)
    return total


def _fma(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """a · b + c in f32, rounded once.

    f64 holds the product of two f32. Where it rounds the sum, that is made odd (of the two f64 around the exact sum the
    one with an odd last bit), which f32 then rounds as it would the exact one.
    Source: Boldo & Melquiond, "Emulation of a FMA and correctly rounded sums: proved algorithms using rounding to odd".
    """
    product, c = a.double() * b.double(), c.double()
    total = product + c
    part = total - product
    lost = (product - (total - part)) + (c - part)  # by rounding; NaN where the sum is not finite
    bits = total.view(torch.int64)
    outward = torch.where((lost > 0) == (total > 0), 1, -1)
    even = (bits & 1 == 0) & ((lost > 0) | (lost < 0))
    return torch.where(even, bits + outward, bits).view(torch.float64).float()


def _add_in_order(x: torch.Tensor, dim: int) -> torch.Tensor:
    total = torch.zeros_like(x.select(dim, 0))
    for part in x.unbind(dim):
        total = total + part
    return total


def _row_groups(rows: int, warp_m: int) -> torch.Tensor:
    """Scale group of each query row: rows of a warp with equal row % 8."""
    row = torch.arange(rows)
    return row // warp_m * ROW_GROUPS + row % ROW_GROUPS


def _key_groups(keys: int, block_n: int) -> torch.Tensor:
    """Scale group of each key: keys of a tile with equal key % 8 // 2."""
    key = torch.arange(keys)
    return key // block_n * KEY_GROUPS + key % 8 // 2


def _quantize_rows(x: torch.Tensor, groups: torch.Tensor, bits: int,
                   clip: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Integers with a scale per group of rows; the scales come back per row."""
    amax = x.abs().amax(-1)
    group_amax = x.new_zeros(*x.shape[:2], int(groups.max()) + 1)
    groups = groups.to(x.device)
    group_amax.scatter_reduce_(2, groups.expand_as(amax), amax, "amax")
    scale, inv_scale = (s[:, :, groups] for s in _scale_to(INT_LIMIT[bits], group_amax * clip))
    rounded = (x.double() * inv_scale[..., None].double()).round().float()  # once, as an FMA does
    return rounded.clamp(-INT_LIMIT[bits] - 1.0, INT_LIMIT[bits]), scale


def _scale_to(limit: float, amax: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale that takes amax to `limit`, and its reciprocal."""
    zeros = amax < SMALLEST_ABS_MAX
    inv_scale = torch.full_like(amax, limit) / amax  # a number over a tensor rounds twice: reciprocal, then product
    return torch.where(zeros, 1.0, _divide(amax, limit)), torch.where(zeros, 0.0, inv_scale)


def _divide(x: torch.Tensor, divisor: float) -> torch.Tensor:
    """x / divisor, rounded once: for a Python number torch multiplies by its reciprocal on a GPU."""
    return x / torch.full_like(x, divisor)


def _power_of_two_scale(amax: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Power of two that takes amax into [2^14, 2^15), and its reciprocal."""
    exponent = torch.frexp(amax)[1] - 1
    exponent = exponent.clamp(min=-112) - 14
    scale = ((exponent + 127) << 23).view(torch.float32)  # torch.ldexp is pow(2, ·), which a GPU may round
    zeros = amax < SMALLEST_ABS_MAX
    return torch.where(zeros, 1.0, scale), torch.where(zeros, 0.0, 1.0 / scale)


def _quantize_v(v: torch.Tensor, pv: str, limit: float) -> tuple[torch.Tensor, torch.Tensor]:
    """V in the PV type with a scale per channel, which takes the largest value to `limit` for e4m3."""
    amax = v.abs().amax(2)  # equals that of the largest and the smallest value
    scale, inv_scale = _scale_to(limit, amax) if pv == "e4m3" else _power_of_two_scale(amax)
    return to_pv(v * inv_scale[:, :, None], pv), scale


def to_pv(x: torch.Tensor, pv: str) -> torch.Tensor:
    """Rounded to the PV type and back: nearest even, e4m3 saturating."""
    if pv == "f16":
        return x.half().float()
    return x.clamp(-E4M3_LIMIT, E4M3_LIMIT).to(torch.float8_e4m3fn).float()


# --- attention --------------------------------------------------------------------------------------------------------


def attend(problem: Problem, kernels: Kernels, quantized: Quantized) -> tuple[torch.Tensor, torch.Tensor]:
    """The attention kernel on quantized inputs: output f32 and log-sum-exp, both with padded rows."""
    spec, block_n = kernels.attn.spec, kernels.attn.tile.block_n
    group = problem.num_q_heads // problem.num_kv_heads
    k, v, k_scale, v_scale, v_mean = (x.repeat_interleave(group, 1) for x in (
        quantized.k, quantized.v, quantized.k_scale, quantized.v_scale, quantized.v_mean))
    k_finite, v_finite = (x.repeat_interleave(group, 1) for x in (quantized.k_finite, quantized.v_finite))
    batch, heads, rows, headdim = quantized.q.shape
    limit = _key_limit(problem, rows)
    last = min(k.shape[2], int(limit.max()))
    limit = limit.to(k.device)
    acc_o = k.new_zeros(batch, heads, rows, headdim)
    row_ref = k.new_full((batch, heads, rows), NO_REFERENCE)
    sums = RowSums(kernels.attn.tile, problem.smooth_q, limit, SUMS_ROUNDED[spec.pv_accum], torch.zeros_like(row_ref))

    for first in range(0, last, block_n):
        keys = slice(first, first + block_n)
        scores = quantized.q @ k[:, :, keys].transpose(2, 3)  # exact: integers below 2^24
        scale = _score_scale(quantized.q_scale[..., None] * k_scale[:, :, None, keys], kernels.attn.tile)
        if quantized.delta_s is not None:
            delta = quantized.delta_s[..., keys].repeat_interleave(kernels.attn.tile.block_m, 2)
            scores = _add_delta(scores, scale, delta)
            scale = torch.ones_like(scale)
        scores = scores.masked_fill(first + torch.arange(block_n, device=k.device) >= limit[:, None], -math.inf)
        bias = _folded_bias(problem.smooth_q, problem.qk_bits, spec.pv_accum)
        p, alpha, row_ref = _softmax_tile(scores, scale, bias, row_ref, kernels.attn.tile, spec.pv_accum)
        rounded = to_pv(p, spec.pv)
        sums.add(first, p, rounded, alpha)
        acc_o = acc_o * alpha[..., None] + _pv_tile(rounded, v[:, :, keys], spec.pv_accum)

    spoilt = ~quantized.row_bias.isfinite() | (limit > k_finite[..., None])
    row_bias = quantized.row_bias.masked_fill(spoilt, math.nan).masked_fill(limit == 0, 0.0)
    row_sum = sums.row_sum
    factor = torch.where(row_sum > 0, 1.0 / row_sum, 0.0) + 0.0 * row_bias
    lse = (row_ref + sums.lse_sum.log2() + row_bias) * math.log(2.0)
    mean = torch.where(row_sum[..., None] > 0, v_mean[:, :, None], 0.0)
    out = acc_o * factor[..., None] * v_scale[:, :, None] + mean
    return torch.where(limit[:, None] > v_finite[:, :, None], math.nan, out), lse


class RowSums:
    """Sums of P over the KV tiles, by which O is divided, and those of log-sum-exps.

    In the mma family one, in f32, of P before or after it is rounded. In the wgmma family the first is P times V's channel
    of ones, which R takes for two tiles where every row of the query tile sees them whole and Q is not smoothed, and the
    other is of P before it is rounded.
    """

    def __init__(self, tile: Tile, smooth_q: bool, limit: torch.Tensor, rounded: bool, zeros: torch.Tensor) -> None:
        """`limit`: keys that each row sees."""
        first_row = torch.arange(len(limit), device=limit.device) // tile.block_m * tile.block_m
        self.row_sum = self.lse_sum = zeros
        self._tile, self._rounded = tile, rounded
        self._full_keys = limit[first_row] // tile.block_n * tile.block_n * (not smooth_q)
        self._in_r = zeros

    def add(self, first: int, p: torch.Tensor, rounded: torch.Tensor, alpha: torch.Tensor) -> None:
        """The tile that begins with the key `first`; alpha is what all sums so far are multiplied by."""
        if not self._tile.producer_warps:
            self.row_sum = self.lse_sum = self.row_sum * alpha + (rounded if self._rounded else p).sum(-1)
            return
        self.lse_sum = self.lse_sum * alpha + p.sum(-1)
        second = first // self._tile.block_n % 2 == 1
        begun = torch.where(second & (first + 2 * self._tile.block_n <= self._full_keys), self._in_r * alpha, 0.0)
        self._in_r = _tensor_core_sum(rounded, begun)
        self.row_sum = self.row_sum * alpha + (self._in_r - begun)


def _key_limit(problem: Problem, rows: int) -> torch.Tensor:
    """Keys that each row sees; causal is aligned bottom-right."""
    if not problem.is_causal:
        return torch.full((rows,), problem.seqlen_kv)
    last_row = torch.arange(rows).clamp(max=problem.seqlen_q - 1)
    return (last_row + 1 + problem.seqlen_kv - problem.seqlen_q).clamp(0, problem.seqlen_kv)


def _score_scale(scale: torch.Tensor, tile: Tile) -> torch.Tensor:
    """Cut to 22 bits of mantissa where a bias may fold, as in attn/softmax.cuh; for f16 P that keeps subtracting the
    reference exact."""
    if tile.producer_warps:
        return scale.clamp(min=SMALLEST_SCALE)
    cut = (scale.view(torch.int32) & ~3).view(torch.float32)
    return torch.where(scale < SMALLEST_SCALE, SMALLEST_SCALE, cut)


def _add_delta(scores: torch.Tensor, scale: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
    """Finished scores in log2 units: one FMA, as in attn/scores.cuh."""
    return (scores.double() * scale.double() + delta.double()).float()


def _folded_bias(smooth_q: bool, qk_bits: int, pv_accum: str) -> float:
    """What attn/softmax.cuh folds into the FMA of P; zero where it folds nothing."""
    return SCORE_BIAS if not smooth_q and (qk_bits == 8 or LARGEST_FOLDED[pv_accum] >= 1.0) else 0.0


def _softmax_tile(scores: torch.Tensor, scale: torch.Tensor, bias: float, row_ref: torch.Tensor, tile: Tile,
                  pv_accum: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """P of one tile, the factor for what was summed before, and the new reference.

    The mma family: a warp whose scores fit takes the FMA that the bias is folded into; the others raise references and fold
    nothing. The wgmma family raises references at every tile, and has no bias.
    """
    needed = (scores * scale).nan_to_num(-math.inf, math.inf, -math.inf).amax(-1) - TOP[pv_accum]
    if WHOLE_REFERENCE[pv_accum]:
        needed = needed.ceil()
    raised = torch.where(needed > row_ref + LAZY_RISE[pv_accum], needed, row_ref)
    if tile.producer_warps:
        return torch.exp2(_exponents(scores, scale, raised)), torch.exp2(row_ref - raised), raised
    foldable = (scale < LARGEST_FOLDED[pv_accum]) if bias else torch.ones_like(scale, dtype=torch.bool)
    folded = _folded(scores, scale, bias, row_ref)
    folds = _whole_warps(foldable & (folded <= TOP[pv_accum] + LAZY_RISE[pv_accum]), tile.warp_m)
    new_ref = torch.where(folds, row_ref, raised)
    exponents = torch.where(folds[..., None], folded, _exponents(scores, scale, new_ref))
    return torch.exp2(exponents), torch.exp2(row_ref - new_ref), new_ref


def _exponents(scores: torch.Tensor, scale: torch.Tensor, row_ref: torch.Tensor) -> torch.Tensor:
    """Of P, by one FMA."""
    return (scores.double() * scale.double() - row_ref.double()[..., None]).float()


def _folded(scores: torch.Tensor, scale: torch.Tensor, bias: float, row_ref: torch.Tensor) -> torch.Tensor:
    """The exponents of P by the FMA that the bias is folded into; its constant rounds for e4m3 only."""
    offset = (-scale.double() * bias - row_ref.double()[..., None]).float()
    return ((scores.double() + bias) * scale.double() + offset.double()).float()


def _whole_warps(scores: torch.Tensor, warp_m: int) -> torch.Tensor:
    """Per row, whether something holds for all scores of its warp."""
    return scores.all(-1).unflatten(2, (-1, warp_m)).all(-1).repeat_interleave(warp_m, 2)


def _tensor_core_sum(p: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """P times ones and a total, as Hopper adds products of FP8: 32 and the sum so far, each cut off 13 bits below the
    largest. The wgmma family's sums of P are such: V has a channel of ones there (attn/mainloop_wgmma.cuh)."""
    for part in p.split(32, -1):
        terms = torch.cat([total[..., None], part], -1)
        exponent = torch.frexp(terms.amax(-1))[1].clamp(min=-100)  # a sum that alpha left next to nothing of
        unit = torch.ldexp(torch.ones_like(total), exponent - 14)
        total = _keep_13_bits((terms / unit[..., None]).trunc().sum(-1) * unit)
    return total


def _pv_tile(p: torch.Tensor, v: torch.Tensor, pv_accum: str) -> torch.Tensor:
    """P·V of one tile; FP8 in products of 32 keys, each of which leaves the accumulator 13 mantissa bits, or f16."""
    if pv_accum == "f32":
        return p @ v
    total = p.new_zeros(*p.shape[:3], v.shape[-1])
    for first in range(0, p.shape[-1], 32):
        total = total + p[..., first: first + 32] @ v[:, :, first: first + 32]
        total = _keep_13_bits(total) if pv_accum == "two_level_f32" else total.half().float()
    return total


def _keep_13_bits(x: torch.Tensor) -> torch.Tensor:
    """f32 with all but the upper 13 mantissa bits cut off."""
    return (x.view(torch.int32) & ~0x3FF).view(torch.float32)
