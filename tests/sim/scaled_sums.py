"""Block-scaled products as published, in integers: the oracle of the simulator's, from which it shares no code.

A step multiplies its blocks exactly, aligns the blocks and the accumulator to the largest exponent among them, cuts
each off `fraction` bits below that exponent's unit, adds, and cuts the sum to f32.
Source: "MMA-Sim: Bit-Accurate Reference Model of Tensor Cores and Matrix Cores" (arXiv:2511.10909), Algorithm 9 and
Table 5, for sm_120.
"""

from __future__ import annotations

import numpy as np

NAN = 0x7FFFFFFF
F32_MANTISSA = 23
_OF_ZERO = -(10**6)  # exponent of a zero, which never is the largest


def e4m3(codes: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Significands of codes in units of 2^(exponent - 3), the exponents, and whether each is NaN."""
    field, mantissa = codes >> 3 & 15, codes & 7
    magnitude = np.where(field > 0, mantissa + 8, mantissa).astype(np.int64)
    return np.where(codes & 0x80, -magnitude, magnitude), np.maximum(field.astype(np.int64), 1) - 7, codes & 127 == 127


def mxf8(a: np.ndarray, b: np.ndarray, a_scale: np.ndarray, b_scale: np.ndarray, c: np.ndarray) -> np.ndarray:
    """c plus the dot products of e4m3 codes [n, 32], scaled by codes of ue8m0 [n], as bits of f32 [n]."""
    (x, x_exponent, x_nan), (y, y_exponent, y_nan) = e4m3(a), e4m3(b)
    scale = a_scale.astype(np.int64) + b_scale - 254
    nan = (x_nan | y_nan).any(-1) | (a_scale == 255) | (b_scale == 255)
    return _sum(x * y, x_exponent + y_exponent + scale[:, None], 6, c, nan, fraction=25)


def nvfp4(a: np.ndarray, b: np.ndarray, a_scales: np.ndarray, b_scales: np.ndarray, c: np.ndarray) -> np.ndarray:
    """c plus the dot products of e2m1 codes [n, 64], scaled by codes of ue4m3 [n, 4], as bits of f32 [n]."""
    halves = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12])
    dots = (halves[a] * halves[b]).reshape(len(a), 4, 16).sum(-1)
    (x, x_exponent, x_nan), (y, y_exponent, y_nan) = e4m3(a_scales & 127), e4m3(b_scales & 127)
    return _sum(dots * x * y, x_exponent + y_exponent, 8, c, (x_nan | y_nan).any(-1), fraction=35)


def _sum(blocks: np.ndarray, exponents: np.ndarray, below: int, c: np.ndarray, nan: np.ndarray,
         fraction: int) -> np.ndarray:
    """c plus blocks [n, m] in units of 2^(exponent - below)."""
    field, bits = (c >> F32_MANTISSA & 255).astype(np.int64), (c & 0x7FFFFF).astype(np.int64)
    c_exponent = np.maximum(field, 1) - 127
    significand = np.where(field > 0, bits + 2**F32_MANTISSA, bits) * np.where(c >> 31, -1, 1)
    exponents = np.where(blocks != 0, exponents, _OF_ZERO)
    largest = np.maximum(exponents.max(-1), np.where(significand != 0, c_exponent, _OF_ZERO))
    total = _shifted(significand, c_exponent - largest + fraction - F32_MANTISSA)
    for block, exponent in zip(blocks.T, exponents.T):
        total = total + _shifted(block, exponent - largest + fraction - below)
    found = np.array([_cut(int(x), int(unit)) for x, unit in zip(total, largest - fraction)], np.uint32)
    infinite = field == 255
    found = np.where(infinite, c, found)
    return np.where(nan | infinite & (bits != 0), NAN, found).astype(np.uint32)


def _shifted(x: np.ndarray, shift: np.ndarray) -> np.ndarray:
    """x · 2^shift, cut off towards zero."""
    magnitude = np.abs(x)
    left, right = np.clip(shift, 0, 40), np.clip(-shift, 0, 63)
    return np.sign(x) * ((magnitude << left) >> right)


def _cut(x: int, exponent: int) -> int:
    """The bits of x · 2^exponent as f32, cut off towards zero; infinity from 2^128 on."""
    sign, magnitude = (0x80000000, -x) if x < 0 else (0, x)
    if magnitude == 0:
        return sign
    top = magnitude.bit_length() - 1 + exponent
    if top >= 128:
        return sign | 0x7F800000
    unit = max(top, -126) - F32_MANTISSA  # of the result's last bit
    mantissa = magnitude << exponent - unit if exponent >= unit else magnitude >> unit - exponent
    return sign | (mantissa if top < -126 else (top + 127 << F32_MANTISSA) + mantissa - 2**F32_MANTISSA)
