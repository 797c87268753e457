"""The fuzzer's oracle: what a call must return, from the caller's tensors and the public contract alone.

Attention of each head by itself in float64, and how far quantization may move it. The contract is that of the
docstrings of `sage_aot.attn`, `attn_varlen` and `train_attn`; the bounds follow from the types and scales of
docs/math.md. They hold wherever the kernels draw the limits of tiles and scale groups: the scale of a group is at most
that of its head. Nothing here imports sage_aot, so that no rule of the product is its own judge.

Bounds are of two kinds. A worst case holds for any input. For inputs whose elements are independent
(:attr:`Arithmetic.independent`) errors add up as a random walk, and SIGMAS of its standard deviations bound them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

SIGMAS = 6.0
"""Standard deviations of a random walk that no error of a run exceeds."""

EQUAL_VALUES, EQUAL_VALUES_NVFP4 = 0.002, 0.2
"""Largest distance of f32 outputs from one where V is of ones: P and V round alike there, and nothing averages. NVFP4,
whose sums are of P before it is rounded, promises no more than its rounding of P (docs/accuracy.md)."""

CANCELLED = 2.0**-18
"""Error of dO·Vᵀ less D, two sums in f32, as a share of |dO|·|V|."""

IN_F32 = 2.0**-19
"""Error of what is computed in f32, as a share of the sum of the magnitudes."""

IN_F64 = 2.0**-45
"""Error of sums in float64, likewise."""

LARGE_SCORES = 1e2
"""Largest |score| from which on rows see few keys, and HUGE bounds the mean error of a call."""

HUGE = {"int8": 0.25, "int4": 1.2, "nvfp4": 1.2}
"""Most relative L1 error of N(0, 1) rows whose largest |score| is LARGE_SCORES or more, of any size up to 1e10, by the
type of Q and K: quantization then decides which of two keys with nearly equal scores a row takes, and its error does
not grow with the scores."""

TRAINED_L2 = {"f16": (0.057, 0.054, 0.042), "e4m3": (0.060, 0.054, 0.042)}
"""Most relative L2 error of a head's dQ, dK and dV on N(0, 1), by the type of P and V: three times the figures of
docs/training.md, which are means of 1,024 rows."""

TRAINED_ROWS = 256
"""Queries, and keys, from which on TRAINED_L2 holds: fewer average less. A causal head of 255 had a dQ off by 0.064."""

RARE_VALUES = 0.5
"""Most rounding of FP8 V, as a share of the channel's largest, where few keys of another channel are unlike others: the
factor of a KV tile, which all channels share, follows from the channel that its sample underestimates most. Sums in f16
leave V̂ a range so short that values may vanish."""

_LIMIT = {"int8": 127.0, "int4": 7.0}
_ROUNDING = {"f16": 2.0**-11, "e4m3": 2.0**-4, "nvfp4": 0.5}  # half a unit in the last place, relatively
_HIGH, _LOW = 1.5 / 2.0**0.5 * 2.0**(1 / 16), 2.0**(-1 / 16)
_ROUNDING_OF_LINE = (_HIGH - _LOW) / (_HIGH + _LOW)
"""Rounding of a linear P, relatively: 7.3 %. Its byte is 8·(x + 7) of the score x, less a constant, rounded to an
integer: half a byte, 1/16 octave, at most. The byte 8·(n + f) stands for (1 + f)·2^(n - 7), which is the exponential
times (1 + f)/2^f: from 1, at f = 0, to 1.5/√2, at f = 1/2, the largest of the eighths. Half of this range counts: a
factor that all P of a row have in common, such as the constant's, cancels against their sum."""
_LOST_OF_LINE = 2.0**-6.88
"""The largest exponential whose linear P vanishes: its byte is 8·(x + 7) - 0.459 < 1/2. Bytes from 1 to 7, whose values
are those of no line, lose less."""
_KERNEL_HEADDIMS = 64, 128, 256


