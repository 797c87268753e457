"""The backward kernels in torch: the gradients of attention, with P and dS as 8-bit integers or in 16 bits.

The kernels of templates/include/sage/bwd/ differ from the emulation in ex2.approx and rcp.approx, and in the order of
sums in f32. With rounding off, the same formulas give the exact gradients. Tensors are [batch, kv heads, group,
rows, headdim], with rows padded to whole tiles. The group of a kv head are the q heads that read it; K and V have one
entry there.
Source: SageAttention3, Algorithm 3; FlashAttention-2, Algorithm 2, for D.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch

from sage_aot._backends.emulation.arithmetic import divide, finite_or_zero, fma
from sage_aot._backends.emulation.quantize import Quantized
from sage_aot._launch.plan import LOG2_E
from sage_aot._problem.mask import Mask, VisibleKeys

TILE_ROWS = 64
"""Rows of a tile of Q and dO, or of K and V: kTileRows of bwd/tile.cuh."""

GRAD_GROUPS = 8
"""Rows m of a tile of dO with equal m % GRAD_GROUPS share a scale: kGradGroups of bwd/tile.cuh."""

LANE_CHANNELS = 8
"""Channels of a lane in the sums of dO · O: kVector."""

SMALLEST_ROW, SMALLEST_GROUP = 1e-33, 1e-35
"""Least magnitudes that scales go by: kSmallestRow of mma/rounded_rows.cuh, kSmallestAbsMax of numerics/scale.cuh."""

LARGEST_SCALE, LARGEST_PART, USUAL_PART, EQUAL_PART = 2.0**100, 2.0**80, 2.0**20, 2.0**50
"""Largest product of a scale of Q and one of K, and bounds of each: kLargestScale of numerics/scale.cuh, kLargestPart,
kUsualPart and kEqualPart of bwd/prepare.cuh."""

LSE_MARGIN = 2.0**-21
"""Margin of a log-sum-exp: kLseMargin of bwd/prepare.cuh."""


@dataclass(frozen=True)
class Saved:
    """The tensors that the forward pass leaves for the backward pass, in logical order. Channels of Q̂ and K̂ may be
    padded."""

    q_hat: torch.Tensor  # [batch, q heads, queries, headdim] f32 holding integers, with the sign of softmax_scale
    k_hat: torch.Tensor  # [batch, kv heads, keys, headdim] likewise, without a sign
    q_scale: torch.Tensor  # [batch, q heads, queries], times |softmax_scale| · log2 e
    k_scale: torch.Tensor  # [batch, kv heads, keys]
    v: torch.Tensor  # [batch, kv heads, keys, headdim] of the caller
    out: torch.Tensor  # [batch, q heads, queries, headdim] of the caller
    lse: torch.Tensor  # [batch, q heads, queries], natural log: of Q̂ · K̂ with their scales, without row_bias


def saved_of(quantized: Quantized, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> Saved:
    """The tensors that a forward pass on 8-bit integers leaves, neither rotated nor with Q smoothed. `v` and `out` are
    the caller's; `lse` has at least the rows of `out`, and no row_bias."""
    queries, keys = out.shape[2], v.shape[2]
    return Saved(quantized.q[:, :, :queries], quantized.k[:, :, :keys], quantized.q_scale[:, :, :queries],
                 quantized.k_scale[:, :, :keys], v, out, lse[:, :, :queries])


