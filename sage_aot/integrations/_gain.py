"""Where sage_aot is faster than torch's attention: thresholds measured on an H200.

Against SDPA a call saves time in proportion to its multiplications, and spends time on quantization, in proportion to
the elements of q, k and v, and on launches. The table was fitted to calls beside the fastest of SDPA's backends, bf16,
by GPU time and by wall time (bench/crossover.py, bench/results/h200-2026-11-25-crossover): of 306 shapes, all that it
gives to sage_aot are at least as fast there. Other GPUs were not measured; they take the same thresholds.
"""

from __future__ import annotations

from typing import NamedTuple


class Threshold(NamedTuple):
    """A call is faster from these operations on, 4 · (visible pairs of a query and a key) · headdim in all heads."""

    per_element: float  # for each element of q, k and v
    at_least: float


FULL = {64: Threshold(2480, 54e9), 128: Threshold(2050, 42e9), 256: Threshold(1360, 91e9)}
CAUSAL = {64: Threshold(0, 54e9), 128: Threshold(1040, 19e9), 256: Threshold(0, 54e9)}
"""By the head dim of the kernel."""

MASKED = Threshold(0, 9.6e9)
"""With a key mask, which slows SDPA. The keys that a mask hides count: their number is known on the device alone."""

LEAST_FULL, LEAST_CAUSAL = (min(threshold.at_least for threshold in mask.values()) for mask in (FULL, CAUSAL))
LEAST_MASKED = MASKED.at_least
"""A call of fewer multiplications and additions, those that a causal mask saves included, is never faster."""


def is_faster(batch: int, q_heads: int, kv_heads: int, queries: int, keys: int, headdim: int, is_causal: bool,
              has_key_mask: bool) -> bool:
    """Whether a call is expected to be at least as fast as SDPA. `is_causal`: of as many queries as keys, or more keys
    from the bottom-right corner."""
    operations = 4 * batch * q_heads * queries * keys * headdim
    if is_causal:
        operations -= 2 * batch * q_heads * min(queries, keys) ** 2 * headdim
    if has_key_mask:
        return operations >= MASKED.at_least
    threshold = (CAUSAL if is_causal else FULL)[64 if headdim <= 64 else 128 if headdim <= 128 else 256]
    elements = batch * (q_heads * queries + 2 * kv_heads * keys) * headdim
    return operations >= threshold.per_element * elements + threshold.at_least


LEAST_KEYS_OF_FLASH = 2048


def prefers_flash(batch: int, heads: int, queries: int, keys: int) -> bool:
    """Whether torch's FlashAttention-2 is expected to be faster than the backend that torch chooses, without a mask.

    It splits the keys of few queries among blocks. cuDNN, which torch prefers on Hopper, does so of one query alone. In
    the log flash is 1.5 to 4.5 times as fast in these calls by the GPU's time, 1.05 to 4.2 times by queued calls.
    """
    return 1 < queries <= 128 and batch * heads <= 32 and keys >= max(LEAST_KEYS_OF_FLASH, 64 * queries)
