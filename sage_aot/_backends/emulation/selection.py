"""Selections of blocks of keys in torch: what templates/include/sage/select/ computes. What is pooled equals the
kernel's bit for bit, and so does a choice by "keep"; by "mass" and "tau", exponentials and sums may differ in their
last bits.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from sage_aot._backends.emulation.arithmetic import add_in_order, finite_or_zero, within
from sage_aot._backends.emulation.quantize import average, pad, rounded, sampled_rows, scale_to, subtractable
from sage_aot._kernels.manifest import KernelRecord
from sage_aot._launch.plan import LOG2_E
from sage_aot._launch.selection import pooled_offsets
from sage_aot._problem.selection import Choice, Choosing, Pooling
from sage_aot._problem.tensors import MASK_BLOCK


class Pooled(NamedTuple):
    """Pooled blocks of a tensor, by the fields of PoolParams."""

    x_hat: torch.Tensor  # [batch, heads, blocks, channels] int8
    x_scale: torch.Tensor  # [batch, heads, blocks] f32
    x_alike: torch.Tensor  # likewise


def views_of(pooling: Pooling, data: torch.Tensor) -> Pooled:
    """The parts of what is pooled, in the memory that holds them."""
    offsets, sizes = pooled_offsets(pooling)[0], pooling.sizes()
    shape = pooling.batch, pooling.heads, pooling.blocks
    parts = {name: data[offset: offset + sizes[name]] for name, offset in offsets.items()}
    return Pooled(parts["x_hat"].view(torch.int8).view(*shape, pooling.channels),
                  *(parts[name].view(torch.float32).view(shape) for name in ("x_scale", "x_alike")))


def pool(pooling: Pooling, record: KernelRecord, x: torch.Tensor) -> tuple[Pooled, torch.Tensor]:
    """Pool x, [batch, heads, seqlen, headdim], as the kernel does; return the means of the rows as they came, too."""
    rows = pad(x.float(), 1, pooling.channels)
    centre = torch.zeros_like(rows[:, :, 0])
    if pooling.centre:
        sampled = sampled_rows(pooling.seqlen, record).to(x.device)
        centre = subtractable(average(rows[:, :, sampled], record), record)
    rows = finite_or_zero(rows - centre[:, :, None])
    missing = pooling.blocks * pooling.block_rows - pooling.seqlen
    blocks = torch.unflatten(torch.nn.functional.pad(rows, (0, 0, 0, missing)), 2, (-1, pooling.block_rows))
    counts = _rows_of_blocks(pooling).to(x.device)
    at_once = record.fact("rows_at_once")
    of_threads = add_in_order(_by_threads(blocks, at_once), 3)
    mean = finite_or_zero(add_in_order(of_threads, 3) / counts[:, None])
    amax = mean.abs().amax(-1)
    scale, inv_scale = scale_to(record.facts["limit"], amax, record)
    x_hat = rounded(mean, inv_scale, record.facts["limit"]).to(torch.int8)
    alike = _alike(mean.square().sum(-1), blocks.square().sum((-1, -2)) / counts)
    return Pooled(x_hat, scale, alike), (mean + centre[:, :, None])[..., : pooling.headdim]


def _rows_of_blocks(pooling: Pooling) -> torch.Tensor:
    begins = torch.arange(0, pooling.seqlen, pooling.block_rows)
    return (pooling.seqlen - begins).clamp(max=pooling.block_rows).float()


def _by_threads(blocks: torch.Tensor, at_once: int) -> torch.Tensor:
    """[..., steps, threads of a channel, channels] of [..., rows, channels], zeros behind the last row."""
    rows = blocks.shape[3]
    padded = torch.nn.functional.pad(blocks, (0, 0, 0, -rows % at_once))
    return torch.unflatten(padded, 3, (-1, at_once))


def _alike(of_mean: torch.Tensor, of_rows: torch.Tensor) -> torch.Tensor:
    """The part of the rows' mean square that their mean has; 0 where squares overflow."""
    part = of_mean / of_rows
    return torch.where(of_rows == 0, 1.0, torch.where(part >= 0, part.clamp(max=1.0), 0.0))


# --- the choice -------------------------------------------------------------------------------------------------------


