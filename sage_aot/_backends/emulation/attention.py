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
from dataclasses import dataclass
from importlib import import_module
from typing import NamedTuple, Protocol

import torch

from sage_aot._backends.emulation import nvfp4
from sage_aot._backends.emulation.arithmetic import divide, pv_tile
from sage_aot._backends.emulation.quantize import Quantized
from sage_aot._kernels.manifest import AttnRecord
from sage_aot._kernels.tile import Tile
from sage_aot._launch.plan import LOG2_E, Plan
from sage_aot._package import PACKAGE
from sage_aot._problem.mask import Mask, VisibleKeys
from sage_aot._problem.problem import Problem


class Softmax(Protocol):
    """The online softmax of a family, over the KV tiles of all rows."""

    row_ref: torch.Tensor  # [batch, heads, rows], what P is relative to, log2 units
    row_sum: torch.Tensor  # likewise, the sum of the rounded P times the kernel's sum_unit, by which O is divided
    lse_sum: torch.Tensor  # likewise, that of the log-sum-exp; infinite where P is linear, and row_sum takes its place

    def __init__(self, record: AttnRecord, visible: VisibleKeys, zeros: torch.Tensor, is_linear: bool,
                 bound: torch.Tensor | None) -> None:
        """`visible`: of all rows, where a mask is sparse by the places of KV tiles; `zeros`: [batch, heads, rows];
        `is_linear`: whether P of the call may be; `bound`: likewise [batch, heads, rows], no magnitude of a row's
        scores is larger; None where the kernel does not ask."""
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


