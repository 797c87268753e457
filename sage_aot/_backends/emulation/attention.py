"""The attention kernels in torch, on the quantizers' outputs.

The emulation goes tile by tile, as the kernels do, and differs from them in the order of the sums of a matrix product
and in ex2.approx. FP8 accumulators keep 13 mantissa bits, as on sm89. The parts that differ between families (scales,
softmax, sums of P) are each family's :class:`Softmax` in sage_aot/_families. Tensors are [batch, heads, seq, headdim];
all arithmetic is f32 unless a cast says otherwise.
Source: SageAttention2, Algorithm 1, sections 3.1 to 3.4 and appendix A.6.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from importlib import import_module
from typing import Protocol

import torch

from sage_aot._backends.emulation import nvfp4
from sage_aot._backends.emulation.arithmetic import divide, pv_tile
from sage_aot._backends.emulation.quantize import Quantized
from sage_aot._kernels.manifest import AttnRecord
from sage_aot._kernels.tile import Tile
from sage_aot._launch.plan import Plan
from sage_aot._package import PACKAGE
from sage_aot._problem.mask import Mask, VisibleKeys
from sage_aot._problem.problem import Problem


class Softmax(Protocol):
    """The online softmax of a family, over the KV tiles of all rows."""

    row_ref: torch.Tensor  # [batch, heads, rows], what P is relative to, log2 units
    row_sum: torch.Tensor  # likewise, the sum of the rounded P times the kernel's sum_unit, by which O is divided
    lse_sum: torch.Tensor  # likewise, that of the log-sum-exp

    def __init__(self, record: AttnRecord, visible: VisibleKeys, zeros: torch.Tensor,
                 bound: torch.Tensor | None) -> None:
        """`visible`: of all rows; `zeros`: [batch, heads, rows]; `bound`: likewise, no magnitude of a row's scores is
        larger; None where no P of the call is linear."""
        ...

    def score_scale(self, scale: torch.Tensor) -> torch.Tensor:
        """The scale of a score as the kernel computes with it, from the product of those of Q and K."""
        ...

    def step(self, first: int, scores: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """P of the tile that begins with the key `first`, rounded to its type, and the factor alpha for all that was
        summed before."""
        ...


def softmax_of(family: str) -> type[Softmax]:
    """The class `Softmax` of a family's module ``emulation``."""
    found: type[Softmax] = import_module(f"{PACKAGE}._families.{family}.emulation").Softmax
    return found


