"""Arithmetic of the kernels in torch, to the bit: fused multiply-adds, sums in a given order, tensor-core sums, FP8."""

from __future__ import annotations

import math
import struct

import torch

E4M3_LIMIT = 448.0


def to_f32(x: float) -> float:
    """x rounded to f32. Of a product or quotient of two f32, which f64 rounds first, this is the product or quotient
    in f32: f64 has more than twice the bits, and the first rounding does no harm."""
    rounded: float = struct.unpack("f", struct.pack("f", x))[0]
    return rounded


def fma(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """a · b + c in f32, rounded once.

    f64 holds the product of two f32, and rounds the sum. To round that to f32 is to round the exact sum, except where
    the f64 sum lies halfway between two f32.
    """
    a, b, c = a.double(), b.double(), c.double()
    total = torch.addcmul(c, a, b)
    nearest, halfway = total.float(), _may_be_halfway(total)
    if halfway.any():
        nearest[halfway] = _by_odd(*(x.expand_as(total)[halfway] for x in (a, b, c)))
    return nearest


def _may_be_halfway(x: torch.Tensor) -> torch.Tensor:
    """True where an f64 lies halfway between two f32; of those that f32 rounds to subnormals, everywhere."""
    magnitude = x.abs()
    return (x.view(torch.int64) & 0x1FFF_FFFF == 0x1000_0000) | (magnitude < 2.0**-126) & (magnitude >= 2.0**-150)


def _by_odd(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """a · b + c of f64, rounded to f32 once: where f64 rounds the sum, that is made odd (of the two f64 around the
    exact sum the one with an odd last bit), which f32 then rounds as it would the exact one.
    Source: Boldo & Melquiond, "Emulation of a FMA and correctly rounded sums: proved algorithms using rounding to odd".
    """
    total, lost = _exact_sum(a, b, c)
    bits = total.view(torch.int64)
    outward = torch.where((lost > 0) == (total > 0), 1, -1)
    even = (bits & 1 == 0) & ((lost > 0) | (lost < 0))
    return torch.where(even, bits + outward, bits).view(torch.float64).float()


def fma_down(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """a · b + c in f32, rounded down."""
    nearest = fma(a, b, c)
    total, lost = _exact_sum(a, b, c)
    above = nearest.double() - total > lost  # never where the sum is not finite
    return torch.where(above, torch.nextafter(nearest, torch.full_like(nearest, -math.inf)), nearest)


def _exact_sum(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """a · b + c in f64, and what it lost by rounding: NaN where the sum is not finite."""
    product, c = a.double() * b.double(), c.double()
    total = product + c
    part = total - product
    return total, (product - (total - part)) + (c - part)


def add_in_order(x: torch.Tensor, dim: int) -> torch.Tensor:
    total = torch.zeros_like(x.select(dim, 0))
    for part in x.unbind(dim):
        total = total + part
    return total


def divide(x: torch.Tensor, divisor: float) -> torch.Tensor:
    """x / divisor, rounded once: for a Python number torch multiplies by its reciprocal on a GPU."""
    return x / torch.full_like(x, divisor)


def finite_or_zero(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x.isfinite(), x, 0.0)


def within(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x clamped to the finite numbers of a dtype; NaN stays."""
    return x.clamp(torch.finfo(dtype).min, torch.finfo(dtype).max)


def to_pv(x: torch.Tensor, pv: str) -> torch.Tensor:
    """Rounded to the PV type and back: nearest even, saturating."""
    if pv == "f16":
        return within(x, torch.float16).half().float()
    return x.clamp(-E4M3_LIMIT, E4M3_LIMIT).to(torch.float8_e4m3fn).float()


def pv_tile(p: torch.Tensor, v: torch.Tensor, pv_accum: str) -> torch.Tensor:
    """P·V of one tile; FP8 in products of 32 keys, each of which leaves the accumulator 13 mantissa bits, or f16."""
    if pv_accum == "f32":
        return p @ v
    total = p.new_zeros(*p.shape[:3], v.shape[-1])
    for first in range(0, p.shape[-1], 32):
        total = total + p[..., first: first + 32] @ v[..., first: first + 32, :]
        total = keep_13_bits(total) if pv_accum == "two_level_f32" else total.half().float()
    return total


def cut_to_f32(x: torch.Tensor) -> torch.Tensor:
    """f64 to f32, cut off towards zero."""
    nearest = x.float()
    beyond = nearest.double().abs() > x.abs()
    return torch.where(beyond, torch.nextafter(nearest, torch.zeros_like(nearest)), nearest)


def keep_13_bits(x: torch.Tensor) -> torch.Tensor:
    """f32 with all but the upper 13 mantissa bits cut off."""
    return (x.view(torch.int32) & ~0x3FF).view(torch.float32)
