"""The simulator's block-scaled products, bit for bit beside an oracle in integers, and where an instruction finds its
operands and scales beside the layouts that CuTe publishes."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import scaled_sums
import simbuild
from simbuild import PROJECT, Build, Source
from test_meanings import PROBES, launch

LANES, ROWS, COLUMNS = 32, 16, 8
POISON = 0xFFFFFFFF  # in every byte a NaN, as a scale


@pytest.fixture(scope="module")
def probes() -> Build:
    return simbuild.build([Source("scaled_products", PROBES)], PROJECT.build / "scaled_probes")


class Layout:
    """A layout of CuTe: from a coordinate to an offset."""

    def __init__(self, shape: tuple, stride: tuple) -> None:
        self.modes = [list(zip(*(x if isinstance(x, tuple) else (x,) for x in mode))) for mode in zip(shape, stride)]

    def __call__(self, *coordinate: int) -> int:
        """The offset of a coordinate, an index a mode, which runs through the mode's shape with the first part first.
        """
        offset = 0
        for index, mode in zip(coordinate, self.modes):
            for size, stride in mode:
                offset += index % size * stride
                index //= size
        return offset


# SM120_16x8x32_TN_VS: a lane and an element of its words to row + 16 k of A, column + 8 k of B, row + 16 column of C;
# a lane to the row of its scale of A, and the column of its scale of B, where it has one. Source: NVIDIA/cutlass 4.7.0,
# include/cute/atom/mma_traits_sm120.hpp.
A_8 = Layout(((4, 8), (4, 2, 2)), ((64, 1), (16, 8, 256)))
B_8 = Layout(((4, 8), (4, 2)), ((32, 1), (8, 128)))
C = Layout(((4, 8), (2, 2)), ((32, 1), (16, 8)))
SCALE_A = Layout(((2, 2, 8),), ((8, 0, 1),))
SCALE_B = Layout(((4, 8),), ((0, 1),))


def words(a: np.ndarray, b: np.ndarray, c: np.ndarray, a_scale: np.ndarray, b_scale: np.ndarray) -> np.ndarray:
    """Codes A [n, 16, 32], B [n, 8, 32], bits C [n, 16, 8] and scales [n, 16], [n, 8] as the words of lanes, placed by
    CuTe's layouts; every byte of a scale that no selector names is poison."""
    lanes = np.zeros((len(a), LANES, 12), np.uint32)
    for lane in range(LANES):
        for element in range(16):
            k, row = divmod(A_8(lane, element), ROWS)
            lanes[:, lane, element // 4] |= a[:, row, k].astype(np.uint32) << 8 * (element % 4)
        for element in range(8):
            k, column = divmod(B_8(lane, element), COLUMNS)
            lanes[:, lane, 4 + element // 4] |= b[:, column, k].astype(np.uint32) << 8 * (element % 4)
        for element in range(4):
            column, row = divmod(C(lane, element), ROWS)
            lanes[:, lane, 6 + element] = c[:, row, column]
        lanes[:, lane, 10:] = POISON
        if lane % 4 < 2:
            lanes[:, lane, 10] = a_scale[:, SCALE_A(lane)] | np.uint32(POISON << 8 & POISON)
        if lane % 4 == 0:
            lanes[:, lane, 11] = b_scale[:, SCALE_B(lane)] | np.uint32(POISON << 8 & POISON)
    return lanes


def results(build: Build, lanes: np.ndarray) -> np.ndarray:
    """D [n, 16, 8] of the words of lanes."""
    n = len(lanes)
    got = launch(build, "scaled_products", 0, lanes, n * LANES * 4, blocks=n, arch=120).reshape(n, LANES, 4)
    d = np.zeros((n, ROWS, COLUMNS), np.uint32)
    for lane, element in product(range(LANES), range(4)):
        column, row = divmod(C(lane, element), ROWS)
        d[:, row, column] = got[:, lane, element]
    return d


def oracle(a: np.ndarray, b: np.ndarray, c: np.ndarray, a_scale: np.ndarray, b_scale: np.ndarray) -> np.ndarray:
    every = np.broadcast_to(a[:, :, None], (len(a), ROWS, COLUMNS, 32)).reshape(-1, 32)
    column = np.broadcast_to(b[:, None], (len(a), ROWS, COLUMNS, 32)).reshape(-1, 32)
    scales = np.repeat(a_scale, COLUMNS, 1).reshape(-1), np.tile(b_scale, (1, ROWS)).reshape(-1)
    return scaled_sums.mxf8(every, column, *scales, c.reshape(-1)).reshape(c.shape)


def held(build: Build, a: np.ndarray, b: np.ndarray, c: np.ndarray, a_scale: np.ndarray, b_scale: np.ndarray) -> None:
    got, expected = results(build, words(a, b, c, a_scale, b_scale)), oracle(a, b, c, a_scale, b_scale)
    wrong = [tuple(place) for place in np.argwhere(got != expected)]
    assert not wrong, f"{len(wrong)} differ, first {wrong[0]}: got {got[wrong[0]]:#x}, expected {expected[wrong[0]]:#x}"


def drawn(n: int, seed: int) -> tuple[np.ndarray, ...]:
    """Codes of all kinds; in a third of the products accumulators as large as the products, in others of any size."""
    rng = np.random.default_rng(seed)
    a, b = rng.integers(0, 256, (n, ROWS, 32), np.uint32), rng.integers(0, 256, (n, COLUMNS, 32), np.uint32)
    for x in (a, b):
        x[x & 127 == 127] ^= 1  # NaN is for a test of its own
        x[rng.random(x.shape) < rng.choice([0.0, 0.5, 0.97], (n, 1, 1))] = 0
    a_scale, b_scale = (rng.integers(117, 137, (n, size), np.uint32) for size in (ROWS, COLUMNS))
    c = rng.integers(0, 2**32, (n, ROWS, COLUMNS), np.uint32)
    like = rng.standard_normal(c.shape).astype(np.float32) * 2.0 ** rng.integers(-8, 20, (n, 1, 1))
    c[: 2 * n // 3] = like.astype(np.float32).view(np.uint32)[: 2 * n // 3]
    return a, b, np.where(c >> 23 & 255 == 255, 0, c).astype(np.uint32), a_scale, b_scale


def test_a_hundred_thousand_sums_are_those_of_the_oracle(probes):
    held(probes, *drawn(800, 1))


def test_scales_at_their_ends_and_accumulators_far_from_the_products(probes):
    a, b, c, a_scale, b_scale = drawn(48, 2)
    rng = np.random.default_rng(3)
    for scale in (a_scale, b_scale):
        scale[:] = rng.choice([0, 1, 60, 127, 128, 200, 253, 254, 255], scale.shape)
    c[::4] = rng.choice(np.array([0, 1 << 31, 1, 0x007FFFFF, 0x00800000, 0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000, 0xFF800000,
                                  0x7FC00000], np.uint32), c[::4].shape)
    held(probes, a, b, c, a_scale, b_scale)


def test_nan_among_the_elements(probes):
    a, b, c, a_scale, b_scale = drawn(4, 4)
    a[0, 3, 31], b[1, 5, 0] = 0x7F, 0xFF
    held(probes, a, b, c, a_scale, b_scale)
    got = results(probes, words(a, b, c, a_scale, b_scale))
    assert (got[0, 3] == scaled_sums.NAN).all() and (got[1, :, 5] == scaled_sums.NAN).all()


def test_sums_that_cancel(probes):
    a, b, c, a_scale, b_scale = drawn(32, 5)
    a[:, :, 16:], b[:, :, 16:] = a[:, :, :16] ^ 0x80, b[:, :, :16]
    held(probes, a, b, c, a_scale, b_scale)
    assert (oracle(a, b, np.zeros_like(c), a_scale, b_scale) == 0).all()