def choose(choosing: Choosing, q: Pooled, k: Pooled, amounts: torch.Tensor | None) -> torch.Tensor:
    """The blocks that are chosen: bool, of choosing.mask_shape."""
    choice, group = choosing.choice, choosing.q.heads // choosing.k.heads
    scores = _scores(choice, q, k, group)
    visible, kept = _visible(choosing).to(scores.device), _kept(choosing).to(scores.device)
    kept = kept.expand(scores.shape)
    if choice.least_alike > 0:
        unlike = (k.x_alike < choice.least_alike).repeat_interleave(group, 1)[:, :, None]
        kept = kept | unlike | (q.x_alike < choice.least_alike)[..., None]
    kept, free = kept & visible, visible & ~kept
    amount = torch.tensor(choice.amount, dtype=torch.float32) if amounts is None else amounts[:, None]
    chosen = _BY[choice.by](choosing, scores, visible.expand(scores.shape), kept, free, amount.to(scores.device))
    rows, columns = (pooling.block_rows // MASK_BLOCK for pooling in (choosing.q, choosing.k))
    return (kept | chosen).repeat_interleave(rows, 2).repeat_interleave(columns, 3)


def _scores(choice: Choice, q: Pooled, k: Pooled, group: int) -> torch.Tensor:
    """[batch, q heads, query blocks, key blocks] in log2 units."""
    k_hat, k_scale = (x.repeat_interleave(group, 1) for x in (k.x_hat, k.x_scale))
    products = (q.x_hat.double() @ k_hat.double().transpose(-1, -2)).float()
    q_scale = q.x_scale * torch.tensor(choice.scale * LOG2_E, dtype=torch.float32)
    scaled = within(products * k_scale[:, :, None], torch.float32) * q_scale[..., None]
    return within(scaled, torch.float32)


def _edges(pooling: Pooling) -> tuple[torch.Tensor, torch.Tensor]:
    """The first and the last row of each block."""
    first = torch.arange(0, pooling.seqlen, pooling.block_rows)
    return first, (first + pooling.block_rows).clamp(max=pooling.seqlen) - 1


def _visible(choosing: Choosing) -> torch.Tensor:
    """[query blocks, key blocks]: whether some query sees some key."""
    (_, last_query), (first_key, _) = _edges(choosing.q), _edges(choosing.k)
    own = last_query + choosing.k.seqlen - choosing.q.seqlen
    if not choosing.choice.is_causal:
        return torch.ones(len(last_query), len(first_key), dtype=torch.bool)
    return first_key <= own[:, None]


def _kept(choosing: Choosing) -> torch.Tensor:
    """True where a block is kept in any case, by its place: [query blocks, key blocks]."""
    choice, keys, queries = choosing.choice, choosing.k.seqlen, choosing.q.seqlen
    (first_query, last_query), (first_key, last_key) = _edges(choosing.q), _edges(choosing.k)
    column = torch.arange(len(first_key))
    kept = (column < choice.first) | (first_key < choice.dense_keys[0]) | (last_key >= keys - choice.dense_keys[1])
    begin, end = (x + keys - queries for x in (first_query, last_query))
    near = (column >= begin.clamp(min=0)[:, None] // choosing.k.block_rows - (choice.near - 1)) & (
        column < torch.where(end < 0, 0, end // choosing.k.block_rows + choice.near)[:, None])
    every = (first_query < choice.dense_queries[0]) | (last_query >= queries - choice.dense_queries[1])
    return kept | (near & (choice.near > 0)) | every[:, None]


def _by_keep(choosing: Choosing, scores: torch.Tensor, visible: torch.Tensor, kept: torch.Tensor, free: torch.Tensor,
             amount: torch.Tensor) -> torch.Tensor:
    """The best, so many that the kept ones and they are a share of all; of equal ones the first."""
    wanted = (amount.float() * visible.sum(-1).float()).ceil().clamp(min=1.0) - kept.sum(-1)
    order = scores.masked_fill(~free, -math.inf).sort(dim=-1, descending=True, stable=True).indices
    ranks = torch.empty_like(order).scatter_(-1, order, torch.arange(order.shape[-1], device=order.device)
                                             .expand_as(order))
    return free & (ranks < wanted[..., None])


def _by_mass(choosing: Choosing, scores: torch.Tensor, visible: torch.Tensor, kept: torch.Tensor, free: torch.Tensor,
             amount: torch.Tensor) -> torch.Tensor:
    """The best, so many that the kept ones and they have a share of the mass; of equal ones all."""
    highest = scores.masked_fill(~visible, -math.inf).amax(-1, keepdim=True)
    keys = _rows_of_blocks(choosing.k).to(scores.device)
    weights = (keys * torch.exp2(scores - highest)).masked_fill(~visible, 0.0)
    wanted = (amount[..., None] * weights.sum(-1, keepdim=True)) - (weights * kept).sum(-1, keepdim=True)
    of_free = scores.masked_fill(~free, -math.inf)
    ordered = of_free.sort(dim=-1, descending=True, stable=True)
    reached = (weights * free).gather(-1, ordered.indices).cumsum(-1)
    last = (reached < wanted).sum(-1, keepdim=True).clamp(max=scores.shape[-1] - 1)  # the first that suffices
    least = ordered.values.gather(-1, last)
    return free & (of_free >= least) & (wanted > 0)


def _by_tau(choosing: Choosing, scores: torch.Tensor, visible: torch.Tensor, kept: torch.Tensor, free: torch.Tensor,
            amount: torch.Tensor) -> torch.Tensor:
    """Blocks whose scores are above the mean by so many standard deviations; at least the best."""
    count = visible.sum(-1, keepdim=True).clamp(min=1)
    mean = scores.masked_fill(~visible, 0.0).sum(-1, keepdim=True) / count
    deviation = (((scores - mean) * visible).square().sum(-1, keepdim=True) / count).sqrt()
    highest = scores.masked_fill(~visible, -math.inf).amax(-1, keepdim=True)
    return free & (scores >= (mean + amount[..., None] * deviation).minimum(highest))


_BY = {"keep": _by_keep, "mass": _by_mass, "tau": _by_tau}
