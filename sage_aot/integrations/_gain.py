"""Thresholds from which sage_aot is faster than torch's attention, the rules that apply them, and those of each chip.

Against SDPA a call saves time in proportion to its multiplications, and spends time on quantization, in proportion to
the elements of q, k and v, and on launches. ``sage-aot calibrate`` measures thresholds on the GPU at hand
(_calibration.py); the built-in ones are for GPUs where it did not run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from math import inf
from typing import Literal, NamedTuple

from sage_aot._kernels.axes import HEADDIMS, MAX_HEADDIM
from sage_aot._problem.options import UNBOUNDED, bounds_of

Mask = Literal["padded", "masked", "window"]
KINDS = "full", "causal", "padded", "masked", "window"
"""Calls by their mask: none, causal, a mask of keys, a mask that differs by query or head, or a window. The last three
causal or not; torch computes them with a mask of bools. Of a mask nobody knows how many pairs it shows, so that all
count as work; of a window the visible ones do."""


# --- rules ------------------------------------------------------------------------------------------------------------


class Threshold(NamedTuple):
    """A call is faster from these operations on, 4 · (visible pairs of a query and a key) · headdim in all heads."""

    per_element: float  # for each element of q, k and v
    at_least: float


NEVER = Threshold(0, inf)


class Corner(NamedTuple):
    """A shape without a mask at which torch's FlashAttention-2 is compared with the backend that torch chooses."""

    headdim: int
    heads: int  # of q, in all batch entries
    queries: int
    keys: int


AXES = (32, 64, 128, 256), (8, 32, 768), (1, 2, 16, 128), (128, 512, 2048, 8192, 32768)
"""The grid of corners: the values of each of their fields."""


class Thresholds(NamedTuple):
    """Thresholds of a GPU, for a policy of faster calls."""

    calls: Mapping[tuple[str, int], Threshold]
    """Thresholds of all calls, by kind and head dim of the kernel."""

    flash: frozenset[Corner] = frozenset()
    """The corners at which FlashAttention-2 is the faster one."""


def kind_of(is_causal: bool, mask: Mask | None) -> str:
    """One of KINDS. `mask`: what the call has in addition to a causal mask."""
    return mask or ("causal" if is_causal else "full")


def kernel_headdim(headdim: int) -> int:
    """The head dim of the kernel that computes a call; that of the largest for those that none computes."""
    for own in HEADDIMS:  # no min() of a generator, which takes longer: the policy asks in every call
        if headdim <= own:
            return own
    return MAX_HEADDIM


class Work(NamedTuple):
    """Sizes of a call, from which its time follows."""

    operations: int
    elements: int  # of q, k and v

    @classmethod
    def of(cls, batch: int, q_heads: int, kv_heads: int, queries: int, keys: int, headdim: int,
           is_causal: bool, window: tuple[int, int] | None = None) -> Work:
        """`is_causal`, `window`: of as many queries as keys, or more keys from the bottom-right corner."""
        if window is not None:
            left, right = bounds_of(is_causal, window)
            operations = 4 * batch * q_heads * pairs_in_window(queries, keys, left, right) * headdim
        else:
            operations = 4 * batch * q_heads * queries * keys * headdim
            if is_causal:
                operations -= 2 * batch * q_heads * min(queries, keys) ** 2 * headdim
        return cls(operations, batch * (q_heads * queries + 2 * kv_heads * keys) * headdim)


def pairs_in_window(queries: int, keys: int, left: int, right: int) -> int:
    """Pairs of a query and a key that it sees: at most `left` keys in front of its own, and `right` behind it."""
    def up_to(shift: int) -> int:
        """Pairs whose key is at most `shift` keys behind the query's own."""
        first = keys - queries + shift + 1  # keys that the first query sees, before they are cut off at both ends
        return _sum_of_cut(first + queries - 1, keys) - _sum_of_cut(first - 1, keys)

    return (queries * keys if right == UNBOUNDED else up_to(right)) - (0 if left == UNBOUNDED else up_to(-left - 1))


def _sum_of_cut(last: int, most: int) -> int:
    """The sum of the integers up to `last`, each cut off to 0 from below and to `most` from above."""
    rising = min(max(last, 0), most)
    return rising * (rising + 1) // 2 + max(last - most, 0) * most


def is_faster(threshold: tuple[float, float], work: Work) -> bool:
    """True where sage_aot is expected to be at least as fast as SDPA, by a :class:`Threshold`."""
    # By index: dynamo of torch 2.11 cannot unpack a named tuple that is a constant.
    return work.operations >= threshold[0] * work.elements + threshold[1]


def prefers_flash(thresholds: Thresholds, batch: int, heads: int, queries: int, keys: int, headdim: int) -> bool:
    """True where torch's FlashAttention-2 is expected to be faster than the backend that torch chooses, without a mask:
    where it is at all corners around the shape."""
    return bool(thresholds.flash) and all(
        corner in thresholds.flash for corner in _corners(batch * heads, queries, keys, headdim))


