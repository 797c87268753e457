"""Each instruction's meaning against arithmetic that is written here, from the PTX ISA or by torch."""

from __future__ import annotations

import re
import struct
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import simbuild
import torch
from simbuild import PROJECT, Build, Source
from simulator import Simulator, views

PROBES = Path(__file__).parent / "probes.cu"
SCALARS = ("f16x2", "bf16x2", "e4m3x2", "f32_from_f16", "ex2", "lg2", "rcp", "max_nan", "prmt", "fmaxf", "fminf", "fma",
           "max_nan_bf16x2", "min_nan_bf16x2", "max_nan_f16x2", "min_nan_f16x2", "popcount",
           "min_nan", "e2m1x8", "e2m1", "f32_from_ue4m3", "inv_nvfp4_scale", "finite_f16x2", "finite_bf16x2",
           "fma_down")
PRODUCTS = ("s8", "s4", "f16", "e4m3_f32", "e4m3_f16", "u8s8", "bf16")
BITS = {"s8": 8, "s4": 4, "f16": 16, "e4m3_f32": 8, "e4m3_f16": 8, "u8s8": 8, "bf16": 16}
NAN = 0x7FFFFFFF
EDGES = np.array([0, 0x80000000, 1, 0x80000001, 0x007FFFFF, 0x00800000, 0x7F7FFFFF, 0x7F800000, 0xFF800000, 0x7FC00000,
                  0xFFC00001, 0x7F800001, 0x477FE000, 0x477FEFFF, 0x477FF000, 0x33000000, 0x33000001, 0x33800000,
                  0x43E00000, 0x43E80000, 0x43EFFFFF, 0x3A800000, 0x3A000000, 0x3A000001, 0x3F800000, 0xBF800000],
                 np.uint32)
"""f32 of every kind, and about the ends of f16 and e4m3."""


@pytest.fixture(scope="module")
def probes() -> Build:
    names = ("scalars", "products", "matrices", "matrices_back", "exchanges")
    return simbuild.build([Source(name, PROBES) for name in names], PROJECT.build / "probes")


def launch(build: Build, name: str, which: int, operands: np.ndarray, results: int, blocks: int = 1, threads: int = 32,
           arch: int = 80) -> np.ndarray:
    """`results` words that a probe makes of its operands."""
    values = torch.from_numpy(np.ascontiguousarray(operands, np.uint32).view(np.int32))
    out = torch.zeros(results, dtype=torch.int32)
    simulator = Simulator(build, seed=which)
    simulator.know(*views({"in": values}, {"out": out}))
    params = struct.pack("<QQii", values.data_ptr(), out.data_ptr(), which, results)
    simulator.launch_kernel(name, params, blocks, threads, 4096, arch)
    return out.numpy().view(np.uint32)


