"""The attention kernels in torch, on the quantizers' outputs.

The emulation goes tile by tile, as the kernels do, and differs from them in the order of the sums of a matrix product
and in ex2.approx. FP8 accumulators keep 13 mantissa bits, as on sm89. The parts that differ between families (scales,
softmax, sums of P) are each family's :class:`Softmax` in sage_aot/_families. Tensors are [batch, heads, seq, headdim];
all arithmetic is f32 unless a cast says otherwise.
Source: SageAttention2, Algorithm 1, sections 3.1 to 3.4 and appendix A.6.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch

from sage_aot._backends.emulation.arithmetic import keep_13_bits
from sage_aot._backends.emulation.quantize import Quantized
from sage_aot._families.mma.emulation import MmaSoftmax
from sage_aot._families.wgmma.emulation import WgmmaSoftmax
from sage_aot._kernels.manifest import AttnRecord
from sage_aot._launch.choose import Kernels
from sage_aot._problem.check import Problem


class Softmax(Protocol):
    """The online softmax of a family, over the KV tiles of all rows."""

    row_ref: torch.Tensor  # [batch, heads, rows], what P is relative to, log2 units
    row_sum: torch.Tensor  # likewise, the sum of P by which O is divided
    lse_sum: torch.Tensor  # likewise, that of the log-sum-exp

    def __init__(self, record: AttnRecord, smooth_q: bool, limit: torch.Tensor, zeros: torch.Tensor) -> None:
        """`limit`: keys that each row sees; `zeros`: [batch, heads, rows]."""
        ...

    def score_scale(self, scale: torch.Tensor) -> torch.Tensor:
        """The scale of a score as the kernel computes with it, from the product of those of Q and K."""
        ...

    def step(self, first: int, scores: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """P of the tile that begins with the key `first`, rounded to its type, and the factor alpha for all that was
        summed before."""
        ...


SOFTMAX: dict[str, type[Softmax]] = {"mma": MmaSoftmax, "wgmma": WgmmaSoftmax}
"""By family."""


def attend(problem: Problem, kernels: Kernels, quantized: Quantized) -> tuple[torch.Tensor, torch.Tensor]:
    """The attention kernel on quantized inputs: output f32 and log-sum-exp, both with padded rows."""
    attn, smooth_q = kernels.attn, bool(problem.options.smooth_q)
    group, block_n = problem.num_q_heads // problem.num_kv_heads, attn.tile.block_n
    k, v, k_scale, v_scale, v_mean = (x.repeat_interleave(group, 1) for x in (
        quantized.k, quantized.v, quantized.k_scale, quantized.v_scale, quantized.v_mean))
    k_finite, v_finite = (_first_spoilt(finite, block_n).repeat_interleave(group, 1)
                          for finite in (quantized.k_finite, quantized.v_finite))
    v_factor = quantized.v_factor.repeat_interleave(group, 1)
    batch, heads, rows, headdim = quantized.q.shape
    limit = _key_limit(problem, rows)
    last = min(k.shape[2], int(limit.max()))
    limit = limit.to(k.device)
    acc_o = k.new_zeros(batch, heads, rows, headdim)
    softmax = SOFTMAX[attn.family](attn, smooth_q, limit, k.new_zeros(batch, heads, rows))

    for first in range(0, last, block_n):
        keys = slice(first, first + block_n)
        scores = quantized.q @ k[:, :, keys].transpose(2, 3)  # exact: integers below 2^24
        scale = softmax.score_scale(quantized.q_scale[..., None] * k_scale[:, :, None, keys])
        if quantized.delta_s is not None:
            scores = _add_delta(scores, scale, quantized.delta_s[..., keys].repeat_interleave(attn.tile.block_m, 2))
            scale = torch.ones_like(scale)
        scores = scores.masked_fill(first + torch.arange(block_n, device=k.device) >= limit[:, None], -math.inf)
        p, alpha = softmax.step(first, scores, scale)
        factor = v_factor[:, :, first // block_n, None, None]
        acc_o = acc_o * alpha[..., None] + factor * _pv_tile(p, v[:, :, keys], attn.spec.pv_accum)

    spoilt = ~quantized.row_bias.isfinite() | (limit > k_finite[..., None])
    row_bias = quantized.row_bias.masked_fill(spoilt, math.nan).masked_fill(limit == 0, 0.0)
    row_sum = softmax.row_sum
    factor = torch.where(row_sum > 0, 1.0 / row_sum, 0.0) + 0.0 * row_bias
    lse = (softmax.row_ref + softmax.lse_sum.log2() + row_bias) * math.log(2.0)
    mean = torch.where(row_sum[..., None] > 0, v_mean[:, :, None], 0.0)
    out = acc_o * factor[..., None] * v_scale[:, :, None] + mean
    return torch.where(limit[:, None] > v_finite[:, :, None], math.nan, out), lse


def _first_spoilt(finite: torch.Tensor, block_n: int) -> torch.Tensor:
    """The first key that is not finite, over the tiles; beyond any key where there is none."""
    tiles = finite.shape[2]
    first = torch.arange(tiles, device=finite.device).view(-1, *[1] * (finite.dim() - 3)) * block_n + finite
    return torch.where(finite < block_n, first, tiles * block_n).amin(2)


def _key_limit(problem: Problem, rows: int) -> torch.Tensor:
    """Keys that each row sees; causal is aligned bottom-right."""
    if not problem.options.is_causal:
        return torch.full((rows,), problem.seqlen_kv)
    last_row = torch.arange(rows).clamp(max=problem.seqlen_q - 1)
    return (last_row + 1 + problem.seqlen_kv - problem.seqlen_q).clamp(0, problem.seqlen_kv)


def _add_delta(scores: torch.Tensor, scale: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
    """Finished scores in log2 units: one FMA, as in attn/scores.cuh."""
    return (scores.double() * scale.double() + delta.double()).float()


def _pv_tile(p: torch.Tensor, v: torch.Tensor, pv_accum: str) -> torch.Tensor:
    """P·V of one tile; FP8 in products of 32 keys, each of which leaves the accumulator 13 mantissa bits, or f16."""
    if pv_accum == "f32":
        return p @ v
    total = p.new_zeros(*p.shape[:3], v.shape[-1])
    for first in range(0, p.shape[-1], 32):
        total = total + p[..., first: first + 32] @ v[:, :, first: first + 32]
        total = keep_13_bits(total) if pv_accum == "two_level_f32" else total.half().float()
    return total
