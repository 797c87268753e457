"""The kernels before attention, in torch: statistics, quantization, and what smoothing Q takes off the scores.

Equal to those of templates/include/sage/quant/ bit for bit, the order of every sum included: what their sums and scales
depend on, the kernels' records say (facts).
Source: SageAttention2, Algorithm 1, sections 3.1 to 3.4 and appendix A.6.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sage_aot._backends.emulation.arithmetic import add_in_order, divide, finite_or_zero, fma, to_pv
from sage_aot._kernels.manifest import KernelRecord
from sage_aot._launch.choose import Kernels
from sage_aot._launch.plan import LOG2_E, chunk_rows_of
from sage_aot._problem.check import Problem


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
    k_finite: torch.Tensor  # [batch, kv heads] i32, keys before the first that is not finite, or 2^31 − 1
    v_finite: torch.Tensor  # [batch, kv heads, headdim] i32, likewise per channel
    row_bias: torch.Tensor  # [batch, q heads, rows], log2 units: q · mean of k
    delta_s: torch.Tensor | None  # [batch, q heads, q tiles, keys], log2 units: q_mean · smoothed k


def quantize(problem: Problem, kernels: Kernels, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Quantized:
    """The kernels before attention: statistics, quantization, and what smoothing Q takes off the scores."""
    spec, tile, quant = kernels.attn.spec, kernels.attn.tile, kernels["quant"]
    all_finite = quant.fact("all_finite")
    k, v = (_pad(tensor.float(), tile.block_n, spec.headdim) for tensor in (k, v))
    q = _pad(q.float(), tile.block_m, spec.headdim)

    k_mean = _mean_over_keys(k, problem, kernels) if problem.options.smooth_k else torch.zeros_like(k[:, :, 0])
    v_mean = _v_mean(v, problem, kernels) if problem.options.smooth_v else torch.zeros_like(v[:, :, 0])
    v_finite = _leading(v.isfinite(), 2, all_finite)
    k, v = _subtract(k, k_mean[:, :, None], problem.seqlen_kv), _subtract(v, v_mean[:, :, None], problem.seqlen_kv)
    k_finite = _leading(k.isfinite().all(-1), -1, all_finite)
    k, v = finite_or_zero(k), finite_or_zero(v)

    q = q * torch.tensor(problem.softmax_scale * LOG2_E, dtype=torch.float32)
    group = problem.num_q_heads // problem.num_kv_heads
    row_bias = _row_bias(q, quant, k_mean.repeat_interleave(group, 1)[:, :, None])
    q_mean = _mean_over_rows(q, problem, kernels)
    q = _subtract(q, q_mean.repeat_interleave(tile.block_m, 2), problem.seqlen_q)
    delta_s = _delta_s(q_mean, k.repeat_interleave(group, 1)) if problem.options.smooth_q else None

    q_groups = _row_groups(q.shape[2], tile.warp_m, quant.fact("row_groups"))
    q_hat, q_scale = _quantize_rows(finite_or_zero(q), q_groups, quant)
    k_hat, k_scale = _quantize_rows(k, _key_groups(k.shape[2], tile.block_n, quant.fact("key_groups")), quant)
    v_hat, v_scale = _quantize_v(v, spec.pv, kernels.attn.facts["v_limit"], quant)
    return Quantized(q_hat, k_hat, v_hat, q_scale, k_scale, v_scale, q_mean, k_mean, v_mean, k_finite, v_finite,
                     row_bias, delta_s)


def _leading(finite: torch.Tensor, dim: int, all_finite: int) -> torch.Tensor:
    """How many are finite before the first that is not, as i32; `all_finite` where all are."""
    count = finite.int().cumprod(dim).sum(dim)
    return torch.where(finite.all(dim), all_finite, count).int()


def _subtract(x: torch.Tensor, mean: torch.Tensor, count: int) -> torch.Tensor:
    """x less a mean in its first `count` rows; the padding stays zero."""
    smooth = x - mean
    smooth[:, :, count:] = 0.0
    return smooth


def _pad(x: torch.Tensor, rows: int, headdim: int) -> torch.Tensor:
    return torch.nn.functional.pad(x, (0, headdim - x.shape[-1], 0, -x.shape[2] % rows))


def _mean_over_keys(x: torch.Tensor, problem: Problem, kernels: Kernels) -> torch.Tensor:
    """Mean over the sequence in the order of quant/statistics.cuh: a thread's rows, then threads, then chunks."""
    rows_at_once = kernels["stats"].fact("rows_at_once")
    x = finite_or_zero(x)[:, :, : problem.seqlen_kv]
    batch, heads, keys, headdim = x.shape
    chunk_rows = chunk_rows_of(keys)
    x = torch.nn.functional.pad(x, (0, 0, 0, -keys % chunk_rows))
    parts = add_in_order(x.view(batch, heads, -1, chunk_rows // rows_at_once, rows_at_once, headdim), 3)
    return finite_or_zero(divide(add_in_order(add_in_order(parts, 3), 2), float(keys)))


def _v_mean(v: torch.Tensor, problem: Problem, kernels: Kernels) -> torch.Tensor:
    """The mean of V, or zero where less the mean some value is beyond f32."""
    mean = _mean_over_keys(v, problem, kernels)
    return torch.where((finite_or_zero(v) - mean[:, :, None]).isfinite().all(2), mean, 0.0)


def _mean_over_rows(q: torch.Tensor, problem: Problem, kernels: Kernels) -> torch.Tensor:
    """Mean of each query tile in the order of quant/quantize.cuh, or zero: a thread's rows, then threads."""
    block_m, rows_at_once = kernels.attn.tile.block_m, kernels["quant"].fact("rows_at_once")
    batch, heads, rows, headdim = q.shape
    if not problem.options.smooth_q:
        return q.new_zeros(batch, heads, rows // block_m, headdim)
    tiles = finite_or_zero(q).view(batch, heads, -1, block_m // rows_at_once, rows_at_once, headdim)
    count = (problem.seqlen_q - torch.arange(0, rows, block_m, device=q.device)).clamp(max=block_m).float()
    return finite_or_zero(add_in_order(add_in_order(tiles, 3), 3) / count[:, None])


def _row_bias(q: torch.Tensor, quant: KernelRecord, k_mean: torch.Tensor) -> torch.Tensor:
    """q · k_mean per row in the order of quant/quantize.cuh: a lane's channels in FMAs, then halves of the lanes."""
    vector = quant.fact("vector")
    total = q.new_zeros(*q.shape[:-1], q.shape[-1] // vector)
    for q_channel, k_channel in zip(*(torch.unflatten(x, -1, (-1, vector)).unbind(-1) for x in (q, k_mean))):
        total = fma(q_channel, k_channel, total)
    while total.shape[-1] > 1:
        lower, upper = total.chunk(2, -1)
        total = lower + upper
    return total[..., 0]


def _delta_s(q_mean: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """q_mean · k per query tile and key, channel after channel in FMAs, as in quant/delta_s.cuh."""
    total = q_mean.new_zeros(*q_mean.shape[:3], k.shape[2])
    for q_channel, k_channel in zip(q_mean.unbind(-1), k.unbind(-1)):
        total = fma(q_channel[..., None], k_channel[:, :, None], total)
    return total


def _row_groups(rows: int, warp_m: int, groups: int) -> torch.Tensor:
    """Scale group of each query row: rows of a warp with equal row % groups."""
    row = torch.arange(rows)
    return row // warp_m * groups + row % groups


def _key_groups(keys: int, block_n: int, groups: int) -> torch.Tensor:
    """Scale group of each key: keys of a tile with equal key % (2 · groups) // 2."""
    key = torch.arange(keys)
    return key // block_n * groups + key % (2 * groups) // 2


def _quantize_rows(x: torch.Tensor, groups: torch.Tensor, quant: KernelRecord) -> tuple[torch.Tensor, torch.Tensor]:
    """Integers with a scale per group of rows; the scales come back per row."""
    limit, clip = quant.facts["limit"], quant.facts["clip"]
    amax = x.abs().amax(-1)
    group_amax = x.new_zeros(*x.shape[:2], int(groups.max()) + 1)
    groups = groups.to(x.device)
    group_amax.scatter_reduce_(2, groups.expand_as(amax), amax, "amax")
    scale, inv_scale = (s[:, :, groups] for s in _scale_to(limit, group_amax * clip, quant))
    rounded = (x.double() * inv_scale[..., None].double()).round().float()  # once, as an FMA does
    return rounded.clamp(-limit - 1.0, limit), scale


def _scale_to(limit: float, amax: torch.Tensor, quant: KernelRecord) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale that takes amax to `limit`, and its reciprocal."""
    zeros = amax < quant.facts["smallest_abs_max"]
    inv_scale = torch.full_like(amax, limit) / amax  # a number over a tensor rounds twice: reciprocal, then product
    return torch.where(zeros, 1.0, divide(amax, limit)), torch.where(zeros, 0.0, inv_scale)


def _power_of_two_scale(amax: torch.Tensor, quant: KernelRecord) -> tuple[torch.Tensor, torch.Tensor]:
    """Power of two that takes amax into [2^14, 2^15), and its reciprocal."""
    exponent = torch.frexp(amax)[1] - 1
    exponent = exponent.clamp(min=-112) - 14
    scale = ((exponent + 127) << 23).view(torch.float32)  # torch.ldexp is pow(2, ·), which a GPU may round
    zeros = amax < quant.facts["smallest_abs_max"]
    return torch.where(zeros, 1.0, scale), torch.where(zeros, 0.0, 1.0 / scale)


def _quantize_v(v: torch.Tensor, pv: str, limit: float, quant: KernelRecord) -> tuple[torch.Tensor, torch.Tensor]:
    """V in the PV type with a scale per channel, which takes the largest value to `limit` for e4m3."""
    amax = v.abs().amax(2)  # equals that of the largest and the smallest value
    scale, inv_scale = _scale_to(limit, amax, quant) if pv == "e4m3" else _power_of_two_scale(amax, quant)
    return to_pv(v * inv_scale[:, :, None], pv), scale
