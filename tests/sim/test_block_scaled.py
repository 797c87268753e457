"""The simulator's block-scaled products, compared bit for bit with an oracle in integers. Operands and scales lie where
CuTe's layouts put them, and every byte of a scale that no selector names is poison."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import numpy as np
import pytest
import scaled_sums
import simbuild
from simbuild import PROJECT, Build, Source
from test_meanings import PROBES, launch

LANES, ROWS, COLUMNS = 32, 16, 8
POISON = 0xFFFFFFFF
"""Scale of NaN in every byte, of either type."""


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


@dataclass(frozen=True)
class Instruction:
    """A block-scaled product, as CuTe's traits describe it."""

    bits: int  # of an element
    group: int  # elements of k that share a scale
    a: Layout  # lane and element of its words to row + 16 k of A
    b: Layout  # likewise to column + 8 k of B
    scale_a: Layout  # lane to the row of its scales of A
    scale_b: Layout  # lane to the column of its scales of B
    lanes_of_a: tuple[int, ...]  # of a quad, those whose scales of A count
    oracle: Callable[..., np.ndarray]
    scales: tuple[int, int]  # range of those drawn at random

    @property
    def depth(self) -> int:
        return 256 // self.bits

    @property
    def groups(self) -> int:
        return self.depth // self.group


C = Layout(((4, 8), (2, 2)), ((32, 1), (16, 8)))
"""Lane and element to row + 16 column of C and D: SM80_16x8_Row."""

INSTRUCTIONS = {
    "mxf8": Instruction(8, 32, Layout(((4, 8), (4, 2, 2)), ((64, 1), (16, 8, 256))),
                        Layout(((4, 8), (4, 2)), ((32, 1), (8, 128))), Layout(((2, 2, 8),), ((8, 0, 1),)),
                        Layout(((4, 8),), ((0, 1),)), (0, 1), scaled_sums.mxf8, (117, 137)),
    "nvfp4": Instruction(4, 16, Layout(((4, 8), (8, 2, 2)), ((128, 1), (16, 8, 512))),
                         Layout(((4, 8), (8, 2)), ((64, 1), (8, 256))), Layout(((2, 2, 8),), ((8, 0, 1),)),
                         Layout(((4, 8),), ((0, 1),)), (0, 1), scaled_sums.nvfp4, (0, 127)),
}
"""SM120_16x8x32_TN_VS and SM120_16x8x64_TN_VS: NVIDIA/cutlass 4.7.0, include/cute/atom/mma_traits_sm120.hpp."""

Operands = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]
"""Codes A [n, 16, depth], B [n, 8, depth], scales [n, 16, groups], [n, 8, groups], bits C [n, 16, 8]."""

each = pytest.mark.parametrize("name", INSTRUCTIONS)


@pytest.fixture(scope="module")
def probes() -> Build:
    return simbuild.build([Source("scaled_products", PROBES)], PROJECT.build / "scaled_probes")


