"""The kernels before attention, in torch: quantization, and delta_s, the term of the scores that smoothing Q takes off.

Results equal those of templates/include/sage/quant/ bit for bit, since every sum has the same order. The facts in the
kernels' records hold the sizes and limits on which sums and scales depend.
Source: SageAttention2, Algorithm 1, sections 3.1 to 3.4 and appendix A.6.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from sage_aot._backends.emulation import nvfp4
from sage_aot._backends.emulation.arithmetic import add_in_order, divide, finite_or_zero, fma, to_f32, to_pv
from sage_aot._kernels.manifest import KernelRecord
from sage_aot._launch.choose import Kernels
from sage_aot._launch.plan import BY_K, BY_NOTHING, LOG2_E, balance_of
from sage_aot._problem.problem import Problem

SCALED_MAGNITUDES = (2.0**-90, 2.0**120)
"""Least and largest magnitude of V's channels that scales go by: quant/quantize_v.cuh."""

LARGEST_SCALED = {"f16": 2.0**106, "e4m3": 2.0**68, "nvfp4": 2.0**68}
"""Largest magnitude of V / v_scale, by the type of V: quant/quantize_v.cuh."""

LARGEST_TERM = 2.0**100
"""Largest term of a score that a mean makes: kLargestTerm of numerics/arithmetic.cuh."""

LEAST_FACTOR = -30
"""Least factor of a tile of V, log2: numerics/scale.cuh."""


@dataclass(frozen=True)
class Quantized:
    """Quantized inputs in logical order. Rows and keys are padded to whole tiles, channels to the kernel's head dim."""

    q: torch.Tensor  # [batch, q heads, rows, headdim] f32 holding integers, or NVFP4 times its groups' scales
    k: torch.Tensor  # [batch, kv heads, keys, headdim] likewise
    v: torch.Tensor  # [batch, kv heads, keys, headdim] f32 holding values of the PV type
    q_scale: torch.Tensor  # [batch, q heads, rows], one value per scale group; scores in log2 units
    k_scale: torch.Tensor  # [batch, kv heads, keys], likewise
    v_scale: torch.Tensor  # [batch, kv heads, headdim]
    q_mean: torch.Tensor  # [batch, q heads, q tiles, headdim]; zero where q is not smoothed
    k_mean: torch.Tensor  # [batch, kv heads, headdim], of a sample; zero where k is not smoothed
    k_factor: torch.Tensor  # likewise, by which channels of k are multiplied; one where k is not balanced
    q_unit: torch.Tensor  # [batch, kv heads, 1], by which rows of q are divided in addition
    v_mean: torch.Tensor  # [batch, kv heads, headdim], as k_mean
    v_factor: torch.Tensor  # [batch, kv heads, kv tiles]: v less its mean is v · v_factor · v_scale
    k_spoilt: torch.Tensor  # [batch, kv heads, keys] bool: the key is not finite
    v_spoilt: torch.Tensor  # [batch, kv heads, keys, headdim] bool: the value is not finite
    row_bias: torch.Tensor  # [batch, q heads, rows], log2 units: q · mean of k
    delta_s: torch.Tensor | None  # [batch, q heads, q tiles, keys], log2 units: q_mean · smoothed k