def scalar(build: Build, name: str, a: np.ndarray, b: np.ndarray | None = None,
           c: np.ndarray | None = None) -> np.ndarray:
    zero = np.zeros_like(a, np.uint32)
    operands = np.stack([x.view(np.uint32) if x is not None else zero for x in (a, b, c)], -1)
    return launch(build, "scalars", SCALARS.index(name), operands, len(a), blocks=-(-len(a) // 32))


def patterns(count: int = 4000, seed: int = 0) -> np.ndarray:
    """f32 of all sizes: random bits, numbers near one, and edges."""
    rng = np.random.default_rng(seed)
    near_one = (rng.standard_normal(count) * 2.0 ** rng.integers(-20, 12, count)).astype(np.float32).view(np.uint32)
    return np.concatenate([rng.integers(0, 2**32, count, np.uint32), near_one, EDGES, EDGES[::-1]])


def as_f32(bits: np.ndarray) -> np.ndarray:
    return bits.view(np.float32)


def same_floats(got: np.ndarray, expected: np.ndarray) -> None:
    """Equal bit for bit, but for which NaN."""
    nan = np.isnan(as_f32(expected))
    assert (np.isnan(as_f32(got)) == nan).all()
    wrong = np.flatnonzero((got != expected) & ~nan)
    assert not len(wrong), (f"{len(wrong)} wrong, first at {wrong[0]}: got {got[wrong[0]]:#x}, expected "
                            f"{expected[wrong[0]]:#x}")


# --- scalars ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "dtype", "nan"),
                         [("f16x2", torch.float16, 0x7FFF), ("bf16x2", torch.bfloat16, 0x7FFF)])
def test_conversions_to_16_bits(probes, name, dtype, nan):
    lo, hi = patterns(seed=1), patterns(seed=2)
    got = scalar(probes, name, lo, hi)
    for half, x in ((got & 0xFFFF, lo), (got >> 16, hi)):
        expected = torch.from_numpy(as_f32(x).copy()).to(dtype).view(torch.int16).numpy().view(np.uint16)
        assert (half == np.where(np.isnan(as_f32(x)), nan, expected)).all()


@pytest.mark.parametrize(("name", "dtype"), [("finite_f16x2", torch.float16), ("finite_bf16x2", torch.bfloat16)])
def test_conversions_to_finite_16_bits(probes, name, dtype):
    lo, hi = patterns(seed=1), patterns(seed=2)
    got = scalar(probes, name, lo, hi)
    for half, x in ((got & 0xFFFF, lo), (got >> 16, hi)):
        clamped = torch.from_numpy(as_f32(x).copy()).clamp(torch.finfo(dtype).min, torch.finfo(dtype).max)
        expected = clamped.to(dtype).view(torch.int16).numpy().view(np.uint16)
        assert (half == np.where(np.isnan(as_f32(x)), 0x7FFF, expected)).all()


def test_conversion_to_e4m3_saturates(probes):
    lo, hi = patterns(seed=3), patterns(seed=4)
    got = scalar(probes, "e4m3x2", lo, hi)
    for half, x in ((got & 0xFF, lo), (got >> 8, hi)):
        clamped = torch.from_numpy(as_f32(x).copy()).clamp(-448, 448)
        expected = clamped.to(torch.float8_e4m3fn).view(torch.uint8).numpy()
        assert (half == np.where(np.isnan(as_f32(x)), 0x7F, expected)).all()


E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
"""The numbers without a sign, by code."""


def e2m1_codes(x: np.ndarray) -> np.ndarray:
    """The nearest e2m1 of f32, by the table: of two as near the even code; with the sign of x."""
    distance = np.abs(np.minimum(np.abs(x.astype(np.float64)), 6.0)[:, None] - E2M1)
    even_first = np.array([0, 2, 4, 6, 1, 3, 5, 7])
    return even_first[distance[:, even_first].argmin(-1)] | np.signbit(x) << 3


def ties_and_neighbours() -> np.ndarray:
    """Every number of e2m1, every midpoint and every boundary beyond them, with the f32 on both sides; both signs."""
    middles = np.concatenate([E2M1, (E2M1[1:] + E2M1[:-1]) / 2, [5.0, 7.0, 1e30, 1e-30]]).astype(np.float32)
    around = np.concatenate([middles, np.nextafter(middles, np.float32(0)), np.nextafter(middles, np.float32(np.inf))])
    return np.concatenate([around, -around])


def test_conversion_to_e2m1(probes):
    x = np.concatenate([ties_and_neighbours(), as_f32(patterns(seed=8))])
    x = x[~np.isnan(x)]
    got = scalar(probes, "e2m1x8", x, x[::-1].copy())
    for place, of in enumerate((x, x[::-1], -x, -x[::-1])):
        assert ((got >> 4 * place & 15) == e2m1_codes(of)).all()
    assert (got >> 16 == 0x5420).all()
    assert scalar(probes, "e2m1x8", np.array([np.nan], np.float32), np.zeros(1, np.float32))[0] & 15 == 7


def test_quantizers_round_to_e2m1_as_the_instruction_does(probes):
    """Zeros are left out: minus zero marks what is not finite, so that nothing else may become minus zero."""
    x = np.concatenate([ties_and_neighbours(), np.random.default_rng(0).standard_normal(5000).astype(np.float32) * 3])
    expected = e2m1_codes(x)
    expected[(expected == 8) & (x != 0)] = 0
    assert (scalar(probes, "e2m1", x, np.ones_like(x)) == expected).all()
    halved = scalar(probes, "e2m1", x, np.full_like(x, 0.5))
    expected = e2m1_codes(x / 2)
    expected[(expected == 8) & (x != 0)] = 0
    assert (halved == expected).all()
    assert (scalar(probes, "e2m1", x, np.zeros_like(x))[x != 0] == 0).all()  # a group whose scale is zero


def test_every_ue4m3(probes):
    codes = np.arange(127, dtype=np.uint32)
    values = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
    same_floats(scalar(probes, "f32_from_ue4m3", codes), values.view(np.uint32))
    with np.errstate(divide="ignore"):
        inverse = np.where(values > 0, np.float32(1) / values, np.float32(0)).astype(np.float32)
    same_floats(scalar(probes, "inv_nvfp4_scale", codes), inverse.view(np.uint32))


def test_every_bf16_to_e4m3(probes):
    """Group scales are rounded so: those of bf16 are dense enough to hold every tie."""
    x = as_f32((np.arange(2**16, dtype=np.uint32) << 16).astype(np.uint32))
    got = scalar(probes, "e4m3x2", x, np.zeros_like(x)) & 0xFF
    expected = torch.from_numpy(x.copy()).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    assert (got == np.where(np.isnan(x), 0x7F, expected)).all()


def test_every_f16_as_f32(probes):
    codes = np.arange(2**16, dtype=np.uint32)
    expected = codes.astype(np.uint16).view(np.float16).astype(np.float32)
    same_floats(scalar(probes, "f32_from_f16", codes), expected.view(np.uint32))


def test_ex2(probes):
    x = np.concatenate([np.arange(-160, 140, dtype=np.float32), np.linspace(-130, 128, 3001, dtype=np.float32),
                        as_f32(EDGES)])
    with np.errstate(all="ignore"):
        expected = np.exp2(x.astype(np.float64)).astype(np.float32)
    expected[(expected < 2.0**-126)] = 0.0
    same_floats(scalar(probes, "ex2", x), expected.view(np.uint32))


def test_lg2_and_rcp(probes):
    x = as_f32(patterns(seed=5))
    with np.errstate(all="ignore"):
        same_floats(scalar(probes, "lg2", x), np.log2(x.astype(np.float64)).astype(np.float32).view(np.uint32))
        flushed = np.where(np.abs(x) < 2.0**-126, np.copysign(np.float32(0), x), x)
        inverse = (1.0 / flushed.astype(np.float64)).astype(np.float32)
    inverse = np.where(np.abs(inverse) < 2.0**-126, np.copysign(np.float32(0), inverse), inverse)
    same_floats(scalar(probes, "rcp", x), inverse.view(np.uint32))


def test_largest_and_smallest(probes):
    a, b = patterns(seed=6), patterns(seed=7)
    a[:50], b[50:100] = NAN, NAN
    a[100:102], b[100:102] = (0, 0x80000000), (0x80000000, 0)
    x, y = as_f32(a), as_f32(b)
    either_nan = np.isnan(x) | np.isnan(y)
    for name, choose, zero in (("fmaxf", np.maximum, 0), ("fminf", np.minimum, 0x80000000)):
        expected = np.where(np.isnan(x), y, np.where(np.isnan(y), x, choose(x, y))).view(np.uint32)
        expected[100:102] = zero
        same_floats(scalar(probes, name, a, b), expected)
    for name, choose, zero in (("max_nan", np.maximum, 0), ("min_nan", np.minimum, 0x80000000)):
        expected = choose(x, y).view(np.uint32)
        expected[100:102], expected[either_nan] = zero, NAN
        assert (scalar(probes, name, a, b) == expected).all()


@pytest.mark.parametrize(("dtype", "nan"), [(torch.bfloat16, 0x7FFF), (torch.float16, 0x7FFF)], ids=str)
def test_largest_and_smallest_of_halves(probes, dtype, nan):
    rng = np.random.default_rng(9)
    a, b = rng.integers(0, 2**32, (2, 20_000), np.uint32)
    a[:2], b[:2] = (0x80000000, 0x00008000), (0x00008000, 0x80000000)  # zeros of either sign
    x, y = (torch.from_numpy(bits.view(np.int16)).view(dtype).float() for bits in (a, b))
    type_name = {torch.bfloat16: "bf16x2", torch.float16: "f16x2"}[dtype]
    for name, choose in (("max", torch.maximum), ("min", torch.minimum)):
        found = scalar(probes, f"{name}_nan_{type_name}", a, b).view(np.int16)
        expected = choose(x, y)  # NaN where one is
        got = torch.from_numpy(found.copy()).view(dtype).float()
        assert torch.equal(got.isnan(), expected.isnan()) and (found[got.isnan().numpy()] == nan).all()
        assert torch.equal(got[~got.isnan()], expected[~got.isnan()])


def test_prmt(probes):
    rng = np.random.default_rng(8)
    a, b, selector = rng.integers(0, 2**32, (3, 1000), np.uint32)
    both = np.stack([a, b], -1).view(np.uint8).reshape(-1, 8)  # little-endian
    digits = selector[:, None] >> np.arange(0, 16, 4, dtype=np.uint32) & 15
    chosen = np.take_along_axis(both, (digits & 7).astype(np.int64), 1)
    sign = np.where(chosen & 0x80, 0xFF, 0)
    expected = np.where(digits & 8, sign, chosen).astype(np.uint8).view(np.uint32)[:, 0]
    assert (scalar(probes, "prmt", a, b, selector) == expected).all()


def test_a_product_and_a_sum_are_one_fma(probes):
    """nvcc makes one FMA of them: 1 is lost where the product is rounded first."""
    x = np.array([1 + 2**-12], np.float32)
    square = np.float32(x[0] * x[0])
    got = scalar(probes, "fma", x, x, -np.array([square], np.float32))
    assert as_f32(got)[0] == np.float64(x[0]) ** 2 - square != 0.0


def test_fma_down(probes):
    """Operands have an exact sum that a fraction holds; the smallest numbers and those beyond f32 are left out."""
    rng = np.random.default_rng(11)
    a, b, c = ((rng.standard_normal(3000) * 2.0 ** rng.integers(-30, 30, 3000)).astype(np.float32) for _ in range(3))
    c[:1000] = (-a[:1000].astype(np.float64) * b[:1000]).astype(np.float32)  # a rounding is all that is left
    got = as_f32(scalar(probes, "fma_down", a, b, c))
    for x, y, z, found in zip(a, b, c, got):
        exact = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
        assert Fraction(float(found)) <= exact < Fraction(float(np.nextafter(found, np.float32(np.inf))))


# --- matrix products --------------------------------------------------------------------------------------------------


def fragments(a: np.ndarray, b: np.ndarray, c: np.ndarray, bits: int) -> np.ndarray:
    """Codes A [16][k], B [k][8] and words or halves C [16][8] as the words of 32 lanes, by the PTX ISA's tables."""
    per_word = 32 // bits
    depth = 8 * per_word
    words = np.zeros((32, 10), np.uint64)
    for lane in range(32):
        group, thread = lane >> 2, lane & 3
        for element in range(4 * per_word):  # of A: "a_i" in the ISA's tables
            register, e = divmod(element, per_word)
            row = group if register in (0, 2) else group + 8
            column = thread * per_word + e + (depth // 2 if register >= 2 else 0)
            words[lane, register] |= np.uint64(int(a[row, column]) << bits * e)
        for element in range(2 * per_word):  # of B
            register, e = divmod(element, per_word)
            row = thread * per_word + e + (depth // 2 if register == 1 else 0)
            words[lane, 4 + register] |= np.uint64(int(b[row, group]) << bits * e)
        for i in range(4):  # of C
            value = int(c[group if i < 2 else group + 8, thread * 2 + (i & 1)])
            if c.dtype == np.uint16:
                words[lane, 6 + i // 2] |= np.uint64(value << 16 * (i & 1))
            else:
                words[lane, 6 + i] = value
    return words.astype(np.uint32)


def product(build: Build, name: str, a: np.ndarray, b: np.ndarray, c: np.ndarray, arch: int = 89) -> np.ndarray:
    """D [16][8] of codes."""
    words = fragments(a, b, c, BITS[name])
    got = launch(build, "products", PRODUCTS.index(name), words, 128, arch=arch).reshape(32, 4)
    d = np.zeros((16, 8), c.dtype)
    for lane in range(32):
        for i in range(4):
            word = got[lane, i // 2] >> 16 * (i & 1) & 0xFFFF if c.dtype == np.uint16 else got[lane, i]
            d[(lane >> 2) + (8 if i >= 2 else 0), (lane & 3) * 2 + (i & 1)] = word
    return d


@pytest.mark.parametrize(("name", "depth"), [("s8", 32), ("s4", 64), ("u8s8", 32)])
def test_integer_products(probes, name, depth):
    rng, bits = np.random.default_rng(9), BITS[name]
    a, b = rng.integers(0, 2**bits, (16, depth)), rng.integers(0, 2**bits, (depth, 8))
    c = rng.integers(0, 2**32, (16, 8), np.uint32)
    c[0, 0], a[0], b[:, 0] = 0x7FFFFFFF, 2 ** (bits - 1), 2 ** (bits - 1)  # wraps
    signed = [np.where(x < 2 ** (bits - 1), x, x - 2**bits) for x in (a, b)]
    expected = ((a if name == "u8s8" else signed[0]) @ signed[1] + c.astype(np.int64)).astype(np.uint32)
    assert (product(probes, name, a, b, c) == expected).all()


def f16_codes(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float16).view(np.uint16)


def e4m3_codes(x: np.ndarray) -> np.ndarray:
    return torch.from_numpy(np.asarray(x, np.float32).copy()).to(torch.float8_e4m3fn).view(torch.uint8).numpy()


def bf16_codes(x: np.ndarray) -> np.ndarray:
    rounded = torch.from_numpy(np.asarray(x, np.float32).copy()).to(torch.bfloat16)
    return rounded.view(torch.int16).numpy().view(np.uint16)


CODES = {"f16": f16_codes, "bf16": bf16_codes, "e4m3_f32": e4m3_codes, "e4m3_f16": e4m3_codes}
DEPTH = {"f16": 16, "bf16": 16, "e4m3_f32": 32, "e4m3_f16": 32}


def real_product(build: Build, name: str, a: np.ndarray, b: np.ndarray, c: np.ndarray, arch: int) -> np.ndarray:
    accumulator = np.float16 if name == "e4m3_f16" else np.float32
    codes = c.astype(accumulator).view(np.uint16 if name == "e4m3_f16" else np.uint32)
    return product(build, name, CODES[name](a), CODES[name](b), codes, arch).view(accumulator)


REAL = [("bf16", 80), ("bf16", 90), ("f16", 80), ("f16", 86), ("f16", 89), ("f16", 90), ("f16", 120), ("e4m3_f32", 89),
        ("e4m3_f32", 90), ("e4m3_f32", 120), ("e4m3_f16", 89), ("e4m3_f16", 90), ("e4m3_f16", 120)]
"""Floating-point products, and the chips that have them."""


@pytest.mark.parametrize(("name", "arch"), REAL)
def test_small_integers_add_up_exactly(probes, name, arch):
    rng = np.random.default_rng(10)
    a, b = rng.integers(-4, 5, (16, DEPTH[name])), rng.integers(-4, 5, (DEPTH[name], 8))
    c = rng.integers(-99, 100, (16, 8))
    assert (real_product(probes, name, a, b, c, arch) == a @ b + c).all()


def sum_of(build: Build, name: str, terms: dict[int, tuple[float, float]], c: float, arch: int) -> float:
    """c plus the products of these elements of k, in every place of D."""
    a, b = np.zeros((16, DEPTH[name])), np.zeros((DEPTH[name], 8))
    for k, (x, y) in terms.items():
        a[:, k], b[k] = x, y
    d = real_product(build, name, a, b, np.full((16, 8), c), arch)
    assert (d == d[0, 0]).all()
    return float(d[0, 0])


@pytest.mark.parametrize(("arch", "fraction_bits"), [(80, 24), (86, 24), (87, 24), (89, 24), (90, 25), (100, 25),
                                                     (120, 25)])
def test_f16_products_are_cut_off_below_the_largest(probes, arch, fraction_bits):
    def eight_of(size: float) -> float:
        return sum_of(probes, "f16", dict.fromkeys(range(8), (2.0**-12, size * 2.0**12)), 1.0, arch)

    assert eight_of(2.0**-fraction_bits) == 1.0 + 8 * 2.0**-fraction_bits
    assert eight_of(2.0 ** -(fraction_bits + 1)) == 1.0


@pytest.mark.parametrize(("arch", "sum_of_the_rest"), [(80, 2.0**-28), (86, 2.0**-28), (89, 2.0**-28), (90, 0.0),
                                                       (120, 0.0)])
def test_f16_products_are_added_eight_or_sixteen_at_once(probes, arch, sum_of_the_rest):
    """Small terms are lost in sums with large ones, though these cancel; eight further on they meet the sum alone."""
    terms = {0: (1.0, 1.0), 1: (-1.0, 1.0), 8: (2.0**-14, 2.0**-14)}
    assert sum_of(probes, "f16", terms, 0.0, arch) == sum_of_the_rest


@pytest.mark.parametrize("arch", [80, 86, 89, 90, 120])
def test_sums_in_f32_are_cut_off_towards_zero(probes, arch):
    for sign in (1.0, -1.0):
        terms = {0: (sign, 1.0), 1: (sign * 2.0**-12, 1.5 * 2.0**-11)}  # 1.5 units of an f32 near one
        assert sum_of(probes, "f16", terms, 0.0, arch) == sign * (1.0 + 2.0**-23)


def test_e4m3_products_keep_13_bits_on_sm89(probes):
    one, unit = {0: (1.0, 1.0)}, (2.0**-6, 2.0**-7)
    assert sum_of(probes, "e4m3_f32", {**one, 1: unit}, 0.0, 89) == 1.0 + 2.0**-13
    assert sum_of(probes, "e4m3_f32", {**one, 1: (2.0**-7, 2.0**-7)}, 0.0, 89) == 1.0
    assert sum_of(probes, "e4m3_f32", {**one, **dict.fromkeys(range(1, 16), (2.0**-7, 2.0**-7))}, 0.0, 89) == 1.0
    # The next 16 meet a sum of 2: a unit twice as large.
    assert sum_of(probes, "e4m3_f32", {0: (1.0, 2.0), 16: unit}, 0.0, 89) == 2.0
    assert sum_of(probes, "e4m3_f32", {}, 1.0 + 2.0**-13 + 2.0**-14, 89) == 1.0 + 2.0**-13
    assert sum_of(probes, "e4m3_f32", {0: (-1.0, 1.0), 1: (-(2.0**-7), 2.0**-7)}, 0.0, 89) == -1.0


def test_e4m3_products_keep_all_bits_on_sm120(probes):
    """All 32 at once, as far below the largest as f16 products."""
    assert sum_of(probes, "e4m3_f32", {0: (1.0, 1.0), 31: (2.0**-9, 2.0**-9)}, 0.0, 120) == 1.0 + 2.0**-18
    large = {0: (2.0**4, 2.0**4), 1: (-(2.0**4), 2.0**4)}
    assert sum_of(probes, "e4m3_f32", {**large, 31: (2.0**-9, 2.0**-9)}, 0.0, 120) == 0.0
    assert sum_of(probes, "e4m3_f32", {**large, 31: (2.0**-9, 2.0**-8)}, 0.0, 120) == 2.0**-17
    assert sum_of(probes, "e4m3_f32", {}, 1.0 + 2.0**-23, 120) == 1.0 + 2.0**-23


def test_an_unknown_chip_is_like_the_last_before_it(probes):
    apart = {0: (1.0, 1.0), 1: (-1.0, 1.0), 8: (2.0**-14, 2.0**-14)}
    assert sum_of(probes, "f16", apart, 0.0, 88) == 2.0**-28  # as on sm_86, not on sm_90
    assert sum_of(probes, "e4m3_f32", {0: (1.0, 1.0), 31: (2.0**-9, 2.0**-9)}, 0.0, 121) == 1.0 + 2.0**-18


def test_e4m3_products_are_those_of_f16_on_sm90(probes):
    """Two of them: the elements 0 and 1 of every four, then 2 and 3; C comes last, and is rounded to nearest."""
    small = (2.0**-9, 2.0**-9)
    assert sum_of(probes, "e4m3_f32", {0: (1.0, 1.0), 1: small}, 0.0, 90) == 1.0 + 2.0**-18
    large = {0: (2.0**4, 2.0**4), 1: (-(2.0**4), 2.0**4)}
    assert sum_of(probes, "e4m3_f32", {**large, 16: small}, 0.0, 90) == 0.0  # summed with the large ones, 2^-26 of them
    assert sum_of(probes, "e4m3_f32", {**large, 2: small}, 0.0, 90) == 2.0**-18
    assert sum_of(probes, "e4m3_f32", {0: (2.0**-6, 1.0), 1: small}, 2.0**17, 90) == 2.0**17 + 2.0**-6
    assert sum_of(probes, "e4m3_f32", {0: (1.5 * 2.0**-7, 1.0)}, 2.0**17, 90) == 2.0**17 + 2.0**-6


def test_f16_accumulators_round_to_nearest_even(probes):
    for arch in (89, 90, 120):
        assert sum_of(probes, "e4m3_f16", {0: (2.0**-5, 2.0**-6)}, 1.0, arch) == 1.0  # tie, down to even
        assert sum_of(probes, "e4m3_f16", {0: (2.0**-5, 2.0**-6)}, 1.0 + 2.0**-10, arch) == 1.0 + 2.0**-9  # tie
        assert sum_of(probes, "e4m3_f16", {0: (448.0, 448.0)}, 0.0, arch) == np.inf


@pytest.mark.parametrize(("name", "arch"), REAL)
def test_nan_and_infinity(probes, name, arch):
    depth = DEPTH[name]
    a, b, c = np.ones((16, depth)), np.ones((depth, 8)), np.zeros((16, 8))
    a[3, depth - 1] = np.nan
    c[5, 2] = -np.inf
    d = real_product(probes, name, a, b, c, arch)
    assert np.isnan(d[3]).all() and d[5, 2] == -np.inf
    d[3], d[5, 2] = depth, depth
    assert (d == depth).all()


@pytest.mark.parametrize(("name", "arch"), REAL)
def test_products_of_random_numbers(probes, name, arch):
    """Errors stay within what cutting off can do to all terms; a wrong place in a fragment is far beyond."""
    rng = np.random.default_rng(11)
    a, b = rng.standard_normal((16, DEPTH[name])), rng.standard_normal((DEPTH[name], 8))
    c = rng.standard_normal((16, 8)).astype(np.float16).astype(np.float64)
    if name == "f16":
        a, b = a.astype(np.float16).astype(np.float64), b.astype(np.float16).astype(np.float64)
    else:
        a, b = (torch.from_numpy(x).to(torch.float8_e4m3fn).double().numpy() for x in (a, b))
    unit = 2.0**-11 if name == "e4m3_f16" else 2.0**-13 if (name, arch) == ("e4m3_f32", 89) else 2.0**-23
    size = np.abs(a) @ np.abs(b) + np.abs(c)
    assert (np.abs(real_product(probes, name, a, b, c, arch) - (a @ b + c)) <= 12 * unit * size).all()


# --- ldmatrix, stmatrix, exchange -------------------------------------------------------------------------------------


@pytest.mark.parametrize("transposed", [False, True])
def test_ldmatrix(probes, transposed):
    elements = np.arange(4 * 8 * 8, dtype=np.uint16).reshape(4, 8, 8)  # matrix, row, column
    got = launch(probes, "matrices", int(transposed), elements.view(np.uint32), 128).view(np.uint16).reshape(32, 4, 2)
    expected = (elements.swapaxes(1, 2) if transposed else elements).reshape(4, 32, 2).swapaxes(0, 1)
    assert (got == expected).all()


def test_stmatrix(probes):
    elements = np.arange(4 * 8 * 8, dtype=np.uint16).reshape(4, 8, 8)
    fragments = np.ascontiguousarray(elements.reshape(4, 32, 2).swapaxes(0, 1))
    got = launch(probes, "matrices_back", 0, fragments.view(np.uint32), 128).view(np.uint16).reshape(4, 8, 8)
    assert (got == elements).all()


@pytest.mark.parametrize("mask", [1, 2, 4, 16, 31])
def test_shuffle(probes, mask):
    x = np.arange(64, dtype=np.float32)
    got = as_f32(launch(probes, "exchanges", mask, x.view(np.uint32), 64, threads=64))
    assert (got == x[np.arange(64) ^ mask]).all()


def test_vote_sum_and_maximum(probes):
    x = np.zeros(64, np.float32)
    x[40] = 3.0
    vote, total, largest = (as_f32(launch(probes, "exchanges", which, x.view(np.uint32), 64, threads=64))
                            for which in (-1, -2, -3))
    assert (vote == np.repeat([0, 1], 32)).all()
    assert (total == largest).all() and (total == np.where(np.arange(64) // 8 == 5, 3, 0)).all()


def test_bits_of_all_votes(probes):
    x = np.random.default_rng(0).standard_normal(64).astype(np.float32)
    x[32:] = [1.0] * 31 + [-1.0]
    got = launch(probes, "exchanges", -4, x.view(np.uint32), 64, threads=64)
    expected = [int(sum(1 << lane for lane in range(32) if x[warp * 32 + lane] > 0)) for warp in range(2)]
    assert (got == np.repeat(np.array(expected, np.uint32), 32)).all() and expected[1] == 0x7FFFFFFF


def test_read_of_a_lane(probes):
    x = np.random.default_rng(0).integers(0, 32, 64).astype(np.float32)
    got = as_f32(launch(probes, "exchanges", -5, x.view(np.uint32), 64, threads=64))
    assert (got == x[np.arange(64) // 32 * 32 + x.astype(int)]).all()


def test_popcount(probes):
    a = patterns()
    expected = [bin(x).count("1") for x in a]
    assert (scalar(probes, "popcount", a) == np.array(expected, np.uint32)).all()


# --- completeness -----------------------------------------------------------------------------------------------------


def functions(header: Path) -> set[str]:
    text = re.sub(r"\(&(\w+)\(", r"\1(", header.read_text())  # a function that returns a reference to an array
    return set(re.findall(r"^(?:__device__ __forceinline__|inline) .*?(\w+)\(", text, re.MULTILINE))


@pytest.mark.parametrize("header", sorted((PROJECT.include / "sage/ptx").glob("*.cuh")), ids=lambda path: path.name)
def test_every_wrapper_has_a_meaning(header):
    assert functions(header) and functions(header) <= functions(simbuild.MEANINGS / "sage/ptx" / header.name)