@dataclass(frozen=True)
class Arithmetic:
    """The documented roundings of a call."""

    qk: str  # "int8", "int4" or "nvfp4"
    pv: str  # "f16", "e4m3" or "nvfp4"
    rotate: bool
    clip: bool
    smooth_q: bool
    smooth_k: bool
    smooth_v: bool
    half_sums: bool  # P·V adds up in f16
    independent: bool  # elements of q, k and v; errors are then a random walk
    rare_values: bool  # in some channels of v few keys are unlike the others
    linear_p: bool = False  # P may follow from scores by a line
    balanced: bool = False  # channels of k far larger than most are divided, and those of q multiplied
    of_merged: float = 0.0  # rounding to the call's dtype: of means that are keys and values, and of merged outputs

    @property
    def worst_step(self) -> float:
        """Most rounding of an element of q or k, as a share of the largest element of its scale group."""
        if self.qk == "nvfp4":
            return 0.18  # half the last step of e2m1, 4 to 6, of a scale rounded to e4m3
        if self.qk == "int4" and self.clip:
            return 1 - 0.9**5
        return 0.5 / _LIMIT[self.qk]

    @property
    def deviation(self) -> float:
        """Standard deviation of that rounding. Clips are chosen for the least squares, so that they add nothing."""
        return 0.36 / math.sqrt(12) if self.qk == "nvfp4" else 1 / _LIMIT[self.qk] / math.sqrt(12)

    @property
    def of_p(self) -> float:
        return _ROUNDING_OF_LINE if self.linear_p else _ROUNDING[self.pv]

    @property
    def of_v(self) -> float:
        """A value of V in e4m3 may take as much of its channel's error as rounding changes it."""
        return (2 * _ROUNDING[self.pv] if self.pv == "e4m3" else _ROUNDING[self.pv]) + self.of_merged

    @property
    def of_equal_values(self) -> float:
        """A V less its mean is zero, whatever the weights."""
        return EQUAL_VALUES_NVFP4 if self.pv == "nvfp4" and not self.smooth_v else EQUAL_VALUES

    @property
    def lost_of_p(self) -> float:
        """Rounding of a P that is subnormal or vanishes, as a share of the row's largest."""
        # e4m3: half of 2^-9, of a range that ends at 56 or more; 24th parts of a group's largest vanish in NVFP4.
        of_e4m3 = _LOST_OF_LINE if self.linear_p else 2.0**-10
        return {"f16": 2.0**-31, "e4m3": of_e4m3 / 56, "nvfp4": 1 / 24}[self.pv]

    @property
    def lost_of_v(self) -> float:
        """Rounding of a V that is subnormal or vanishes, as a share of the channel's largest."""
        if self.rare_values and self.pv != "f16":
            return 1.0 if self.half_sums else RARE_VALUES
        if self.half_sums:
            return 2.0**-10 * 64 / 9
        return {"f16": 2.0**-25, "e4m3": 2.0**-10 / 14, "nvfp4": 1 / 24}[self.pv]

    @property
    def of_sums(self) -> float:
        """Share that accumulators of P·V cut off, of the sum of the magnitudes."""
        return {"f16": 2.0**-12, "e4m3": 2.0**-6 if self.half_sums else 2.0**-7, "nvfp4": 2.0**-7}[self.pv]


# --- which keys a query sees ------------------------------------------------------------------------------------------


def visible_keys(queries: int, keys: int, *, is_causal: bool, top_left: bool = False,
                 window: tuple[int, int] | None = None, elements: torch.Tensor | None = None,
                 key_mask: torch.Tensor | None = None, device: torch.device | str = "cpu") -> torch.Tensor:
    """[1 or batch, 1 or q heads, queries, keys] bool. Causal: query i sees the keys j <= i + keys - queries, or,
    aligned top-left as torch's SDPA, j <= i. Window: as many keys in front of i + keys - queries, and behind it, as its
    sides say; any where a side is -1. `elements`: of that shape, what the masks of the call leave."""
    i, j = torch.arange(queries, device=device)[:, None], torch.arange(keys, device=device)
    seen = j <= i + (0 if top_left else keys - queries) if is_causal else torch.ones_like(i * j, dtype=torch.bool)
    left, right = window or (-1, -1)
    if left >= 0:
        seen = seen & (j >= i + keys - queries - left)
    if right >= 0:
        seen = seen & (j <= i + keys - queries + right)
    seen = seen[None, None] if elements is None else seen & elements
    return seen if key_mask is None else seen & key_mask[:, None, None]