def words(instruction: Instruction, operands: Operands, b_lane: int) -> np.ndarray:
    """The words of the lanes: 4 of A, 2 of B, 4 of C, one of scales of A, one of scales of B."""
    a, b, a_scale, b_scale, c = operands
    lanes = np.zeros((len(a), LANES, 12), np.uint32)
    per_word = 32 // instruction.bits
    for lane in range(LANES):
        for element in range(4 * per_word):
            k, row = divmod(instruction.a(lane, element), ROWS)
            lanes[:, lane, element // per_word] |= a[:, row, k] << instruction.bits * (element % per_word)
        for element in range(2 * per_word):
            k, column = divmod(instruction.b(lane, element), COLUMNS)
            lanes[:, lane, 4 + element // per_word] |= b[:, column, k] << instruction.bits * (element % per_word)
        for element in range(4):
            column, row = divmod(C(lane, element), ROWS)
            lanes[:, lane, 6 + element] = c[:, row, column]
        lanes[:, lane, 10:] = POISON
        if lane % 4 in instruction.lanes_of_a:
            lanes[:, lane, 10] = _word_of(a_scale[:, instruction.scale_a(lane)])
        if lane % 4 == b_lane:
            lanes[:, lane, 11] = _word_of(b_scale[:, instruction.scale_b(lane)])
    return lanes


def _word_of(scales: np.ndarray) -> np.ndarray:
    """Scales [n, groups] side by side, the first in the lowest byte; poison above."""
    word = np.full(len(scales), POISON << 8 * scales.shape[1] & POISON, np.uint32)
    for group in range(scales.shape[1]):
        word |= scales[:, group] << 8 * group
    return word


def results(build: Build, name: str, operands: Operands, b_lane: int = 0) -> np.ndarray:
    """D [n, 16, 8], of the simulator."""
    lanes = words(INSTRUCTIONS[name], operands, b_lane)
    n, which = len(lanes), 0 if name == "mxf8" else 1 + b_lane
    got = launch(build, "scaled_products", which, lanes, n * LANES * 4, blocks=n, arch=120).reshape(n, LANES, 4)
    d = np.zeros((n, ROWS, COLUMNS), np.uint32)
    for lane, element in product(range(LANES), range(4)):
        column, row = divmod(C(lane, element), ROWS)
        d[:, row, column] = got[:, lane, element]
    return d


def expected(name: str, operands: Operands) -> np.ndarray:
    """D, of the oracle."""
    a, b, a_scale, b_scale, c = operands
    shape = len(a), ROWS, COLUMNS
    rows = (np.broadcast_to(x[:, :, None], (*shape, x.shape[-1])) for x in (a, a_scale))
    columns = (np.broadcast_to(x[:, None], (*shape, x.shape[-1])) for x in (b, b_scale))
    (a, a_scale), (b, b_scale) = rows, columns
    flat = [x.reshape(-1, x.shape[-1]) for x in (a, b, a_scale, b_scale)]
    if name == "mxf8":
        flat[2:] = [x[:, 0] for x in flat[2:]]
    return INSTRUCTIONS[name].oracle(*flat, c.reshape(-1)).reshape(shape)


def held(build: Build, name: str, operands: Operands, b_lane: int = 0) -> np.ndarray:
    got, wanted = results(build, name, operands, b_lane), expected(name, operands)
    wrong = [tuple(place) for place in np.argwhere(got != wanted)]
    assert not wrong, f"{len(wrong)} differ, first {wrong[0]}: got {got[wrong[0]]:#x}, expected {wanted[wrong[0]]:#x}"
    return got


def drawn(name: str, n: int, seed: int) -> Operands:
    """Codes and scales of all kinds but NaN, sparse ones too; in two of three products accumulators about as large as
    the products, in the others of any size."""
    rng, instruction = np.random.default_rng(seed), INSTRUCTIONS[name]
    shapes = (n, ROWS, instruction.depth), (n, COLUMNS, instruction.depth)
    a, b = (rng.integers(0, 2**instruction.bits, shape, np.uint32) for shape in shapes)
    for x in (a, b):
        if name == "mxf8":
            x[x & 127 == 127] ^= 1
        x[rng.random(x.shape) < rng.choice([0.0, 0.5, 0.97], (n, 1, 1))] = 0
    scales = [rng.integers(*instruction.scales, (n, size, instruction.groups), np.uint32) for size in (ROWS, COLUMNS)]
    c = rng.integers(0, 2**32, (n, ROWS, COLUMNS), np.uint32)
    like = rng.standard_normal(c.shape) * 2.0 ** rng.integers(-8, 20, (n, 1, 1))
    c[: 2 * n // 3] = like.astype(np.float32).view(np.uint32)[: 2 * n // 3]
    return a, b, *scales, np.where(c >> 23 & 255 == 255, 0, c).astype(np.uint32)


@each
def test_a_hundred_thousand_sums_are_those_of_the_oracle(probes, name):
    held(probes, name, drawn(name, 800, 1))


@pytest.mark.parametrize("b_lane", range(4))
def test_every_lane_may_have_the_scales_of_b(probes, b_lane):
    held(probes, "nvfp4", drawn("nvfp4", 8, 2), b_lane)


@each
def test_one_scale_at_a_time(probes, name):
    """Each scale of a row alone, then of a column, is not zero: another lane or byte would show."""
    a, b, a_scale, b_scale, c = drawn(name, ROWS * INSTRUCTIONS[name].groups, 3)
    least = 60 if name == "mxf8" else 0  # 2^-67, and zero
    for scale in (a_scale, b_scale):
        one_hot = np.arange(len(a)) % (scale.shape[1] * scale.shape[2])
        chosen = np.arange(scale[0].size) == one_hot[:, None]
        alone = np.where(chosen.reshape(scale.shape), scale, least).astype(np.uint32)
        operands = (a, b, *(alone if x is scale else x for x in (a_scale, b_scale)), np.zeros_like(c))
        held(probes, name, operands)


ENDS = {"mxf8": [0, 1, 60, 127, 128, 200, 253, 254, 255], "nvfp4": [0, 1, 7, 8, 56, 120, 126, 127, 128, 254, 255]}
"""Scales at the ends of their types, NaN among them, and for ue4m3 with the sign that products ignore."""

ACCUMULATORS = [0, 1 << 31, 1, 0x007FFFFF, 0x00800000, 0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000, 0xFF800000, 0x7FC00000]


@each
def test_scales_at_their_ends_and_accumulators_far_from_the_products(probes, name):
    operands = drawn(name, 48, 4)
    rng = np.random.default_rng(5)
    for scale in operands[2:4]:
        scale[:] = rng.choice(ENDS[name], scale.shape)
    operands[4][::4] = rng.choice(np.array(ACCUMULATORS, np.uint32), operands[4][::4].shape)
    got = held(probes, name, operands)
    assert (got == scaled_sums.NAN).any() and not (got == scaled_sums.NAN).all()


def test_nan_among_the_elements(probes):
    a, b, *others = drawn("mxf8", 4, 6)
    a[0, 3, 31], b[1, 5, 0] = 0x7F, 0xFF
    got = held(probes, "mxf8", (a, b, *others))
    assert (got[0, 3] == scaled_sums.NAN).all() and (got[1, :, 5] == scaled_sums.NAN).all()


@each
def test_sums_that_cancel(probes, name):
    a, b, a_scale, b_scale, c = drawn(name, 32, 7)
    half, sign = INSTRUCTIONS[name].depth // 2, 1 << INSTRUCTIONS[name].bits - 1
    a[:, :, half:], b[:, :, half:] = a[:, :, :half] ^ sign, b[:, :, :half]
    for scale in (a_scale, b_scale):
        scale[..., scale.shape[-1] // 2:] = scale[..., : -(-scale.shape[-1] // 2)]
    held(probes, name, (a, b, a_scale, b_scale, c))
    assert (held(probes, name, (a, b, a_scale, b_scale, np.zeros_like(c))) == 0).all()