def attend(plan: Plan, quantized: Quantized, key_ranks: torch.Tensor | None = None, *, with_lse: bool = True,
           sinks: torch.Tensor | None = None,
           elements: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """The attention kernel of a plan on quantized inputs: output f32 and log-sum-exp, both with padded rows.
    `key_ranks`: how many of the caller's first keys are among the quantized ones, [keys + 1]; None: all. `with_lse`:
    whether the call returns the log-sum-exp. `sinks`: [heads], which the first split has. `elements`: [batch,
    heads, queries, keys] bool, what the masks of the call leave, its window apart; None: all."""
    visible = visible_keys(plan.problem, quantized.q.shape[2], None if key_ranks is None else key_ranks.cpu())
    is_linear = plan.kernels.attn.spec.p == "linear" and not with_lse
    of_splits = []
    for index, split in enumerate(_splits(visible, plan.kernels.attn.tile, plan.splits)):
        walk = _walk(plan, quantized, split, elements)
        of_splits.append(_attend(plan, quantized, visible, walk, is_linear, None if index else sinks))
    return of_splits[0] if plan.splits == 1 else _merge(*map(torch.stack, zip(*of_splits)))


class _Split(NamedTuple):
    """The keys of a split."""

    visible: VisibleKeys  # to rows, among all that these see
    begin: torch.Tensor  # [rows]: the KV tiles of the row's query tile
    end: torch.Tensor


def _splits(visible: VisibleKeys, tile: Tile, splits: int) -> Iterator[_Split]:
    """The splits, as problem/kv_range.cuh shares the KV tiles of a query tile."""
    rows = torch.arange(len(visible.end)) // tile.block_m * tile.block_m
    begin, end = visible.begin[rows] // tile.block_n, -(-visible.end[rows + tile.block_m - 1] // tile.block_n)
    tiles = -(-(end - begin) // splits)
    for split in range(splits):
        own_begin = (begin + split * tiles).minimum(end)
        own_end = (own_begin + tiles).minimum(end)
        keys = VisibleKeys(visible.begin.maximum(own_begin * tile.block_n), visible.end.minimum(own_end * tile.block_n))
        yield _Split(keys, own_begin, own_end)


def _merge(out: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """attn/merge.cuh: output and log-sum-exp of all splits, from those of each, whose outputs are stored within f32."""
    out = out.clamp(-torch.finfo(out.dtype).max, torch.finfo(out.dtype).max)
    largest = lse.amax(0)
    largest = largest.masked_fill(largest == -math.inf, 0.0)
    weights = ((lse - largest) / math.log(2.0)).exp2()
    total = weights.sum(0)
    factor = torch.where(total == 0.0, 0.0, 1.0 / total)
    return (weights[..., None] * out).sum(0) * factor[..., None], largest + total.log2() * math.log(2.0)


def score_bound(plan: Plan, quantized: Quantized, walk: _Walk) -> torch.Tensor:
    """[batch, heads, rows], log2 units: the norm of a row of Q times the largest of the keys that its query tile sees,
    as quant/quantize_k.cuh bounds that."""
    attn, quant = plan.kernels.attn, plan.kernels["quant"]
    group = plan.problem.num_q_heads // plan.problem.num_kv_heads
    of_tiles = _key_norms(quantized, attn.tile.block_n, quant.fact("warps_per_key_group"), quant.fact("vector"))
    largest = walk.largest(of_tiles.repeat_interleave(group, 1)).repeat_interleave(attn.tile.block_m, 2)
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


@dataclass(frozen=True, eq=False)
class _Step:
    """One KV tile of every query tile."""

    first: int  # its first key; by places, the key at that place
    seen: torch.Tensor  # [rows, keys of the tile] bool; by places [batch, heads, rows, keys of the tile]
    tile: Tile

    def of_keys(self, x: torch.Tensor) -> torch.Tensor:
        """Part of [batch, heads, keys, ...] that belongs to the tile's keys."""
        return x[:, :, self.first: self.first + self.tile.block_n]

    def of_tile(self, x: torch.Tensor) -> torch.Tensor:
        """Part of [batch, heads, KV tiles] that belongs to the tile: [batch, heads]."""
        return x[:, :, self.first // self.tile.block_n]

    def delta(self, x: torch.Tensor) -> torch.Tensor:
        """Part of delta_s that belongs to the tile's keys: [batch, heads, rows, keys of the tile]."""
        return x[..., self.first: self.first + self.tile.block_n].repeat_interleave(self.tile.block_m, 2)


@dataclass(frozen=True, eq=False)
class _StepByPlaces(_Step):
    """One place of every query tile, each of which is a head of its own."""

    keys: torch.Tensor  # [batch, heads, q tiles, keys of the tile]: by number

    def of_keys(self, x: torch.Tensor) -> torch.Tensor:
        batch, heads = (torch.arange(size, device=x.device) for size in self.keys.shape[:2])
        return x[batch[:, None, None, None], heads[:, None, None], self.keys].flatten(1, 2)

    def of_tile(self, x: torch.Tensor) -> torch.Tensor:
        return x.gather(-1, self.keys[..., 0] // self.tile.block_n).flatten(1, 2)

    def delta(self, x: torch.Tensor) -> torch.Tensor:
        return x.gather(-1, self.keys).flatten(1, 2)[:, :, None]


class _Walk:
    """The KV tiles of a split, tile after tile: all query tiles go over the same."""

    def __init__(self, plan: Plan, split: _Split) -> None:
        self._tile, self._split = plan.kernels.attn.tile, split
        self.visible = split.visible  # to rows, as a Softmax asks for them

    def of_rows(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, heads, rows, ...] as the steps have it."""
        return x

    def back(self, x: torch.Tensor) -> torch.Tensor:
        """The contrary."""
        return x

    def largest(self, of_tiles: torch.Tensor) -> torch.Tensor:
        """[batch, heads, q tiles]: the largest of the values of the KV tiles that a query tile goes over."""
        first = slice(None, None, self._tile.block_m)
        begin, end = (x[first, None].to(of_tiles.device) for x in (self._split.begin, self._split.end))
        tiles = torch.arange(of_tiles.shape[-1], device=of_tiles.device)
        return torch.where((tiles >= begin) & (tiles < end), of_tiles[:, :, None], 0.0).amax(-1)

    def steps(self, device: torch.device) -> Iterator[_Step]:
        block_n, visible = self._tile.block_n, self._split.visible
        begin, end = int(visible.begin.min()) // block_n * block_n, int(visible.end.max())
        visible = visible.to(device)
        for first in range(begin, end, block_n):
            yield _Step(first, visible.contains(first + torch.arange(block_n, device=device)), self._tile)


class _Places(NamedTuple):
    """The KV tiles of each query tile in the order of its places: first those that the query tile sees whole."""

    tiles: torch.Tensor  # [batch or 1, heads or 1, q tiles, places]: by number
    exists: torch.Tensor  # likewise, bool: a query tile may have fewer
    whole: torch.Tensor  # [batch or 1, heads or 1, q tiles]: how many it sees whole


def _of_window(split: _Split, tile: Tile) -> _Places:
    """Places under a window alone, as problem/kv_range.cuh has them: behind tiles that are seen whole come those behind
    them, then those in front."""
    first, last = (slice(offset, None, tile.block_m) for offset in (0, tile.block_m - 1))
    begin, end = split.begin[first], split.end[first]
    full_begin = (-(-split.visible.begin[last] // tile.block_n)).maximum(begin).minimum(end)
    whole = (split.visible.end[first].minimum(end * tile.block_n) // tile.block_n - full_begin).clamp(min=0)
    count = (end - begin)[:, None]
    places = torch.arange(int(count.max()))
    tiles, exists = begin[:, None] + (places + (full_begin - begin)[:, None]) % count.clamp(min=1), places < count
    return _Places(*(x[None, None] for x in (tiles * exists, exists, whole)))


def _of_lists(seen: torch.Tensor, tile: Tile) -> _Places:
    """Places by lists, as quant/tile_lists.cuh makes them: in the order of the keys those seen whole, then the others.
    `seen`: [batch or 1, heads or 1, rows, keys]."""
    of_tiles = torch.unflatten(torch.unflatten(seen, 3, (-1, tile.block_n)), 2, (-1, tile.block_m))
    anything, everything = of_tiles.any(-1).any(3), of_tiles.all(-1).all(3)
    order = torch.where(everything, 0, torch.where(anything, 1, 2)).sort(dim=-1, stable=True)
    places = int(anything.sum(-1).max())
    return _Places(order.indices[..., :places], order.values[..., :places] < 2, everything.sum(-1))


class _WalkByPlaces(_Walk):
    """The KV tiles of a split, place after place. Each query tile is a head of its own, with its own KV tiles."""

    def __init__(self, plan: Plan, split: _Split, q: torch.Tensor, keys: int, elements: torch.Tensor | None) -> None:
        """`q`: padded; rows behind the last see what it sees; `keys`: of K, padded."""
        super().__init__(plan, split)
        batch, heads, rows, _ = q.shape
        self._seen = split.visible.to(q.device).contains(torch.arange(keys, device=q.device))[None, None]
        if elements is not None:
            queries = torch.arange(rows, device=q.device).clamp(max=elements.shape[2] - 1)
            of_rows = torch.nn.functional.pad(elements[:, :, queries], (0, keys - elements.shape[3]))
            self._seen = self._seen & of_rows
        places = _of_window(split, self._tile) if elements is None else _of_lists(self._seen, self._tile)
        places = _Places(*(x.to(q.device) for x in places))
        self._seen = self._seen.expand(batch, heads, -1, -1)
        self._tiles, self._exists = (x.expand(batch, heads, -1, -1) for x in places[:2])
        ends = (places.whole.expand(batch, heads, -1) * self._tile.block_n).flatten(1)[..., None]
        ends = ends.expand(-1, -1, self._tile.block_m)
        self.visible = VisibleKeys(torch.zeros_like(ends), ends)

    def of_rows(self, x: torch.Tensor) -> torch.Tensor:
        return torch.unflatten(x, 2, (-1, self._tile.block_m)).flatten(1, 2)

    def back(self, x: torch.Tensor) -> torch.Tensor:
        return torch.unflatten(x, 1, (-1, self._tiles.shape[2])).flatten(2, 3)

    def largest(self, of_tiles: torch.Tensor) -> torch.Tensor:
        listed = of_tiles[:, :, None].expand(-1, -1, self._tiles.shape[2], -1).gather(-1, self._tiles)
        return torch.nn.functional.pad(torch.where(self._exists, listed, 0.0), (0, 1)).amax(-1)

    def steps(self, device: torch.device) -> Iterator[_Step]:
        block_m, block_n = self._tile.block_m, self._tile.block_n
        of_query_tiles = torch.unflatten(self._seen, 2, (-1, block_m))
        for place in range(self._tiles.shape[3]):
            tiles, exists = self._tiles[..., place], self._exists[..., place]
            keys = tiles[..., None] * block_n + torch.arange(block_n, device=device)
            of_keys = keys[..., None, :].expand(-1, -1, -1, block_m, -1)
            seen = of_query_tiles.gather(-1, of_keys) & exists[..., None, None]
            yield _StepByPlaces(place * block_n, seen.flatten(1, 2), self._tile, keys)


def _walk(plan: Plan, quantized: Quantized, split: _Split, elements: torch.Tensor | None) -> _Walk:
    if plan.kernels.attn.spec.mask != "sparse":
        return _Walk(plan, split)
    return _WalkByPlaces(plan, split, quantized.q, quantized.k.shape[2], elements)


def _attend(plan: Plan, quantized: Quantized, visible_of_all: VisibleKeys, walk: _Walk, is_linear: bool,
            sinks: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """The attention of rows to the keys of a split, among all that they see."""
    problem, attn = plan.problem, plan.kernels.attn
    group = problem.num_q_heads // problem.num_kv_heads
    k, v, k_scale, v_scale, v_mean, v_factor, k_spoilt, v_spoilt = (x.repeat_interleave(group, 1) for x in (
        quantized.k, quantized.v, quantized.k_scale, quantized.v_scale, quantized.v_mean, quantized.v_factor,
        quantized.k_spoilt, quantized.v_spoilt))
    q, q_scale, row_bias = (walk.of_rows(x) for x in (quantized.q, quantized.q_scale, quantized.row_bias))
    acc_o = torch.zeros_like(q)
    spoilt_rows, spoilt = ~row_bias.isfinite(), torch.zeros_like(acc_o, dtype=torch.bool)
    has_spoilt_keys, has_spoilt_values = bool(k_spoilt.any()), bool(v_spoilt.any())
    bounds_scores = is_linear and attn.facts.get("bounds_scores", False)
    bound = walk.of_rows(score_bound(plan, quantized, walk)) if bounds_scores else None
    softmax = softmax_of(attn.family)(attn, walk.visible.to(k.device), torch.zeros_like(q_scale), is_linear, bound)

    for step in walk.steps(k.device):
        if has_spoilt_keys:
            spoilt_rows |= _sees_any(step.seen, step.of_keys(k_spoilt)[..., None])[..., 0]
        if has_spoilt_values:
            spoilt |= _sees_any(step.seen, step.of_keys(v_spoilt))
        scale = softmax.score_scale(q_scale[..., None] * step.of_keys(k_scale)[:, :, None])
        delta = quantized.delta_s
        scores, scale = _scores(attn.spec.qk, q, step.of_keys(k), scale, None if delta is None else step.delta(delta))
        scores = scores.masked_fill(~step.seen, -math.inf)
        p, alpha = softmax.step(step.first, scores, scale)
        factor = step.of_tile(v_factor)[..., None, None]
        acc_o = acc_o * alpha[..., None] + factor * pv_tile(p, step.of_keys(v), attn.spec.pv_accum)

    acc_o, row_sum, row_ref, lse_sum, row_bias, spoilt_rows, spoilt = (walk.back(x) for x in (
        acc_o, softmax.row_sum, softmax.row_ref, softmax.lse_sum, row_bias, spoilt_rows, spoilt))
    none = row_sum == 0.0 if attn.spec.mask == "sparse" else visible_of_all.none.to(k.device)
    row_bias = row_bias.masked_fill(spoilt_rows, math.nan).masked_fill(none, 0.0)
    unit = attn.facts["sum_unit"]
    factor = torch.where(row_sum > 0, torch.full_like(row_sum, unit) / row_sum, 0.0) + 0.0 * row_bias
    lse_sum = torch.where(lse_sum < math.inf, lse_sum, divide(row_sum, unit))
    lse, share = row_ref + lse_sum.log2() + row_bias, (row_sum > 0).float()
    if sinks is not None:
        sink = (sinks * LOG2_E)[:, None].expand_as(lse)
        rise = sink - row_ref - row_bias - divide(row_sum, unit).log2()
        share = torch.where(row_sum > 0, 1.0 / (1.0 + torch.exp2(rise)), 0.0)
        factor, lse = factor * share, torch.logaddexp2(lse, sink)
    mean = v_mean[:, :, None] * share[..., None]
    out = acc_o * factor[..., None] * v_scale[:, :, None] + mean
    return out.masked_fill(spoilt, math.nan), lse * math.log(2.0)


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
