"""What Python repeats from the headers; documented calls; every header by itself."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from codegen import nvrtc
from codegen.matrix import read_matrix
from sage_aot import _api, _emulate, _plan, _spec
from sage_aot._spec import AXES

INCLUDE = Path(__file__).parents[2] / "templates/include"
LITERAL = r"0x[\da-f]+|[-+.\de]+f?|true|false"
READ = {"i32": lambda text: int(text, 0), "float": lambda text: np.float32(text.removesuffix("f")),
        "bool": "true".__eq__}
STRUCTS = {"f32": "PvF16", "two_level_f32": "PvE4m3", "two_level_f16": "PvE4m3"}
"""Per accumulator, what holds its constants in attn/pv_mma.cuh."""
MATRIX = read_matrix(ROOT / "build_matrix.yaml", ROOT / "templates")
HEADERS = sorted(path.relative_to(INCLUDE) for path in INCLUDE.rglob("*.cuh"))


def constant(header: str, name: str, struct: str = "", *, when: bool = False) -> np.float32 | int | bool:
    """The value that a header gives a constant, at namespace scope or within a struct; of `condition ? a : b` a where
    `when`, else b."""
    text = (INCLUDE / "sage" / header).read_text()
    if struct:
        text = re.search(rf"^struct {struct}\b.*?^}};", text, re.DOTALL | re.MULTILINE)[0]
    found = re.findall(rf"\bconstexpr (i32|float|bool) {name} = (?:[\w: =]+ \? ({LITERAL}) : )?({LITERAL});", text)
    assert len(found) == 1, f"{header}: expected {name} once, got {found}"
    kind, true, value = found[0]
    return READ[kind](true if when and true else value)


@pytest.mark.parametrize(("module", "name", "header", "there"), [
    (_spec, "SCALES_LINE", "tile/layout.cuh", "kScalesLine"),
    (_plan, "KEY_GROUPS", "tile/layout.cuh", "kKeyGroups"),
    (_plan, "ROW_GROUPS", "tile/layout.cuh", "kRowGroups"),
    (_plan, "STATISTICS", "params.cuh", "kStatistics"),
    (_emulate, "ALL_FINITE", "params.cuh", "kAllFinite"),
    (_plan, "DELTA_TILE", "quant/delta_s.cuh", "kTile"),
    (_spec, "VECTOR", "quant/source.cuh", "kVector"),
    (_spec, "IN_FLIGHT", "quant/quantize.cuh", "kInFlight"),
    (_emulate, "SCORE_BIAS", "attn/softmax.cuh", "kScoreBias"),
    (_emulate, "SMALLEST_ABS_MAX", "quant/quantize.cuh", "kSmallestAbsMax"),
    (_emulate, "SMALLEST_SCALE", "attn/softmax.cuh", "kSmallestScale"),
    (_emulate, "NO_REFERENCE", "attn/softmax.cuh", "kNoReference"),
])
def test_constants_are_those_of_the_headers(module, name, header, there):
    expected = constant(header, there)
    assert type(expected)(getattr(module, name)) == expected


@pytest.mark.parametrize("accumulator", STRUCTS)
@pytest.mark.parametrize(("name", "there"), [
    ("TOP", "kTop"), ("LAZY_RISE", "kLazyRise"), ("LARGEST_FOLDED", "kLargestFolded"),
    ("WHOLE_REFERENCE", "kWholeReference")])
def test_constants_of_p_are_those_of_the_header(accumulator, name, there):
    expected = constant("attn/pv_mma.cuh", there, STRUCTS[accumulator], when=accumulator == "two_level_f16")
    assert type(expected)(getattr(_emulate, name)[accumulator]) == expected
    assert getattr(_emulate, name).keys() == set(AXES["pv_accum"]) == STRUCTS.keys()


@pytest.mark.parametrize("accumulator", STRUCTS)
def test_row_sums_are_of_what_the_header_says(accumulator):
    in_threads = constant("attn/pv_mma.cuh", "kSumsInThreads", STRUCTS[accumulator])  # before P is rounded
    assert _emulate.SUMS_ROUNDED[accumulator] is not in_threads


@pytest.mark.parametrize("bits", AXES["qk"])
def test_clipping_is_that_of_the_header(bits):
    assert np.float32(_emulate.CLIP[bits]) == constant("quant/quantize.cuh", "kClip", when=bits == 8)


@pytest.mark.parametrize("pv_accum", ["two_level_f32", "two_level_f16"])
def test_no_p_leaves_the_range_of_its_type(pv_accum):
    top = np.exp2(np.float64(np.float32(_emulate.TOP[pv_accum])))
    rounded = _emulate.to_pv(torch.tensor([top]), "e4m3").item()
    assert rounded == {"two_level_f32": 448.0, "two_level_f16": 224.0}[pv_accum] == pytest.approx(top, rel=1e-6)


def test_sums_of_a_tile_stay_within_f16():
    assert _plan.V_LIMIT.keys() == set(AXES["pv_accum"])
    p, limit = round(2 ** _emulate.TOP["two_level_f16"]), _plan.V_LIMIT["two_level_f16"]
    tile_keys = {kernel.tile.block_n for kernel in MATRIX.kernels if kernel.spec.pv_accum == "two_level_f16"}
    assert p * limit * max(tile_keys) < 65504
    assert _emulate.to_pv(torch.tensor([limit]), "e4m3").item() == limit  # e4m3 holds it, no rounding leaves the range
    assert _plan.V_LIMIT["two_level_f32"] == _emulate.E4M3_LIMIT


def test_the_documented_calls_do_what_they_show():
    found = doctest.testmod(_api)
    assert found.attempted > 0
    assert found.failed == 0


@pytest.mark.parametrize("header", HEADERS, ids=str)
def test_every_header_compiles_alone(header, tmp_path):
    source = tmp_path / "alone.cu"
    source.write_text(f'#include "{header}"\n')
    assert "warning" not in nvrtc.compile_kernel(source, "sm_90", INCLUDE).log