def gradients(saved: Saved, grad_out: torch.Tensor, softmax_scale: float, is_causal: bool, rounding: bool = True,
              key_ranks: torch.Tensor | None = None,
              halves: bool = False) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq, dk and dv, in the shapes of out, v and v, f32. Without `rounding` they are in the dtype of what was saved, to
    be float64, and nothing is rounded to integers.

    grad_out: [batch, q heads, queries, headdim] of the caller. A causal mask is aligned bottom-right. key_ranks:
    [keys + 1], of the caller's keys: how many of the first ones are among those that were saved; None: all. halves:
    whether P and dS are multiplied in 16 bits, a fact of the kernels; else as integers of 8.
    """
    arithmetic: Arithmetic = Rounded() if rounding else Exact()
    tiles = _tiles(saved, grad_out, is_causal, key_ranks, arithmetic)
    grad_q = _grad_q(tiles, halves, arithmetic) * softmax_scale
    grad_k, grad_v = _grad_kv(tiles, grad_out.dtype if halves else None, arithmetic)
    grad_k = grad_k * math.log(2.0)  # q_scale has softmax_scale · log2 e
    shapes = saved.out.shape, saved.v.shape, saved.v.shape
    dq, dk, dv = (x.flatten(1, 2)[:, :, : shape[2], : shape[3]] for x, shape in zip((grad_q, grad_k, grad_v), shapes))
    return dq, dk, dv


# --- rounding, or none ------------------------------------------------------------------------------------------------


class Arithmetic(Protocol):
    """The differences between the kernels and the formulas that they follow."""

    def values(self, x: torch.Tensor) -> torch.Tensor:
        """The values in the dtype of all that follows."""
        ...

    def fma(self, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        """a · b + c."""
        ...

    def minus_lse(self, lse: torch.Tensor) -> torch.Tensor:
        """The log-sum-exp that the exponents of P add, in log2 units; `lse` is a natural logarithm."""
        ...

    def round_grad(self, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """dÔ of whole tiles of dO, and its scale per row."""
        ...

    def round_rows(self, x: torch.Tensor, factor: torch.Tensor, limit: int) -> tuple[torch.Tensor, torch.Tensor]:
        """x · factor as codes of at most `limit`, times the scale of their row: [..., rows, columns], [..., rows, 1].
        factor: of columns, [..., 1, columns]."""
        ...

    def halve(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The values of x in a dtype of 16 bits."""
        ...


