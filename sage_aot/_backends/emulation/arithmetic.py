"""Arithmetic of the kernels in torch, to the bit: fused multiply-adds, sums in a given order, tensor-core sums, FP8."""

from __future__ import annotations

import torch

E4M3_LIMIT = 448.0


def fma(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """a · b + c in f32, rounded once.

    f64 holds the product of two f32. Where it rounds the sum, that is made odd (of the two f64 around the exact sum the
    one with an odd last bit), which f32 then rounds as it would the exact one.
    Source: Boldo & Melquiond, "Emulation of a FMA and correctly rounded sums: proved algorithms using rounding to odd".
    """
    product, c = a.double() * b.double(), c.double()
    total = product + c
    part = total - product
    lost = (product - (total - part)) + (c - part)  # by rounding; NaN where the sum is not finite
    bits = total.view(torch.int64)
    outward = torch.where((lost > 0) == (total > 0), 1, -1)
    even = (bits & 1 == 0) & ((lost > 0) | (lost < 0))
    return torch.where(even, bits + outward, bits).view(torch.float64).float()


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


def to_pv(x: torch.Tensor, pv: str) -> torch.Tensor:
    """Rounded to the PV type and back: nearest even, e4m3 saturating."""
    if pv == "f16":
        return x.half().float()
    return x.clamp(-E4M3_LIMIT, E4M3_LIMIT).to(torch.float8_e4m3fn).float()


def tensor_core_sum(p: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """P times ones and a total, as Hopper adds products of FP8: 32 and the sum so far, each cut off 13 bits below the
    largest. The wgmma family's sums of P are such: V has a channel of ones there (attn/wgmma/mainloop.cuh)."""
    for part in torch.split(p, 32, -1):
        terms = torch.cat([total[..., None], part], -1)
        exponent = torch.frexp(terms.amax(-1))[1].clamp(min=-100)  # a sum that alpha left next to nothing of
        unit = torch.ldexp(torch.ones_like(total), exponent - 14)
        total = keep_13_bits((terms / unit[..., None]).trunc().sum(-1) * unit)
    return total


def cut_to_f32(x: torch.Tensor) -> torch.Tensor:
    """f64 to f32, cut off towards zero."""
    nearest = x.float()
    beyond = nearest.double().abs() > x.abs()
    return torch.where(beyond, torch.nextafter(nearest, torch.zeros_like(nearest)), nearest)


def keep_13_bits(x: torch.Tensor) -> torch.Tensor:
    """f32 with all but the upper 13 mantissa bits cut off."""
    return (x.view(torch.int32) & ~0x3FF).view(torch.float32)