def quantize(problem: Problem, kernels: Kernels, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Quantized:
    """The kernels before attention: quantization, and delta_s."""
    spec, tile, quant = kernels.attn.spec, kernels.attn.tile, kernels["quant"]
    k, v, q = (pad(x.float(), rows, spec.headdim)
               for x, rows in ((k, tile.block_n), (v, tile.block_n), (q, tile.block_m)))
    k_mean, k_factor, q_unit = statistics_of_k(problem, kernels, q, k)
    k_smoothed = finite_or_zero(k - k_mean[:, :, None])  # what delta_s multiplies
    k = _times(k, k_factor[:, :, None], k_mean[:, :, None])
    k_spoilt = ~k.isfinite().all(-1)
    k = finite_or_zero(k)
    sampled = sampled_rows(problem.seqlen_kv, quant).to(v.device)
    v_hat, v_scale, v_mean, v_factor, v_spoilt = _quantize_v(v, sampled, problem, kernels)

    softmax_scale = torch.tensor(problem.softmax_scale * LOG2_E, dtype=torch.float32)
    group = problem.num_q_heads // problem.num_kv_heads
    row_bias = _row_bias(q, softmax_scale, quant, k_mean.repeat_interleave(group, 1)[:, :, None])
    q_mean = _mean_over_rows(q, problem, kernels)
    q_factor = (1.0 / (k_factor * q_unit)).repeat_interleave(group, 1)[:, :, None]
    q = _times(q, q_factor, q_mean.repeat_interleave(tile.block_m, 2))
    prescaled = spec.qk == "nvfp4"  # rows, instead of their scales
    q = finite_or_zero(q * softmax_scale if prescaled else q)
    q_mean = q_mean * softmax_scale
    delta_s = _delta_s(q_mean, k_smoothed.repeat_interleave(group, 1)) if problem.options.smooth_q else None

    q_groups = _row_groups(q.shape[2], tile.warp_m, quant.fact("row_groups"))
    k_groups = _key_groups(k.shape[2], tile.block_n, quant.fact("key_groups"))
    rotated, clip = bool(problem.options.rotate), problem.options.clip
    q, k = (_rotate(x) if rotated else x for x in (q, k))
    sign = -1.0 if softmax_scale < 0 and not prescaled else 1.0
    q_hat, q_scale = _quantize_rows(q, q_groups, quant, clip, q.shape[2], sign)
    of_scores = 1.0 if prescaled else softmax_scale.abs() * q_unit.repeat_interleave(group, 1)
    q_scale = q_scale * of_scores * (spec.headdim if rotated else 1)
    q_scale = q_scale.clamp(max=torch.finfo(torch.float32).max)
    k_hat, k_scale = _quantize_rows(k, k_groups, quant, clip, problem.seqlen_kv)
    return Quantized(q_hat, k_hat, v_hat, q_scale, k_scale, v_scale, q_mean, k_mean, k_factor, q_unit,
                     v_mean, v_factor, k_spoilt, v_spoilt, row_bias, delta_s)


def pad(x: torch.Tensor, rows: int, headdim: int) -> torch.Tensor:
    """Whole tiles of so many rows: copies of the last row, which nobody sees; and channels of zeros."""
    x = torch.nn.functional.pad(x, (0, headdim - x.shape[-1]))
    return x[:, :, torch.arange(-(-x.shape[2] // rows) * rows).clamp(max=x.shape[2] - 1)]


def sampled_rows(rows: int, quant: KernelRecord) -> torch.Tensor:
    """The rows of a sample, as in quant/sample.cuh: one of every stratum at a hashed position; of few rows all."""
    samples = quant.fact("samples")
    if rows <= samples:
        return torch.arange(rows)
    ends = torch.arange(samples + 1) * rows // samples
    mixed = (torch.arange(1, samples + 1) * 0x9E3779B9) & 0xFFFFFFFF
    mixed = ((mixed ^ mixed >> 16) * 0x85EBCA6B) & 0xFFFFFFFF
    mixed = mixed ^ mixed >> 13
    return ends[:-1] + (mixed * ends.diff() >> 32)


def average(x: torch.Tensor, quant: KernelRecord) -> torch.Tensor:
    """Mean over the rows of a sample in the order of quant/sample.cuh: a thread's rows, then threads."""
    samples, rows_at_once = quant.fact("samples"), quant.fact("rows_at_once")
    count = x.shape[2]
    x = torch.nn.functional.pad(finite_or_zero(x), (0, 0, 0, samples - count))
    parts = torch.zeros_like(x[:, :, :rows_at_once])
    for step in torch.split(x, rows_at_once, 2):
        parts = fma(step, torch.full_like(step, 1 / samples), parts)
    return divide(add_in_order(parts, 2), count / samples)


def subtractable(mean: torch.Tensor, quant: KernelRecord) -> torch.Tensor:
    """A mean, or zero where a value less the mean might lie beyond f32."""
    return torch.where(mean.abs() < quant.facts["largest_mean"], mean, 0.0)


def statistics_of_k(problem: Problem, kernels: Kernels, q: torch.Tensor,
                    k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """k_mean, k_factor and q_unit of :class:`Quantized`, as in quant/statistics.cuh."""
    quant = kernels["quant"]
    sample = k[:, :, sampled_rows(problem.seqlen_kv, quant).to(k.device)].float()
    mean = torch.zeros_like(sample[:, :, 0])
    if problem.options.smooth_k:
        mean = subtractable(average(sample, quant), quant)
    by, most = balance_of(problem), quant.fact("most_balance")
    if by == BY_NOTHING or problem.seqlen_kv < quant.fact("least_keys"):
        return mean, torch.ones_like(mean), torch.ones_like(mean[..., :1])
    of_k = _excess(average((sample - mean[:, :, None]).abs(), quant))
    if by == BY_K:
        log2 = (of_k // 4).clamp(max=most)
    else:
        of_q = _excess(finite_or_zero(_sample_of_q(problem, quant, q)).abs().amax(2))
        log2 = ((of_k - of_q).clamp(min=0) // 2).clamp(max=most)
    return mean, _power_of_two(-log2), _power_of_two(most * (log2 > 0).any(-1, keepdim=True))


def _sample_of_q(problem: Problem, quant: KernelRecord, q: torch.Tensor) -> torch.Tensor:
    """Rows of Q, as many as a sample has, [batch, kv heads, samples, headdim]: of a KV head's query heads by turns."""
    samples, rows = torch.arange(quant.fact("samples")), sampled_rows(problem.seqlen_q, quant)
    of_heads = torch.unflatten(q, 1, (problem.num_kv_heads, -1))
    return of_heads[:, :, samples % of_heads.shape[2], rows[samples.clamp(max=len(rows) - 1)]].float()


def _excess(magnitude: torch.Tensor) -> torch.Tensor:
    """Excess of the exponent of each channel's magnitude over the mean of all channels', [batch, heads, headdim]."""
    exponent = magnitude.view(torch.int32) >> 23
    count = (exponent > 0).sum(-1, keepdim=True).clamp(min=1)
    mean = (2 * exponent.sum(-1, keepdim=True) + count) // (2 * count)
    return (exponent - mean).clamp(min=0)


def _times(x: torch.Tensor, factor: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
    """(x - mean) · factor, as the quantizers compute it."""
    return fma(x, factor.expand_as(x), (-mean * factor).expand_as(x))


def _mean_over_rows(q: torch.Tensor, problem: Problem, kernels: Kernels) -> torch.Tensor:
    """Mean of each query tile in the order of quant/quantize_q.cuh, or zero: a thread's rows, then threads."""
    block_m, rows_at_once = kernels.attn.tile.block_m, kernels["quant"].fact("rows_at_once")
    batch, heads, rows, headdim = q.shape
    if not problem.options.smooth_q:
        return q.new_zeros(batch, heads, rows // block_m, headdim)
    there = (torch.arange(rows, device=q.device) < problem.seqlen_q)[:, None]
    tiles = torch.where(there, finite_or_zero(q), 0.0)
    tiles = tiles.view(batch, heads, -1, block_m // rows_at_once, rows_at_once, headdim)
    count = (problem.seqlen_q - torch.arange(0, rows, block_m, device=q.device)).clamp(max=block_m).float()
    return subtractable(add_in_order(add_in_order(tiles, 3), 3) / count[:, None], kernels["quant"])


def _row_bias(q: torch.Tensor, scale: torch.Tensor, quant: KernelRecord, k_mean: torch.Tensor) -> torch.Tensor:
    """q · scale · k_mean per row in the order of quant/quantize_q.cuh: a lane's channels in FMAs, then halves of the
    lanes. NaN where a row is not finite."""
    vector = quant.fact("vector")
    total = q.new_zeros(*q.shape[:-1], q.shape[-1] // vector)
    for q_channel, k_channel in zip(*(torch.unflatten(x, -1, (-1, vector)).unbind(-1) for x in (q, k_mean))):
        total = fma(q_channel * scale, k_channel, total)
    finite = torch.unflatten(q, -1, (-1, vector)).isfinite().all(-1)
    total = _clamped_term(total).masked_fill(~finite, math.nan)
    while total.shape[-1] > 1:
        lower, upper = total.chunk(2, -1)
        total = lower + upper
    return total[..., 0]


def _delta_s(q_mean: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """q_mean · k per query tile and key, channel after channel in FMAs, as in quant/delta_s.cuh."""
    total = q_mean.new_zeros(*q_mean.shape[:3], k.shape[2])
    for q_channel, k_channel in zip(q_mean.unbind(-1), k.unbind(-1)):
        total = fma(q_channel[..., None], k_channel[:, :, None], total)
    return _clamped_term(total)


def _clamped_term(x: torch.Tensor) -> torch.Tensor:
    """A term of a score within bounds, as in numerics/arithmetic.cuh."""
    return x.nan_to_num(-LARGEST_TERM, math.inf, -math.inf).clamp(-LARGEST_TERM, LARGEST_TERM)


def _rotate(x: torch.Tensor) -> torch.Tensor:
    """Rows times the Hadamard matrix, divided by its size, in the order of numerics/rotation.cuh."""
    headdim, stride = x.shape[-1], 1
    x = x * (1 / headdim)
    while stride < headdim:
        a, b = torch.unflatten(x, -1, (-1, 2, stride)).unbind(-2)
        x = torch.stack([a + b, a - b], -2).flatten(-3)
        stride *= 2
    return x


def _row_groups(rows: int, warp_m: int, groups: int) -> torch.Tensor:
    """Scale group of each query row: rows of a warp with equal row % groups."""
    row = torch.arange(rows)
    return row // warp_m * groups + row % groups


def _key_groups(keys: int, block_n: int, groups: int) -> torch.Tensor:
    """Scale group of each key: keys of a tile with equal key % (2 · groups) // 2."""
    key = torch.arange(keys)
    return key // block_n * groups + key % (2 * groups) // 2


def _quantize_rows(x: torch.Tensor, groups: torch.Tensor, quant: KernelRecord, clip: bool, counted: int,
                   sign: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Integers, times a sign, or NVFP4, with a scale per group of rows; the scales come back per row. `counted`: the
    leading rows whose errors decide about a clip."""
    groups, limit = groups.to(x.device), quant.facts["limit"]
    amax = _over_groups(x.abs().amax(-1), groups, "amax")
    if limit == nvfp4.SCALED_LIMIT:
        scale, inv_scale = (of_groups[:, :, groups] for of_groups in _power_of_two_scale_below(limit, amax, quant))
        return nvfp4.to_nvfp4(x * inv_scale[..., None]), scale
    scale, inv_scale = scale_to(limit, amax, quant)
    if clip and quant.fact("clips") > 1:
        scale, inv_scale = _clipped(x * sign, groups, scale, inv_scale, quant, counted)
    scale, inv_scale = scale[:, :, groups], inv_scale[:, :, groups]
    return rounded(x, sign * inv_scale, limit), scale


def _over_groups(of_rows: torch.Tensor, groups: torch.Tensor, reduce: str) -> torch.Tensor:
    """The sum, or the largest, of what the rows of each group have."""
    zeros = of_rows.new_zeros(*of_rows.shape[:2], int(groups.max()) + 1)
    return zeros.scatter_reduce_(2, groups.expand_as(of_rows), of_rows, reduce)


def rounded(x: torch.Tensor, inv_scale: torch.Tensor, limit: float) -> torch.Tensor:
    """Integers of x times a factor per row, to the nearest even."""
    rounded = (x.double() * inv_scale[..., None].double()).round().float()  # once, as an FMA does
    return rounded.clamp(-limit - 1.0, limit)


def _clipped(x: torch.Tensor, groups: torch.Tensor, scale: torch.Tensor, inv_scale: torch.Tensor,
             quant: KernelRecord, counted: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The candidate of each group with the least squared error, as in quant/clip.cuh, and its reciprocal."""
    of_counted = torch.arange(x.shape[2], device=x.device) < counted
    share, least = 1.0, torch.full_like(scale, math.inf)
    bias = quant.facts["clip_error_bias"]  # added to a squared error it leaves that in units of its last bit
    unit = math.ulp(bias) * 2.0**29  # of f32, which has 29 bits fewer
    best, inv_best = scale, inv_scale
    for _ in range(quant.fact("clips")):
        candidate, inv_candidate = scale * share, inv_scale * to_f32(1.0 / share)
        of_rows = inv_candidate[:, :, groups]
        lost = fma(x, of_rows[..., None].expand_as(x), -rounded(x, of_rows, quant.facts["limit"]))
        squares = (fma(lost, lost, torch.full_like(lost, bias)).double() - bias) / unit
        error = _over_groups(squares.sum(-1) * of_counted, groups, "sum")  # of integers, exact
        cost = error.float() * to_f32(share * share)
        best, inv_best = (torch.where(cost < least, a, b) for a, b in ((candidate, best), (inv_candidate, inv_best)))
        least, share = torch.minimum(cost, least), to_f32(share * quant.facts["clip_step"])
    return best, inv_best


def scale_to(limit: float, amax: torch.Tensor, quant: KernelRecord) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale that takes amax to `limit`, and its reciprocal."""
    zeros = amax < quant.facts["smallest_abs_max"]
    inv_scale = torch.full_like(amax, limit) / amax  # a number over a tensor rounds twice: reciprocal, then product
    return torch.where(zeros, 1.0, divide(amax, limit)), torch.where(zeros, 0.0, inv_scale)


def _power_of_two_scale(magnitude: torch.Tensor, quant: KernelRecord) -> tuple[torch.Tensor, torch.Tensor]:
    """Power of two that takes a magnitude into [2^4, 2^5), and its reciprocal."""
    exponent = torch.frexp(magnitude)[1] - 1
    scale = _power_of_two(exponent.clamp(min=-122) - 4)
    zeros = magnitude < quant.facts["smallest_abs_max"]
    return torch.where(zeros, 1.0, scale), torch.where(zeros, 0.0, 1.0 / scale)


def _power_of_two_scale_below(limit: float, magnitude: torch.Tensor,
                              quant: KernelRecord) -> tuple[torch.Tensor, torch.Tensor]:
    """Power of two that takes a magnitude into [limit / 2, limit), and its reciprocal."""
    scale = _power_of_two(torch.frexp(divide(magnitude, limit))[1].clamp(min=-126))
    zeros = magnitude < quant.facts["smallest_abs_max"]
    return torch.where(zeros, 1.0, scale), torch.where(zeros, 0.0, 1.0 / scale)


def _power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    return ((exponent.int() + 127) << 23).view(torch.float32)  # torch.ldexp is pow(2, ·), which a GPU may round


def _quantize_v(v: torch.Tensor, sampled: torch.Tensor, problem: Problem, kernels: Kernels) -> tuple[torch.Tensor, ...]:
    """V in the PV type, v_scale, v_mean, v_factor and v_spoilt, as in quant/quantize_v.cuh."""
    attn, quant, block_n = kernels.attn, kernels["quant"], kernels.attn.tile.block_n
    sample = v[:, :, sampled]
    mean = torch.zeros_like(v[:, :, 0])
    if problem.options.smooth_v:
        mean = subtractable(average(sample, quant), quant)
    scale, inv_scale = _channel_scale(average((sample - mean[:, :, None]).abs(), quant), mean, kernels)
    shift = -mean * inv_scale
    v = torch.unflatten(v, 2, (-1, block_n))
    scaled = fma(v, inv_scale[:, :, None, None], shift[:, :, None, None])
    finite, bound = v.isfinite(), LARGEST_SCALED[attn.spec.pv]
    magnitude = torch.where(finite, scaled.abs(), 0.0)
    largest = magnitude.clamp(max=bound).amax((-2, -1))
    factor = _tile_factor(largest, attn.facts["v_least"], attn.facts["v_limit"])
    inv_factor = (1.0 / factor)[..., None, None]
    scaled = fma(v, inv_scale[:, :, None, None] * inv_factor, shift[:, :, None, None] * inv_factor)
    most = bound * inv_factor
    scaled = torch.where(finite, scaled.maximum(-most).minimum(most), 0.0)
    v_hat = nvfp4.v_to_nvfp4(scaled) if attn.spec.pv == "nvfp4" else to_pv(scaled, attn.spec.pv)
    if attn.spec.pv == "e4m3":
        usual = ~_of_tiles_at_once(~finite | (magnitude > bound), quant)
        whole = (torch.arange(v.shape[2], device=v.device) + 1) * block_n <= problem.seqlen_kv
        v_hat = torch.where(usual[..., None, None], _keeping_sums(scaled, whole, quant), v_hat)
    return v_hat.flatten(2, 3), scale, mean, factor, ~finite.flatten(2, 3)


def _of_tiles_at_once(marked: torch.Tensor, quant: KernelRecord) -> torch.Tensor:
    """[batch, kv heads, kv tiles]: whether any value is marked of the tiles that a block takes at once. marked: [batch,
    kv heads, kv tiles, keys, channels]."""
    of_tiles = marked.flatten(3).any(-1)
    tiles, at_once = of_tiles.shape[-1], quant.fact("v_tiles_at_once")
    groups = torch.unflatten(torch.nn.functional.pad(of_tiles, (0, -tiles % at_once)), -1, (-1, at_once))
    return groups.any(-1).repeat_interleave(at_once, -1)[..., :tiles]


def _keeping_sums(x: torch.Tensor, whole: torch.Tensor, quant: KernelRecord) -> torch.Tensor:
    """V̂ in e4m3, [batch, heads, tiles, keys, channels], by way of f16; the sums of `whole` tiles are kept as in
    quant/kept_sums.cuh: half of the keys take equal parts of the error of their channel's sum, each at most 1/16 of
    itself."""
    keys, squares = x.shape[3], quant.fact("v_squares")
    column = torch.arange(keys)
    key = column // 32 * 32 + column // 16 % 2 * 16 + column % 4 // 2 * 8 + column // 4 % 4 * 2 + column % 2
    halves = x[:, :, :, key].half()  # in the order of the columns: of four neighbours a thread has the keys
    error = _over_threads(halves - to_pv(halves.float(), "e4m3").half(), squares) * whole[:, None]
    most = halves.abs() * (1 / 16)
    taken = halves + (error * (2 / keys))[:, :, :, None].minimum(most).maximum(-most)
    takes = (column % 4 >= 2)[:, None].to(x.device)
    rounded = to_pv(torch.where(takes, taken, halves).float(), "e4m3")
    return torch.empty_like(rounded).index_copy_(3, key.to(x.device), rounded)


def _over_threads(halves: torch.Tensor, squares: int) -> torch.Tensor:
    """Sums in f16 over the columns of a tile, [..., columns, channels], in the order of the threads' keys."""
    parts = torch.unflatten(halves, 3, (-1, squares, 8, 4))
    of_squares = (parts[..., 0, :] + parts[..., 2, :]) + (parts[..., 1, :] + parts[..., 3, :])
    of_threads = add_in_order(of_squares, 4)
    for _ in range(3):  # eight threads, in pairs
        of_threads = of_threads[..., ::2, :] + of_threads[..., 1::2, :]
    return add_in_order(of_threads[..., 0, :], 3)


def _channel_scale(magnitude: torch.Tensor, mean: torch.Tensor,
                   kernels: Kernels) -> tuple[torch.Tensor, torch.Tensor]:
    """The scale of a channel of V, by what its sample is worth, and its reciprocal."""
    attn, quant = kernels.attn, kernels["quant"]
    smallest = quant.facts["smallest_abs_max"]
    known = magnitude >= (quant.facts["rounding_of_mean"] * mean.abs()).clamp(min=smallest)
    of_samples = torch.where(known, magnitude, 0.0).amax(-1, keepdim=True)
    of_means = mean.abs().amax(-1, keepdim=True)
    likely = mean.abs().maximum(torch.where(of_samples > 0.0, of_samples, of_means))
    magnitude = torch.where(known, magnitude, likely)
    clamped = magnitude.clamp(*SCALED_MAGNITUDES)
    if attn.spec.pv == "f16":
        scale, inv_scale = _power_of_two_scale(clamped, quant)
    else:
        scale, inv_scale = scale_to(attn.facts["v_typical"], clamped, quant)
    zeros = magnitude < smallest
    return torch.where(zeros, 1.0, scale), torch.where(zeros, 1.0, inv_scale)


def _tile_factor(largest: torch.Tensor, least: float, limit: float) -> torch.Tensor:
    """The power of two that brings a tile's largest magnitude into [limit / 2, limit), or one where it need not."""
    exponent = torch.frexp(divide(largest, limit))[1].clamp(min=LEAST_FACTOR)
    fits = (largest == 0) | (largest >= least) & (largest <= limit)
    return torch.where(fits, 1.0, _power_of_two(exponent))