def _corners(heads: int, queries: int, keys: int, headdim: int) -> Iterator[Corner]:
    """Corners around a shape. Heads and keys beyond the grid count as its last; an axis on which the shape lies outside
    has the corner NOWHERE."""
    of_headdim, of_heads, of_queries, of_keys = AXES
    sides = ([_next(of_headdim, headdim)],  # up to which backends compute channels
             _around(of_heads, min(max(heads, of_heads[0]), of_heads[-1])), _around(of_queries, queries),
             _around(of_keys, min(keys, of_keys[-1])))
    return map(Corner._make, product(*sides))


NOWHERE = 0


def _around(axis: tuple[int, ...], value: int) -> list[int]:
    """The nearest values of an axis on both sides, one where `value` is among them."""
    return sorted({max((at for at in axis if at <= value), default=NOWHERE), _next(axis, value)})


def _next(axis: tuple[int, ...], value: int) -> int:
    return min((at for at in axis if at >= value), default=NOWHERE)


# --- built-in thresholds ----------------------------------------------------------------------------------------------


def built_in(capability: tuple[int, int]) -> tuple[Thresholds, str]:
    """The thresholds of a GPU where none were measured, and where they come from, in words.

    9.0: fitted to calls measured with the fastest of SDPA's backends in the same run, bf16, by GPU time and by the time
    of queued calls, on an H200 (bench/results/h200-2026-11-25-crossover). 8.x and 12.x: a proxy, see _PROXY. Others run
    Ampere's sources, while torch uses the tensor-core instructions that are new in these chips: no call is faster.
    """
    if capability == (9, 0):
        return Thresholds(_HOPPER, _FLASH_ON_HOPPER), "built in, measured on an H200"
    if capability in _SLOWER_MEMORY:
        factor = _SLOWER_MEMORY[capability]
        calls = {(kind, headdim): Threshold(factor * _PROXY[kind], _HOPPER[kind, headdim].at_least)
                 for kind in KINDS for headdim in HEADDIMS}
        return Thresholds(calls), "built in, estimated from kernels rebuilt for Hopper compared with FlashAttention-2"
    return Thresholds({(kind, headdim): NEVER for kind in KINDS for headdim in HEADDIMS}), (
        "built in: this chip's kernels are there for coverage, not for speed, so torch computes every call")


_HOPPER = {
    ("full", 64): Threshold(2480, 54e9), ("full", 128): Threshold(2050, 42e9), ("full", 256): Threshold(1360, 91e9),
    ("causal", 64): Threshold(0, 54e9), ("causal", 128): Threshold(1040, 19e9), ("causal", 256): Threshold(0, 54e9),
    **{("padded", headdim): Threshold(0, 9.6e9) for headdim in HEADDIMS},
    ("masked", 64): Threshold(2830, 25e9), ("masked", 128): Threshold(560, 41e9), ("masked", 256): Threshold(220, 22e9),
    ("window", 64): Threshold(100, 2.4e9), ("window", 128): Threshold(80, 4.9e9), ("window", 256): Threshold(0, 2.9e9)}
"""Thresholds on Hopper. Source of the kinds "masked" and "window": bench/results/h200-2026-11-27-calibrate."""

_FLASH_ON_HOPPER = frozenset(
    corner for corner in map(Corner._make, product(*AXES))
    if corner.heads <= 32 and 1 < corner.queries and corner.keys >= max(2048, 64 * corner.queries))
"""Few queries over many keys. FlashAttention-2 splits the keys among blocks; cuDNN, which torch prefers on Hopper, does
so only in calls of one query. In the crossover's log FlashAttention-2 is 1.5 to 4.5 times as fast in these calls by GPU
time, and 1.05 to 4.2 times by the time of queued calls."""

_PROXY = {"full": 2200, "causal": 1800, "padded": 2200, "masked": 4400, "window": 4400}
"""Operations per element from which the f16 kernels, rebuilt for an H100, were faster than FlashAttention-2 there
(bench/results/h100-2026-11-26-rebuilt). FlashAttention-2 is torch's backend on the chips that the kernels are for. For
8.9 and 12.x, too, the thresholds are those of the f16 kernels, whose Q·Kᵀ is the same and whose P·V has half the speed:
on Hopper each FP8 mma.sync runs as two f16 products, so that rebuilt FP8 kernels are slower than on their own chips.
"masked" and "window" were not measured there. They have twice the threshold of "padded", far above what Hopper's
windows need."""

_SLOWER_MEMORY = {(8, 0): 1.2, (8, 6): 1.6, (8, 7): 1.6, (8, 9): 2.3, (12, 0): 2.3, (12, 1): 3.6}
"""Factor by which the slowest memory of a chip's cards, relative to its f16 tensor cores, is slower than an H100's:
quantization then takes a larger part of a call. From data sheets."""