class Exact:
    """Codes are the values themselves."""

    def values(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def fma(self, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        return a * b + c

    def minus_lse(self, lse: torch.Tensor) -> torch.Tensor:
        return -(lse * LOG2_E)

    def round_grad(self, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return grad, torch.ones_like(grad[..., 0])

    def round_rows(self, x: torch.Tensor, factor: torch.Tensor, limit: int) -> tuple[torch.Tensor, torch.Tensor]:
        return x * factor, torch.ones_like(x[..., :1])

    def halve(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return x


class Rounded:
    """f32, and codes that are integers."""

    def values(self, x: torch.Tensor) -> torch.Tensor:
        return x.float()

    def fma(self, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        return fma(a, b, c)

    def minus_lse(self, lse: torch.Tensor) -> torch.Tensor:
        """Less a margin, as in bwd/prepare.cuh."""
        lse_log2 = lse * LOG2_E
        return fma(lse_log2.abs(), torch.full_like(lse, LSE_MARGIN), -lse_log2)

    def round_grad(self, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """A scale per group of rows of a tile, as in bwd/prepare.cuh: zero for a group of zeros."""
        groups = torch.unflatten(grad, -2, (-1, TILE_ROWS // GRAD_GROUPS, GRAD_GROUPS))
        amax = groups.abs().amax((-3, -1), keepdim=True)
        zeros = amax < SMALLEST_GROUP
        scale = torch.where(zeros, 0.0, divide(amax, 127.0))
        inv_scale = torch.where(zeros, 0.0, torch.full_like(amax, 127.0) / amax)
        codes = _integers(groups, inv_scale)
        return codes.flatten(-4, -2), scale.expand_as(groups)[..., 0].flatten(-3)

    def round_rows(self, x: torch.Tensor, factor: torch.Tensor, limit: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Round rows as bwd/mma/rounded_rows.cuh does; the scale of a row with a NaN is NaN."""
        amax = (x.abs() * factor).amax(-1, keepdim=True)
        inv_scale = 1.0 / amax.clamp(min=SMALLEST_ROW) * limit
        return _integers(x, inv_scale * factor), amax * (1.0 / limit)

    def halve(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        rounded = x.to(dtype).float()
        return rounded.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max)


def _integers(x: torch.Tensor, inv_scale: torch.Tensor) -> torch.Tensor:
    """x · inv_scale to the nearest even, rounded once, as an FMA does. Zero where that is not finite: then the row's
    scale is not finite either, or next to zero."""
    return finite_or_zero((x.double() * inv_scale.double()).round()).float()


# --- what the kernels read --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tiles:
    """The tiles that bwd/prepare.cuh writes, whole ones, on each side."""

    q_hat: torch.Tensor  # [batch, kv heads, group, rows, headdim]
    q_scale: torch.Tensor  # [batch, kv heads, group, rows]
    minus_lse: torch.Tensor  # likewise, log2 units; −inf where a query sees no key, or does not exist; NaN where spoilt
    minus_delta: torch.Tensor  # likewise, D = Σ dO · O
    grad: torch.Tensor  # [batch, kv heads, group, rows, headdim], dO
    finite: torch.Tensor  # [batch, kv heads, group, rows]: whether dO is
    grad_hat: torch.Tensor  # likewise, dÔ; zeros where dO is not finite, or the query sees no key
    grad_scale: torch.Tensor  # [batch, kv heads, group, rows]
    k_hat: torch.Tensor  # [batch, kv heads, 1, keys, headdim]
    k_scale: torch.Tensor  # [batch, kv heads, 1, keys]
    v: torch.Tensor  # [batch, kv heads, 1, keys, headdim]
    visible: VisibleKeys  # of rows

    @property
    def rows(self) -> int:
        return self.q_hat.shape[-2]

    @property
    def keys(self) -> int:
        return self.k_hat.shape[-2]


def _tiles(saved: Saved, grad_out: torch.Tensor, is_causal: bool, key_ranks: torch.Tensor | None,
           arithmetic: Arithmetic) -> Tiles:
    (queries, headdim), keys, kv_heads = saved.q_hat.shape[2:], saved.k_hat.shape[2], saved.k_hat.shape[1]

    def padded(x: torch.Tensor) -> torch.Tensor:
        return torch.unflatten(_pad(arithmetic.values(x), headdim), 1, (kv_heads, -1))

    def of_rows(x: torch.Tensor) -> torch.Tensor:
        return padded(x[..., None])[..., 0]

    grad, lse = padded(grad_out), of_rows(saved.lse)
    finite = grad.isfinite().all(-1)  # integers hold no NaN: P is NaN where dO is not finite
    counts = finite & (lse != -math.inf)  # a row that sees no key has no part in any gradient
    grad_hat, grad_scale = arithmetic.round_grad(grad.where(counts[..., None], 0.0))
    minus_lse = torch.where(lse == -math.inf, lse, arithmetic.minus_lse(lse))
    rows = torch.arange(minus_lse.shape[-1], device=grad.device)
    q_hat, k_hat = padded(saved.q_hat), padded(saved.k_hat)
    zeros = (q_hat == 0).all(-1)
    zeros = zeros & zeros[..., rows ^ 8]  # of the queries of 16 in a row that share a scale
    zero_keys = torch.unflatten((k_hat == 0).all(-1), -1, (-1, TILE_ROWS // 8, 4, 2))
    q_scale, k_scale = _bounded(of_rows(saved.q_scale), of_rows(saved.k_scale))
    of_group = zero_keys.all(-1, keepdim=True).all(-3, keepdim=True)  # keys 8n + 2t and 8n + 2t + 1 share a scale
    zero_keys = of_group.expand_as(zero_keys).flatten(-4)
    return Tiles(
        q_hat=q_hat, q_scale=q_scale.masked_fill(zeros, 0.0),
        minus_lse=minus_lse.masked_fill(rows >= queries, -math.inf).masked_fill(~finite, math.nan),
        minus_delta=-_delta(grad, padded(saved.out), arithmetic), grad=grad, finite=finite, grad_hat=grad_hat,
        grad_scale=grad_scale,
        k_hat=k_hat, k_scale=k_scale.masked_fill(zero_keys, 0.0),
        v=padded(saved.v),
        visible=_visible(is_causal, rows, queries, keys, key_ranks))


def _bounded(q_scale: torch.Tensor, k_scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales of Q and K, of which the product of one of Q and one of K is at most LARGEST_SCALE. [batch, kv heads,
    group, rows]."""
    def bounded(x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        largest = other.amax((2, 3), keepdim=True).clamp(min=USUAL_PART, max=LARGEST_PART)
        return x.minimum((LARGEST_SCALE / largest).clamp(min=EQUAL_PART))

    return bounded(q_scale, k_scale), bounded(k_scale, q_scale)


def _visible(is_causal: bool, rows: torch.Tensor, queries: int, keys: int,
             key_ranks: torch.Tensor | None) -> VisibleKeys:
    mask = Mask(is_causal=is_causal)
    if key_ranks is None:
        return mask.visible_keys(rows, queries, keys)
    return mask.visible_keys(rows, queries, key_ranks.shape[0] - 1).packed(key_ranks)


def _pad(x: torch.Tensor, headdim: int) -> torch.Tensor:
    """Zeros as further channels and as further rows, up to whole tiles."""
    return torch.nn.functional.pad(x, (0, headdim - x.shape[-1], 0, -x.shape[-2] % TILE_ROWS))


def _delta(grad: torch.Tensor, out: torch.Tensor, arithmetic: Arithmetic) -> torch.Tensor:
    """D in the order of bwd/prepare.cuh: a lane's channels in FMAs, then halves of the lanes."""
    total = torch.zeros_like(grad[..., ::LANE_CHANNELS])
    for of_grad, of_out in zip(*(torch.unflatten(x, -1, (-1, LANE_CHANNELS)).unbind(-1) for x in (grad, out))):
        total = arithmetic.fma(of_grad, of_out, total)
    while total.shape[-1] > 1:
        lower, upper = total.chunk(2, -1)
        total = lower + upper
    return total[..., 0]


# --- gradients --------------------------------------------------------------------------------------------------------


def _grad_q(tiles: Tiles, halves: bool, arithmetic: Arithmetic) -> torch.Tensor:
    """grad_q.cuh of a family: dQ less the factor softmax_scale, tile after tile of keys."""
    total = torch.zeros_like(tiles.q_hat)
    for first in range(0, tiles.keys, TILE_ROWS):
        keys = slice(first, first + TILE_ROWS)
        p, grad_p, seen = _scores(tiles, slice(None), slice(None), keys, arithmetic)
        k_scale, minus_delta = tiles.k_scale[..., None, keys], tiles.minus_delta[..., None]
        if halves:
            grad_s = (arithmetic.fma(grad_p, k_scale, minus_delta * k_scale) * p).where(seen, 0.0)
            total = total + arithmetic.halve(grad_s, torch.bfloat16) @ tiles.k_hat[..., keys, :]
        else:
            grad_s = ((grad_p + minus_delta) * p).where(seen, 0.0)
            codes, scale = arithmetic.round_rows(grad_s, k_scale, 127)
            total = arithmetic.fma(codes @ tiles.k_hat[..., keys, :], scale, total)
    return total


def _grad_kv(tiles: Tiles, half: torch.dtype | None, arithmetic: Arithmetic) -> tuple[torch.Tensor, torch.Tensor]:
    """grad_kv.cuh of a family: dK less the factor ln 2, and dV; head after head of a group, tile after tile of queries.
    half: the dtype of P where P and dS are multiplied in 16 bits."""
    grad_k, grad_v = torch.zeros_like(tiles.k_hat), torch.zeros_like(tiles.k_hat)
    for head in range(tiles.q_hat.shape[2]):
        for first in range(0, tiles.rows, TILE_ROWS):
            head_of_group, rows = slice(head, head + 1), slice(first, first + TILE_ROWS)
            p, grad_s = _transposed(tiles, head_of_group, rows, arithmetic)
            if half:
                more_k, more_v = _half_step(tiles, head_of_group, rows, p, grad_s, half, arithmetic)
                grad_k, grad_v = grad_k + more_k, grad_v + more_v
            else:
                of_k, of_v = _step(tiles, head_of_group, rows, p, grad_s, arithmetic)
                grad_k, grad_v = arithmetic.fma(*of_k, grad_k), arithmetic.fma(*of_v, grad_v)
    return grad_k, grad_v


def _transposed(tiles: Tiles, head: slice, rows: slice, arithmetic: Arithmetic) -> tuple[torch.Tensor, torch.Tensor]:
    """P, and dS times the scales of Q̂, of a tile of queries of one head: [batch, kv heads, 1, keys, rows]."""
    q_scale, minus_delta = (x[:, :, head, None, rows] for x in (tiles.q_scale, tiles.minus_delta))
    p, grad_p, seen = (x.transpose(-2, -1) for x in _scores(tiles, head, rows, slice(None), arithmetic))
    p = p.where(seen, 0.0)
    grad_s = p * arithmetic.fma(grad_p, q_scale, minus_delta * q_scale)
    return p, grad_s.where(seen, 0.0)  # hidden again: dP may be NaN where P is zero


def _step(tiles: Tiles, head: slice, rows: slice, p: torch.Tensor, grad_s: torch.Tensor,
          arithmetic: Arithmetic) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """The addends of a tile of queries of one head to dK and dV: each a product of codes, and the scale of its rows."""
    p_hat, p_scale = arithmetic.round_rows(p, tiles.grad_scale[:, :, head, None, rows], 255)
    grad_s_hat, grad_s_scale = arithmetic.round_rows(grad_s, torch.ones_like(grad_s[..., :1, :]), 127)
    return ((grad_s_hat @ tiles.q_hat[:, :, head, rows], grad_s_scale),
            (p_hat @ tiles.grad_hat[:, :, head, rows], p_scale))


def _half_step(tiles: Tiles, head: slice, rows: slice, p: torch.Tensor, grad_s: torch.Tensor, half: torch.dtype,
               arithmetic: Arithmetic) -> tuple[torch.Tensor, torch.Tensor]:
    """Addends in 16 bits likewise. P of a row of dO that is not finite is NaN where the row sees the key."""
    grad = tiles.grad[:, :, head, rows].where(tiles.finite[:, :, head, rows, None], 0.0)
    return (arithmetic.halve(grad_s, torch.bfloat16) @ tiles.q_hat[:, :, head, rows],
            arithmetic.halve(p, half) @ grad)


def _scores(tiles: Tiles, head: slice, rows: slice, keys: slice,
            arithmetic: Arithmetic) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """P as the forward pass had it, at most 1, dP, and whether a row sees a key: the first two [batch, kv heads, group,
    rows, keys], the last [rows, keys]. Nothing is hidden in the first two. `head`: of each group.
    """
    q_hat, k_hat = tiles.q_hat[:, :, head, rows], tiles.k_hat[..., keys, :]
    scale = tiles.q_scale[:, :, head, rows, None] * tiles.k_scale[..., None, keys]
    scores = q_hat @ k_hat.transpose(-2, -1)  # exact: integers below 2^24
    p = arithmetic.fma(scores, scale, tiles.minus_lse[:, :, head, rows, None]).clamp(max=0.0).exp2()
    grad_p = tiles.grad[:, :, head, rows] @ tiles.v[..., keys, :].transpose(-2, -1)
    columns = torch.arange(tiles.keys, device=p.device)[keys]
    return p, grad_p, tiles.visible.of_rows(rows).contains(columns)