class Tail(NamedTuple):
    """Keys in float64 with the means of their blocks behind them, each of which counts as all keys of its block."""

    k: torch.Tensor  # [batch, kv heads, keys and blocks, headdim]
    v: torch.Tensor
    visible: torch.Tensor  # [.., queries, keys and blocks]: keys of blocks that are chosen, means of the others
    counts: torch.Tensor  # [keys and blocks]: as how many keys each counts

    @classmethod
    def of(cls, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor, chosen: torch.Tensor, block: int) -> Tail:
        """The tail of what is not chosen, of blocks of so many keys. `visible`: the keys that a query may see, whatever
        is chosen; `chosen`: the keys of chosen blocks; of one shape."""
        firsts = torch.arange(0, k.shape[2], block, device=k.device)
        rows = (k.shape[2] - firsts).clamp(max=block)
        k, v = (torch.cat([x.double(), _means(x, block)], 2) for x in (k, v))
        return cls(k, v, torch.cat([visible & chosen, (visible & ~chosen)[..., firsts]], -1),
                   torch.cat([rows.new_ones(k.shape[2] - len(rows)), rows]))


def _means(x: torch.Tensor, rows: int) -> torch.Tensor:
    """Means of blocks of rows, in which values that are not finite are zeros."""
    blocks = torch.where(x.isfinite(), x, 0.0).double().split(rows, 2)
    return torch.stack([block.mean(2) for block in blocks], 2)


# --- the output -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Expected:
    """Results that a call must return: [batch, q heads, queries, ...]."""

    out: torch.Tensor
    lse: torch.Tensor
    spoilt_rows: torch.Tensor  # bool: NaN by contract
    spoilt: torch.Tensor  # bool, of elements; those of `spoilt_rows` too
    bound: torch.Tensor  # of |out - Expected.out|
    row_bound: torch.Tensor  # of the L2 norm of a row's error in units of `units`
    units: torch.Tensor  # [batch, q heads, 1, headdim]: the largest |v| of a channel
    lse_bound: torch.Tensor


@dataclass(frozen=True)
class _Heads:
    """One call's tensors in float64, non-finite values as zeros; k and v once for each q head."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    seen: torch.Tensor  # [batch or 1, q heads or 1, queries, keys]
    scale: float
    logs: torch.Tensor  # of the weights
    weights: torch.Tensor  # [batch, q heads, queries, keys], of rows that see no key zeros
    off: torch.Tensor  # most change of a weight
    out: torch.Tensor
    lse: torch.Tensor
    moved: torch.Tensor  # [batch, q heads, queries]: most error of a score, nats
    deviation: torch.Tensor  # its standard deviation, at most
    means: torch.Tensor | None  # [keys] bool: means of blocks, of a second attention, which is merged


def heads_of(q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
    """Kv head of each q head: h // (q heads // kv heads)."""
    return torch.arange(q.shape[1], device=q.device) // (q.shape[1] // kv.shape[1])


def expect(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float | None, visible: torch.Tensor,
           arithmetic: Arithmetic, key_mask: torch.Tensor | None = None, sinks: torch.Tensor | None = None,
           counts: torch.Tensor | None = None) -> Expected:
    """Attention of [batch, heads, seq, headdim] tensors, and its bounds. `visible`: of :func:`visible_keys`;
    `key_mask`: the keys that take part at all, as far as the caller says so; `sinks`: [q heads]; `counts`: of a Tail,
    as k, v and `visible` are then."""
    heads = _attend(q, k, v, scale, visible, arithmetic, key_mask, sinks, counts)
    rows, elements = _spoilt(q, k, v, visible)
    bound, row_bound, units = _bounds(heads, arithmetic, key_mask, torch.finfo(q.dtype))
    return Expected(heads.out, heads.lse, rows, elements, bound, row_bound, units, _bound_of_lse(heads, arithmetic))


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None, visible: torch.Tensor,
            arithmetic: Arithmetic, key_mask: torch.Tensor | None, sinks: torch.Tensor | None = None,
            counts: torch.Tensor | None = None) -> _Heads:
    """A sink is one key more, whose score is that of every row and whose value is zero."""
    scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else float(scale)
    of = heads_of(q, k)
    q, k, v = (torch.where(x.isfinite(), x, 0.0).double() for x in (q, k[:, of], v[:, of]))
    if key_mask is not None:  # nothing depends on what other keys hold
        k, v = (x * key_mask[:, None, :, None] for x in (k, v))
    seen = visible
    scores = (q @ k.mT * scale).masked_fill_(~seen, -math.inf)
    if counts is not None:
        scores += counts.double().log()
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[:, None, None].expand(*scores.shape[:3], 1)], -1)
        v = torch.nn.functional.pad(v, (0, 0, 0, 1))
    lse = scores.logsumexp(-1)
    logs = scores.sub_(lse.clamp(min=-1e300)[..., None])
    weights = logs.exp()
    moved, deviation = _errors_of_scores(q, k, scale, arithmetic, key_mask)
    off = _off(logs, weights, 2 * moved[..., None])
    means = None if counts is None else counts > 1
    return _Heads(q, k, v, seen, scale, logs, weights, off, weights @ v, lse, moved, deviation, means)


