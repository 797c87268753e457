"""Python's assumptions about the kernels, against the kernels' facts; documented calls; headers compiled alone."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from codegen import nvrtc
from codegen.project import ROOT, Project
from sage_aot._backends.emulation import nvfp4
from sage_aot._backends.emulation.arithmetic import E4M3_LIMIT, to_pv
from sage_aot._call import api
from sage_aot._kernels.manifest import AttnRecord, Manifest
from sage_aot._launch import plan
from sage_aot._launch.structs import DTYPE_CODES

INCLUDE = Path(__file__).parents[2] / "templates/include"
HEADERS = sorted(path.relative_to(INCLUDE) for path in INCLUDE.rglob("*.cuh"))
MANIFEST = Manifest.read(Project(ROOT, ROOT / "build").package)
LARGEST_F16 = 65504.0


def attention(pv: str, pv_accum: str | None = None) -> list[AttnRecord]:
    """The attention kernels with these products; fails where there are none, since a test would then pass unchecked."""
    found = [record for record in MANIFEST.every_attention()
             if record.spec.pv == pv and pv_accum in (None, record.spec.pv_accum)]
    assert found
    return found


@pytest.mark.kernels("sm80", "sm90", "sm120")
def test_no_p_leaves_the_range_of_its_type():
    """A row's largest P is 2^`p_top`, times 2^`lazy_rise` where the row reference lags behind."""
    for record in attention("e4m3"):
        largest = np.exp2(np.float64(record.facts["p_top"] + record.facts["lazy_rise"]))
        rounded = to_pv(torch.tensor([largest]), "e4m3").item()
        assert rounded == {"two_level_f16": 224.0}.get(record.spec.pv_accum, 448.0)
        assert rounded == pytest.approx(largest, rel=1e-6)
        assert rounded <= E4M3_LIMIT
    for record in attention("f16"):
        assert np.exp2(record.facts["p_top"] + record.facts["lazy_rise"]) <= LARGEST_F16
    for record in attention("nvfp4"):
        assert np.exp2(record.facts["p_top"] + record.facts["lazy_rise"]) == pytest.approx(nvfp4.LIMIT, rel=1e-6)


def test_sums_of_a_tile_stay_within_f16():
    for record in attention("e4m3", "two_level_f16"):
        p, limit = round(2 ** record.facts["p_top"]), record.facts["v_limit"]
        assert p * limit * record.tile.block_n < LARGEST_F16
        assert to_pv(torch.tensor([limit]), "e4m3").item() == limit  # e4m3 holds it: no rounding leaves the range


@pytest.mark.kernels("sm80", "sm90", "sm120")
def test_v_takes_the_range_of_its_type():
    for pv_accum in ("two_level_f32", "f32"):
        assert {record.facts["v_limit"] for record in attention("e4m3", pv_accum)} == {E4M3_LIMIT}
    assert torch.finfo(torch.float8_e4m3fn).max == E4M3_LIMIT


def test_dtypes_have_the_numbers_of_the_header():
    text = (INCLUDE / "sage/types.cuh").read_text()
    members = re.search(r"enum class Dtype : i32 \{(.*?)\}", text)[1]
    assert {name.lower(): int(number) for name, number in re.findall(r"k(\w+) = (\d+)", members)} == DTYPE_CODES


def test_what_decides_about_divisors_has_the_numbers_of_the_header():
    text = (INCLUDE / "sage/quant/params.cuh").read_text()
    members = re.findall(r"k(\w+)", re.search(r"enum class Balance : i32 \{(.*?)\}", text)[1])
    assert members == ["ByNothing", "ByK", "ByKAndQ"]
    assert [plan.BY_NOTHING, plan.BY_K, plan.BY_K_AND_Q] == list(range(len(members)))


def test_log2_e_is_that_number():
    assert np.log2(np.e) == plan.LOG2_E


def test_the_documented_calls_do_what_they_show():
    found = doctest.testmod(api)
    assert found.attempted > 0
    assert found.failed == 0


@pytest.mark.parametrize("header", HEADERS, ids=str)
def test_every_header_compiles_alone(header, tmp_path):
    source = tmp_path / "alone.cu"
    source.write_text(f'#include "{header}"\n')
    assert "warning" not in nvrtc.compile_kernel(source, "sm_90", INCLUDE).log
