"""What Python repeats from the headers; documented calls; every header by itself."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import numpy as np
import pytest

from codegen import nvrtc
from sage_aot import _api, _emulate, _plan, _spec

INCLUDE = Path(__file__).parents[2] / "templates/include"
HEADERS = sorted(path.relative_to(INCLUDE) for path in INCLUDE.rglob("*.cuh"))


def constant(header: str, name: str, struct: str = "") -> np.float32 | int:
    """The value that a header gives a constant, at namespace scope or within a struct."""
    text = (INCLUDE / "sage" / header).read_text()
    if struct:
        text = re.search(rf"^struct {struct}\b.*?^}};", text, re.DOTALL | re.MULTILINE)[0]
    found = re.findall(rf"\bconstexpr (i32|float) {name} = ([-+.\de]+)f?;", text)
    assert len(found) == 1, f"{header}: expected {name} once, got {found}"
    kind, value = found[0]
    return int(value) if kind == "i32" else np.float32(value)


@pytest.mark.parametrize(("module", "name", "header", "there"), [
    (_spec, "SCALES_LINE", "tile/layout.cuh", "kScalesLine"),
    (_plan, "KEY_GROUPS", "tile/layout.cuh", "kKeyGroups"),
    (_plan, "ROW_GROUPS", "tile/layout.cuh", "kRowGroups"),
    (_plan, "STATISTICS", "params.cuh", "kStatistics"),
    (_plan, "DELTA_TILE", "quant/delta_s.cuh", "kTile"),
    (_emulate, "VECTOR", "quant/source.cuh", "kVector"),
    (_emulate, "SCORE_BIAS", "attn/softmax.cuh", "kScoreBias"),
    (_emulate, "SMALLEST_ABS_MAX", "quant/quantize.cuh", "kSmallestAbsMax"),
    (_emulate, "SMALLEST_SCALE", "attn/softmax.cuh", "kSmallestScale"),
    (_emulate, "NO_REFERENCE", "attn/softmax.cuh", "kNoReference"),
])
def test_constants_are_those_of_the_headers(module, name, header, there):
    expected = constant(header, there)
    assert type(expected)(getattr(module, name)) == expected


@pytest.mark.parametrize(("pv", "struct"), [("f16", "PvF16"), ("e4m3", "PvE4m3")])
@pytest.mark.parametrize(("name", "there"), [
    ("TOP", "kTop"), ("LAZY_RISE", "kLazyRise"), ("LARGEST_FOLDED", "kLargestFolded")])
def test_constants_of_p_are_those_of_the_header(pv, struct, name, there):
    assert np.float32(getattr(_emulate, name)[pv]) == constant("attn/pv_mma.cuh", there, struct)


def test_the_documented_calls_do_what_they_show():
    found = doctest.testmod(_api)
    assert found.attempted > 0
    assert found.failed == 0


@pytest.mark.parametrize("header", HEADERS, ids=str)
def test_every_header_compiles_alone(header, tmp_path):
    source = tmp_path / "alone.cu"
    source.write_text(f'#include "{header}"\n')
    assert "warning" not in nvrtc.compile_cubin(source, "sm_90", INCLUDE).log