def _off(logs: torch.Tensor, weights: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    """Most change of weights that are off by a factor of exp(±by), of which none exceeds one. By their logarithms: the
    weights of far keys vanish, even in float64."""
    return torch.where(by < 1.0, weights * by.clamp(max=1.0).expm1(), (logs + by).clamp(max=0.0).exp())


def _spoilt(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
            visible: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """NaN or infinity in a query spoils its row, if that sees a key; in a key the rows that see it; in v its channel of
    the rows that see its key."""
    of, seen = heads_of(q, k), visible.float()
    bad_q = ~q.isfinite().all(-1)
    bad_k = (~k.isfinite().all(-1)).float()[:, of]
    bad_v = (~v.isfinite()).float()[:, of]
    rows = bad_q & seen.any(-1) | ((seen @ bad_k[..., None])[..., 0] > 0)
    return rows, rows[..., None] | (seen @ bad_v > 0)


# What quantization does to scores -------------------------------------------------------------------------------------


def spread(x: torch.Tensor, smoothed: bool, present: torch.Tensor | None = None) -> torch.Tensor:
    """Most magnitude of each element before it is rounded. Smoothed: less a mean of values of its channel, which lies
    between the least and the largest of these, and zero where some are not finite."""
    if not smoothed or x.shape[2] == 0:
        return x.abs()
    low, high = x.amin(2, keepdim=True), x.amax(2, keepdim=True)  # keys that are masked out count as zeros here
    farthest = torch.maximum(x - low, high - x)
    return farthest if present is None else farthest * present[:, None, :, None]


def _most_balance(k: torch.Tensor) -> torch.Tensor:
    """The most by which a channel of q may be multiplied before it is rounded, [batch, q heads, 1, headdim]: one, or
    where the channel of k is far larger than most, up to 16 and not much more than the square root of how many times.
    """
    largest = k.amax(2, keepdim=True) if k.shape[2] else k.new_ones(*k.shape[:2], 1, k.shape[3])
    logs = largest.log().masked_fill(largest == 0, 0.0)
    typical = (logs.sum(-1, keepdim=True) / (largest > 0).sum(-1, keepdim=True).clamp(min=1)).exp()
    times = largest / typical
    return torch.where(times < 2.5, 1.0, (2 * times).sqrt().clamp(max=16.0))


def _errors_of_scores(q: torch.Tensor, k: torch.Tensor, scale: float, arithmetic: Arithmetic,
                      key_mask: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Most error of any score of a row, and its standard deviation, [batch, q heads, queries], nats. An element of q is
    off by a share of its group's largest; a score sees that times an element of k, and the other way round."""
    in_f32 = IN_F32 * abs(scale) * q.norm(dim=-1) * k.norm(dim=-1).amax(-1, keepdim=True)  # means too
    of_means = arithmetic.of_merged * abs(scale) * q.norm(dim=-1)  # whose elements are rounded as the call's are
    worst_of_means = of_means * k.norm(dim=-1).amax(-1, keepdim=True)
    walk_of_means = of_means * k.abs().amax((-1, -2))[..., None] / math.sqrt(3)
    q, k = spread(q, arithmetic.smooth_q), spread(k, arithmetic.smooth_k, key_mask)
    if arithmetic.balanced:  # of fewer keys than 16, nothing is
        q = q * _most_balance(k)
    norms_q, norms_k = q.norm(dim=-1), k.norm(dim=-1)
    largest_k = norms_k.amax(-1, keepdim=True)
    channels = q.shape[-1]
    if arithmetic.rotate:  # an orthogonal product, of rows padded to the kernel's head dim
        channels = min(width for width in _KERNEL_HEADDIMS if width >= channels)
        tops_q, tops_k = norms_q.amax(-1, keepdim=True), largest_k
        sums_q, sums_k = math.sqrt(channels) * norms_q, math.sqrt(channels) * largest_k
        typical = min(1.0, 5.0 / math.sqrt(channels))  # largest of independent channels
    else:
        tops_q, tops_k = (x.amax((-1, -2))[..., None] for x in (q, k))
        sums_q, sums_k = q.sum(-1), k.sum(-1).amax(-1, keepdim=True)
        typical = 1.0
    step_q, step_k = (arithmetic.worst_step * top for top in (tops_q, tops_k))
    worst = abs(scale) * (sums_q * step_k + sums_k * step_q + channels * step_q * step_k) + in_f32 + worst_of_means
    of_q, of_k = (arithmetic.deviation * typical * top for top in (tops_q, tops_k))
    walk = abs(scale) * ((norms_q * of_k).square() + (largest_k * of_q).square()
                         + channels * (of_q * of_k).square()).sqrt() + in_f32 + walk_of_means
    return torch.minimum(worst, SIGMAS * walk) if arithmetic.independent else worst, torch.minimum(walk, worst)


def _bound_of_lse(heads: _Heads, arithmetic: Arithmetic) -> torch.Tensor:
    """The log-sum-exp moves by the mean, by weight, of the errors of the scores. Independent ones cancel, but for what
    the keys have in common in addition to the mean that smoothing takes off: an eighth of their deviation, for that
    mean is of 64 keys; a quarter is allowed."""
    stored = _stored_lse(heads)
    if not (arithmetic.independent and arithmetic.smooth_k):
        return heads.moved + stored
    deviation = heads.deviation
    averaged = SIGMAS * deviation * (heads.weights.square().sum(-1) + 1 / 16).sqrt() + deviation.square()
    return torch.where(SIGMAS * deviation <= 1.0, torch.minimum(averaged, heads.moved), heads.moved) + stored


def _stored_lse(heads: _Heads) -> torch.Tensor:
    """Bound of a log-sum-exp's error in addition to the errors of scores: the product of a query and the mean of the
    keys adds up in f32."""
    terms = (heads.q.abs() @ heads.k.abs().amax(-2, keepdim=True).mT)[..., 0] * abs(heads.scale)
    summed = heads.q.shape[-1] * 2.0**-23 * terms
    return 0.01 + 2.0**-20 * heads.lse.abs().nan_to_num(posinf=0.0, neginf=0.0) + summed


# What they do to the output -------------------------------------------------------------------------------------------


def _bounds(heads: _Heads, arithmetic: Arithmetic, key_mask: torch.Tensor | None,
            info: torch.finfo) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Bounds of elements, of rows, and the units of the rows' norms. A sink is off as a key is, in its score relative
    to the others; in addition, what the log-sum-exp is off changes its share of a row."""
    v, out = heads.v, heads.out
    units = v.abs().amax(2, keepdim=True).clamp(min=1e-300)
    small, expected = v / units, out / units
    if key_mask is not None and v.shape[2] > key_mask.shape[1]:  # a sink's value too is of the range
        key_mask = torch.nn.functional.pad(key_mask, (0, 1), value=True)
    rest = spread(v, arithmetic.smooth_v, key_mask)  # what is rounded of V
    none = ~heads.seen.any(-1)  # rows that see no key are zeros, exactly
    stored = info.eps * out.abs() + info.smallest_normal * info.eps + 2.0**-20 * units + 1e-34
    of_sinks = heads.weights[..., heads.seen.shape[-1]:].sum(-1)  # zero without any
    stored = stored + (of_sinks * _stored_lse(heads))[..., None] * out.abs()
    if heads.means is not None:  # the merged outputs, and the means of V, are rounded before the output is
        stored = stored + _of_merging(heads, arithmetic) + info.smallest_normal * info.eps
    lost = arithmetic.lost_of_p * heads.seen.sum(-1, keepdim=True).clamp(max=1e6) + arithmetic.lost_of_v
    elements = torch.minimum(_worst_of_elements(heads, arithmetic, rest), 2.2 * rest.amax(2, keepdim=True))
    rows = _worst_of_rows(heads, arithmetic, small, expected, rest / units)
    if arithmetic.independent:
        walks = _walks(heads, arithmetic, rest)
        near = (SIGMAS * heads.deviation <= 1.0)[..., None]  # else a score's error is no small change of a weight
        elements = torch.where(near, torch.minimum(elements, walks), elements)
        rows = torch.where(near[..., 0], torch.minimum(rows, (walks / units).norm(dim=-1)), rows)
    elements = elements + lost * rest.amax(2, keepdim=True) + stored
    rows = rows + math.sqrt(v.shape[-1]) * lost[..., 0] + (stored / units).norm(dim=-1)
    return elements.masked_fill(none[..., None], 0.0), rows.masked_fill(none, 0.0), units


def _of_merging(heads: _Heads, arithmetic: Arithmetic) -> torch.Tensor:
    """Most error of the merge of two outputs: of their shares, which follow from the log-sum-exps, and of roundings."""
    weights = heads.weights[..., : len(heads.means)] * heads.means
    share = weights.sum(-1, keepdim=True).clamp(max=1.0)  # which sums exceed by their rounding
    part = weights @ heads.v[:, :, : len(heads.means)]
    tail, rest = part / share.clamp(min=1e-300), (heads.out - part) / (1 - share).clamp(min=1e-12)
    logit, off = share.logit(), 2 * _stored_lse(heads)[..., None]
    moved = torch.maximum((logit + off).sigmoid() - share, share - (logit - off).sigmoid())
    rounded = 4 * arithmetic.of_merged * (share * (tail - rest).abs() + part.abs() + (heads.out - part).abs())
    return moved * (tail - rest).abs() + rounded


def _worst_of_elements(heads: _Heads, arithmetic: Arithmetic, rest: torch.Tensor) -> torch.Tensor:
    """Weights are off, and P and V by their rounding. Changes of weights sum to zero, so that V's mean, where it is
    smoothed, takes no part."""
    rounded = (1 + arithmetic.of_p) * (1 + arithmetic.of_v) * (1 + arithmetic.of_sums)
    return (heads.off @ rest) * rounded + (heads.weights @ rest) * (rounded - 1)


def _worst_of_rows(heads: _Heads, arithmetic: Arithmetic, v: torch.Tensor, out: torch.Tensor,
                   rest: torch.Tensor) -> torch.Tensor:
    """Worst error of a row's norm: the output is a mean of values, so where weights are off it still lies among the
    values of those keys whose weight may count."""
    distance = (v.square().sum(-1)[:, :, None] + out.square().sum(-1)[..., None] - 2 * out @ v.mT).clamp(min=0).sqrt()
    may_count = heads.logs + 2 * heads.moved[..., None] > -28
    sizes = rest.norm(dim=-1)[:, :, None]
    apart = torch.minimum((heads.off * distance).sum(-1), _largest(distance, may_count))
    size = torch.minimum(((heads.weights + heads.off) * sizes).sum(-1), _largest(sizes, may_count))
    rounded = arithmetic.of_p * (1 + arithmetic.of_v) + arithmetic.of_v + arithmetic.of_sums
    return apart * (1 + arithmetic.of_p) + size * rounded + 1e-7


def _largest(of_keys: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
    return torch.where(where, of_keys, 0.0).amax(-1) + 1e-9 * of_keys.amax(-1)


def _walks(heads: _Heads, arithmetic: Arithmetic, rest: torch.Tensor) -> torch.Tensor:
    """Errors of elements, where errors of keys are independent: those of scores and of P multiply v - out, and those of
    P that round alike, |out|."""
    squares, out = heads.weights.square(), heads.out
    apart = (squares @ heads.v.square() - 2 * out * (squares @ heads.v)
             + out.square() * squares.sum(-1, keepdim=True)).clamp(min=0).sqrt()
    sizes = (squares @ rest.square()).sqrt()
    deviation = heads.deviation[..., None]
    walk = (deviation + arithmetic.of_p / math.sqrt(3)) * apart + arithmetic.of_v / math.sqrt(3) * sizes
    together = arithmetic.of_p * out.abs() + arithmetic.of_sums * (heads.weights @ rest)
    return SIGMAS * (SIGMAS * deviation).clamp(max=1.0).exp() * walk + together


# --- gradients --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Gradients:
    """Results of a backward pass, by name of the input: gradients, their bounds, and which rows may be anything, since
    something that is not finite reaches them."""

    expected: dict[str, torch.Tensor]
    bound: dict[str, torch.Tensor]
    tainted: dict[str, torch.Tensor]  # [batch, heads, rows] bool
    lost: torch.Tensor  # [batch, q heads, queries] bool: grad_q must not be finite there


def gradients(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, grad_out: torch.Tensor, *,
              scale: float | None, visible: torch.Tensor, arithmetic: Arithmetic,
              key_mask: torch.Tensor | None = None) -> Gradients:
    """The gradients of exact attention, and how far those of 8 bits may lie from them, by docs/training.md: P of the
    quantized scores, D of the call's own output `out`, and a rounding of P, dO and dS each."""
    heads = _attend(q, k, v, scale, visible, arithmetic, key_mask)
    lost = ~grad_out.isfinite().all(-1) & heads.seen.any(-1)
    made, grad = (torch.where(x.isfinite(), x, 0.0).double() for x in (out, grad_out))
    p = heads.weights
    dp, d = grad @ heads.v.mT, (grad * heads.out).sum(-1, keepdim=True)
    ds = p * (dp - d)
    off_p = heads.off
    noise = CANCELLED * grad.norm(dim=-1) * heads.v.norm(dim=-1).amax(-1, keepdim=True)
    off_d = ((grad * (made - heads.out)).sum(-1).abs() + noise)[..., None]
    off_ds = off_p * (dp - d).abs() + (p + off_p) * off_d
    size = ds.abs() + off_ds
    rounded = {"q": spread(heads.q, False), "k": spread(heads.k, True, key_mask), "out": grad.abs()}
    top = {name: x.amax((-1, -2))[..., None, None] for name, x in rounded.items()}
    seen, reach = heads.seen.double(), rounded["k"].amax(2, keepdim=True)
    bound_q = abs(heads.scale) * (off_ds.sum(-1, keepdim=True) * reach
                                  + (size.sum(-1, keepdim=True) * 2 + _steps(size, seen, -1)) * top["k"] / 254)
    bound_k = abs(heads.scale) * (off_ds.mT @ rounded["q"]
                                  + (size.sum(-2)[..., None] * 2 + _steps(size, seen, -2)) * top["q"] / 254)
    of_scores = 1 + heads.lse.abs().nan_to_num(posinf=0.0)[..., None]  # whose rounding P has
    in_f64 = IN_F64 * abs(heads.scale) * of_scores * p * (dp.abs() + d.abs())  # of this reference, where they cancel
    bound_q, bound_k = bound_q + in_f64 @ heads.k.abs(), bound_k + in_f64.mT @ rounded["q"]
    sum_p = p + off_p
    bound_v = off_p.mT @ rounded["out"] + (sum_p.sum(-2)[..., None] * 2 + _steps(sum_p, seen, -2)) * top["out"] / 254
    group = q.shape[1] // k.shape[1]
    expected = {"q": heads.scale * ds @ heads.k, "k": _of_kv_heads(heads.scale * ds.mT @ heads.q, group),
                "v": _of_kv_heads(p.mT @ grad, group)}
    bound = {"q": bound_q, "k": _of_kv_heads(bound_k, group), "v": _of_kv_heads(bound_v, group)}
    info = torch.finfo(q.dtype)
    bound = {name: x + info.eps * expected[name].abs() + info.smallest_normal * info.eps + 1e-30
             for name, x in bound.items()}
    return Gradients(expected, bound, _tainted(q, k, v, lost, visible, key_mask), lost)


def _steps(x: torch.Tensor, seen: torch.Tensor, dim: int) -> torch.Tensor:
    """Half a step of each element that is rounded, by the largest of its row or column: [.., rows of the result, 1]."""
    return (x.amax(dim) * seen.sum(dim))[..., None]


def _of_kv_heads(x: torch.Tensor, group: int) -> torch.Tensor:
    """Summed over the q heads that share a kv head."""
    return x.unflatten(1, (-1, group)).sum(2)


def _tainted(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lost: torch.Tensor, visible: torch.Tensor,
             key_mask: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """Queries that are not finite, see something that is not, or whose gradient is not; and all keys that these see."""
    of, seen = heads_of(q, k), visible.float()
    bad_keys = ~(k.isfinite().all(-1) & v.isfinite().all(-1))
    if key_mask is not None:
        bad_keys = bad_keys & key_mask[:, None]
    queries = lost | ~q.isfinite().all(-1) | ((seen @ bad_keys.float()[:, of, :, None])[..., 0] > 0)
    reached = (seen.mT @ queries.float()[..., None])[..., 0] > 0
    keys = reached.unflatten(1, (k.shape[1], -1)).any(2) | bad_keys
    return {"q": queries, "k": keys, "v": keys}