def attend(plan: Plan, quantized: Quantized, key_ranks: torch.Tensor | None = None, *,
           with_lse: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """The attention kernel of a plan on quantized inputs: output f32 and log-sum-exp, both with padded rows.
    `key_ranks`: how many of the caller's first keys are among the quantized ones, [keys + 1]; None: all. `with_lse`:
    whether the call returns the log-sum-exp."""
    visible = visible_keys(plan.problem, quantized.q.shape[2], key_ranks)
    is_linear = plan.kernels.attn.spec.p == "linear" and not with_lse and plan.splits == 1
    bound = score_bound(plan, quantized, visible) if is_linear else None
    of_splits = [_attend(plan.problem, plan.kernels.attn, quantized, visible, own, bound)
                 for own in _splits(visible, plan.kernels.attn.tile, plan.splits)]
    return of_splits[0] if plan.splits == 1 else _merge(*map(torch.stack, zip(*of_splits)))


def _splits(visible: VisibleKeys, tile: Tile, splits: int) -> Iterator[VisibleKeys]:
    """The keys of each split that rows see, as problem/kv_range.cuh shares the KV tiles of a query tile."""
    rows = torch.arange(len(visible.end)) // tile.block_m * tile.block_m
    begin, end = visible.begin[rows] // tile.block_n, -(-visible.end[rows + tile.block_m - 1] // tile.block_n)
    tiles = -(-(end - begin) // splits)
    for split in range(splits):
        own_begin = (begin + split * tiles).minimum(end)
        own_end = (own_begin + tiles).minimum(end)
        yield VisibleKeys(visible.begin.maximum(own_begin * tile.block_n), visible.end.minimum(own_end * tile.block_n))


def _merge(out: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """attn/merge.cuh: output and log-sum-exp of all splits, from those of each."""
    largest = lse.amax(0)
    largest = largest.masked_fill(largest == -math.inf, 0.0)
    weights = ((lse - largest) / math.log(2.0)).exp2()
    total = weights.sum(0)
    factor = torch.where(total == 0.0, 0.0, 1.0 / total)
    return (weights[..., None] * out).sum(0) * factor[..., None], largest + total.log2() * math.log(2.0)


def score_bound(plan: Plan, quantized: Quantized, visible: VisibleKeys) -> torch.Tensor:
    """[batch, heads, rows], log2 units: the norm of a row of Q times the largest of the keys that its query tile sees,
    as quant/quantize_k.cuh bounds that."""
    attn, quant = plan.kernels.attn, plan.kernels["quant"]
    block_m, block_n = attn.tile.block_m, attn.tile.block_n
    group = plan.problem.num_q_heads // plan.problem.num_kv_heads
    of_tiles = _key_norms(quantized, block_n, quant.fact("warps_per_key_group"), quant.fact("vector"))
    last = torch.arange(quantized.q.shape[2]) // block_m * block_m + block_m - 1
    ends = (-(-visible.end[last.to(visible.end.device)] // block_n)).clamp(min=1).to(of_tiles.device)
    largest = of_tiles.cummax(-1).values[:, :, ends - 1].repeat_interleave(group, 1)
    return quantized.q_scale * quantized.q.square().sum(-1).sqrt() * largest


def _key_norms(quantized: Quantized, block_n: int, warps: int, vector: int) -> torch.Tensor:
    """[batch, kv heads, kv tiles]: bounds on the norms of the keys. A thread has some keys of a scale group, and
    `vector` channels of each; a bound adds up the largest squares of the threads, whatever their keys."""
    at_once = 32 * vector // quantized.k.shape[-1]  # keys that a warp reads side by side

    def by_group(of_keys: torch.Tensor) -> torch.Tensor:
        """[..., keys, *] as [..., tiles, groups, keys of a group, *]."""
        of_tiles = torch.unflatten(of_keys, 2, (-1, block_n // 8, 4, 2))
        return of_tiles.transpose(3, 4).flatten(4, 5)

    squares = by_group(torch.unflatten(quantized.k.square(), -1, (-1, vector)).sum(-1))
    of_threads = torch.unflatten(squares, 4, (warps, -1, at_once)).amax(5)
    norms = of_threads.sum(-1).sqrt() * by_group(quantized.k_scale)[..., 0, None, None]
    return norms.flatten(3).amax(-1)


def _attend(problem: Problem, attn: AttnRecord, quantized: Quantized, visible_of_all: VisibleKeys,
            visible: VisibleKeys, bound: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """The attention of rows to the keys that are `visible` to them, among all that they see."""
    group, block_n = problem.num_q_heads // problem.num_kv_heads, attn.tile.block_n
    k, v, k_scale, v_scale, v_mean, v_factor, k_spoilt, v_spoilt = (x.repeat_interleave(group, 1) for x in (
        quantized.k, quantized.v, quantized.k_scale, quantized.v_scale, quantized.v_mean, quantized.v_factor,
        quantized.k_spoilt, quantized.v_spoilt))
    batch, heads, rows, headdim = quantized.q.shape
    begin, end = int(visible.begin.min()) // block_n * block_n, int(visible.end.max())
    visible = visible.to(k.device)
    acc_o = k.new_zeros(batch, heads, rows, headdim)
    spoilt_rows, spoilt = ~quantized.row_bias.isfinite(), torch.zeros_like(acc_o, dtype=torch.bool)
    softmax = softmax_of(attn.family)(attn, visible, k.new_zeros(batch, heads, rows), bound)

    for first in range(begin, end, block_n):
        keys = slice(first, first + block_n)
        seen = visible.contains(first + torch.arange(block_n, device=k.device))
        spoilt_rows |= _sees_any(seen, k_spoilt[:, :, keys, None])[..., 0]
        spoilt |= _sees_any(seen, v_spoilt[:, :, keys])
        scale = softmax.score_scale(quantized.q_scale[..., None] * k_scale[:, :, None, keys])
        delta = quantized.delta_s
        if delta is not None:
            delta = delta[..., keys].repeat_interleave(attn.tile.block_m, 2)
        scores, scale = _scores(attn.spec.qk, quantized.q, k[:, :, keys], scale, delta)
        scores = scores.masked_fill(~seen, -math.inf)
        p, alpha = softmax.step(first, scores, scale)
        factor = v_factor[:, :, first // block_n, None, None]
        acc_o = acc_o * alpha[..., None] + factor * pv_tile(p, v[:, :, keys], attn.spec.pv_accum)

    row_bias = quantized.row_bias.masked_fill(spoilt_rows, math.nan).masked_fill(visible_of_all.none.to(k.device), 0.0)
    row_sum = softmax.row_sum
    unit = attn.facts["sum_unit"]
    factor = torch.where(row_sum > 0, torch.full_like(row_sum, unit) / row_sum, 0.0) + 0.0 * row_bias
    lse_sum = torch.where(softmax.lse_sum < math.inf, softmax.lse_sum, divide(row_sum, unit))
    lse = (softmax.row_ref + lse_sum.log2() + row_bias) * math.log(2.0)
    mean = torch.where(row_sum[..., None] > 0, v_mean[:, :, None], 0.0)
    out = acc_o * factor[..., None] * v_scale[:, :, None] + mean
    return out.masked_fill(spoilt, math.nan), lse


def visible_keys(problem: Problem, rows: int, key_ranks: torch.Tensor | None = None) -> VisibleKeys:
    """The keys that `rows` rows see; rows behind the last query see what it sees. `key_ranks` as in :func:`attend`."""
    queries = torch.arange(rows).clamp(max=problem.seqlen_q - 1)
    visible = Mask.of(problem.options).visible_keys(queries, problem.seqlen_q, problem.seqlen_kv)
    return visible if key_ranks is None else visible.packed(key_ranks)


def _sees_any(seen: torch.Tensor, spoilt: torch.Tensor) -> torch.Tensor:
    """[batch, heads, rows, n]: whether a row sees a key of which something is spoilt, [batch, heads, keys, n]."""
    return seen.float() @ spoilt.float() > 0


def _scores(qk: str, q: torch.Tensor, k: torch.Tensor, scale: torch.Tensor,
            delta: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores with delta_s, and the scale that takes them to log2 units."""
    if qk == "nvfp4":
        assert delta is not None, "kernels of NVFP4 smooth Q"
        return nvfp4.scores(q, k, delta / scale), scale
    scores = q @ k.transpose(2, 3)  # exact: integers below 2^24
    if delta is None:
        return scores, scale
    return finished_scores(scores, scale, delta), torch.ones_like(scale)


def finished_scores(scores: torch.Tensor, scale: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
    """Scores in log2 units: one FMA, as in attn/mma/scores.cuh."""
    return (scores.double() * scale.double() + delta.double()).float()
