"""A small project in a temporary folder: a matrix of its own, templates of a few lines, headers to touch.

The matrix is not the real one, so that tuning a tile of the real matrix breaks no test here. Where sage_aot is
installed from a wheel, without a source tree, the tests of the source tree are left out, and the report's head says
so."""

from __future__ import annotations

import importlib.util
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from codegen.matrix import Matrix
    from codegen.project import Project

_OF_THE_TREE = re.compile(r"^(from|import) codegen\b|^\S.*parents\[2\]", re.MULTILINE)
"""Matches a test module that reads the source tree: it imports codegen or names the tree's root."""

collect_ignore = [] if importlib.util.find_spec("codegen") else sorted(
    path.name for path in Path(__file__).parent.glob("test_*.py") if _OF_THE_TREE.search(path.read_text("utf-8")))


def pytest_report_header() -> str | None:
    return f"without a source tree, left out: {', '.join(collect_ignore)}" if collect_ignore else None


_MATRIX = """\
# Rows over two lines, comments, an exclusion that hides parts of later ones: as the real matrix has them.
archs:
  sm80: {shared_bytes: 166912, least_driver: 525}
  sm86: {shared_bytes: 101376, least_driver: 525}
  sm89: {shared_bytes: 101376, least_driver: 525}
  sm90: {shared_bytes: 232448, least_driver: 525, run_on: NVIDIA H200}
axes:
  headdim: [64, 128]
  qk: [int8, int4]
  pv: [f16, e4m3]
  pv_accum: [f32, two_level_f32, two_level_f16]
  p: [linear, exp2]
  mask: [full, causal]
  v: [vraw, vsmooth]
  q: [qraw, qsmooth]
families:
  mma:
    attn: {template: attn_mma.cu.jinja}
    quant: {template: quantize.cu.jinja, threads: 256, min_blocks: 2}
    delta: {template: delta_s.cu.jinja, threads: 256}
    pack: {template: pack_keys.cu.jinja, threads: 1024}
    merge: {template: merge_splits.cu.jinja, threads: 256}
tiles:
  - {family: mma, arch: [sm80, sm90], headdim: 128, pv: f16,
     block_m: 128, block_n: 64, warp_m: 32, stages: 2, min_blocks: 2}
  - {family: mma, arch: sm86, headdim: 128, pv: f16,
     block_m: 256, block_n: 64, warp_m: 32, stages: 2, min_blocks: 1}
  - {family: mma, arch: sm89, headdim: 128, pv: e4m3,
     block_m: 128, block_n: 64, warp_m: 32, stages: 2, min_blocks: 2}
  - {family: mma, headdim: 64, q: qraw,
     block_m: 128, block_n: 64, warp_m: 32, stages: 2, min_blocks: 3}
  - {family: mma, headdim: 64, q: qsmooth,
     block_m: 128, block_n: 64, warp_m: 32, stages: 3, min_blocks: 2}

exclude:
  - {arch: sm90, qk: int4, why: "Hopper has no INT4 tensor cores"}
  - {arch: [sm80, sm86], pv: e4m3, why: "no FP8 tensor cores before sm89"}
  - {arch: sm89, pv: f16, why: "FP8 products run at twice the rate of f16 on sm89"}
  - {arch: sm90, pv: e4m3, why: "mma.sync emulates FP8 on Hopper"}
  - {pv: f16, pv_accum: [two_level_f32, two_level_f16], why: "f16 products add up in f32 as they are"}
  - {pv: e4m3, pv_accum: f32, why: "accumulators of FP8 products keep too few bits"}
  - {qk: int4, why: "not written yet: the INT4 products of the mma family"}
  - {v: vsmooth, why: "not written yet: smoothing of V"}
  - {p: linear, why: "not written yet: lines instead of exponentials"}
"""
_TEMPLATE = """\
// {name} {{{{ template }}}} {{{{ row }}}}
#include "sage/{header}.cuh"
using namespace sage;
struct Config {{
{constants}
}};
{functions}
struct Kernel {{
  static constexpr auto facts() {{
    return sage::facts(Fact{{"threads", {threads}}}, Fact{{"shared_bytes", {shared}}});
  }}
}};
SAGE_KERNEL_INFO(Kernel, {params});
"""
_FUNCTIONS = """\
{% for entry, rows in entries %}
extern "C" __global__ void {{ entry }}(float* x) { x[0] = kValue; x[1] = float({{ rows | cpp }}); }
{% endfor %}"""
_PRODUCTS = """
__device__ void products(float* x) {  // both products in a loop, as every attention kernel has them
  int s[4] = {};
  float o[4] = {};
#pragma unroll 1
  for (int i = 0; i < int(x[1]); ++i) {
    asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %4, %4, %4}, {%4, %4}, "
                 "{%0, %1, %2, %3};" : "+r"(s[0]), "+r"(s[1]), "+r"(s[2]), "+r"(s[3]) : "r"(i));
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %4, %4, %4}, {%4, %4}, "
                 "{%0, %1, %2, %3};" : "+f"(o[0]), "+f"(o[1]), "+f"(o[2]), "+f"(o[3]) : "r"(s[0]));
  }
  x[2] = o[0];
}
"""
_NAMES = {
    "attn_mma": "headdim qk pv pv_accum p mask smooth_v smooth_q block_m block_n warp_m stages "
                "v_stages min_blocks",
    "quantize": "headdim qk pv block_m other_block_m block_n warp_m key_norms threads min_blocks programmatic",
    "delta_s": "headdim threads",
    "pack_keys": "threads",
    "merge_splits": "threads programmatic",
}
_PARAMS = {"attn_mma": "AttnParams", "quantize": "QuantParams", "delta_s": "DeltaParams", "pack_keys": "PackParams",
           "merge_splits": "MergeParams"}
_FUNCTION_OF = {"attn_mma": """\
extern "C" __global__ void {{ name }}(float* x) { x[0] = kValue; products(x); }""", "pack_keys": """\
extern "C" __global__ void {{ name }}(float* x) { x[0] = kValue; }""", "merge_splits": """\
extern "C" __global__ void {{ name }}(float* x) { x[0] = kValue; }""",
                "quantize": _FUNCTIONS + _FUNCTIONS.replace("entries", "statistics_entries")}
"""Functions of kernels that have more or fewer entry points than one for each kind of rows."""
_FACTS = {"threads": "32 * Config::block_m / Config::warp_m",
          "shared": "Config::headdim * (Config::block_m + 3 * Config::stages * Config::block_n)"}
"""Facts of attention kernels as C++ expressions. Kernels of other kinds have their family's threads, and no such shared
memory."""

_REAL_HEADERS = ("fast_divmod.cuh", "kernel_info.cuh", "params.cuh", "quant/params.cuh", "types.cuh")
"""Headers of the project that are copied: they define the tables of a kernel's facts and fields."""


@pytest.fixture
def project(tmp_path: Path) -> Project:
    from codegen.project import ROOT, Project

    root = tmp_path / "project"
    made = Project(root, root / "build")
    include = made.include / "sage"
    include.mkdir(parents=True)
    for template, names in _NAMES.items():
        attn = template == "attn_mma"
        text = _TEMPLATE.format(
            name="{{ name }}", header="attn" if attn else "quant", params=_PARAMS[template],
            functions=_FUNCTION_OF.get(template, _FUNCTIONS), constants="\n".join(map(_constant, names.split())),
            **(_FACTS if attn else {"threads": "Config::threads", "shared": 0}))
        (made.templates / f"{template}.cu.jinja").write_text(text)
    for header in _REAL_HEADERS:
        (include / header).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / "templates/include/sage" / header, include / header)
    (include / "base.cuh").write_text('#pragma once\n#include "sage/quant/params.cuh"\nconstexpr float kValue = 1.f;\n'
                                     'enum SourceRows { kBf16, kF16, kAny };\nenum class Mask { kFull, kCausal };\n')
    for header, text in {"attn": _PRODUCTS, "quant": ""}.items():
        (include / f"{header}.cuh").write_text(f'#pragma once\n#include "sage/base.cuh"\n{text}')
    made.golden.mkdir(parents=True)
    made.matrix.write_text(_MATRIX)
    made.instructions.parent.mkdir()
    made.instructions.write_text("# Counts\n\n<!-- table: of a test -->\n<!-- end of table -->\n\nText.\n")
    return made


def _constant(name: str) -> str:
    return f"  static constexpr auto {name} = {{{{ {name} | cpp }}}};"


@pytest.fixture
def matrix(project: Project) -> Matrix:
    from codegen.matrix import read_matrix

    return read_matrix(project.matrix, project.templates)


@pytest.fixture
def small(project: Project) -> None:
    """The project's matrix narrowed to one attention kernel each for sm80 and sm86."""
    text = project.matrix.read_text()
    head = text[text.index("archs:"):text.index("tiles:")]
    for old, new in {"[64, 128]": "[64]", "[int8, int4]": "[int8]", "[f16, e4m3]": "[f16]", "[full, causal]": "[full]",
                     "[f32, two_level_f32, two_level_f16]": "[f32]", "[linear, exp2]": "[exp2]",
                     "[vraw, vsmooth]": "[vraw]", "[qraw, qsmooth]": "[qraw]"}.items():
        head = head.replace(old, new)
    head = "".join(line for line in head.splitlines(True) if not line.startswith(("  sm89", "  sm90")))
    row = "  - {family: mma, block_m: 128, block_n: 64, warp_m: 32, stages: 2, min_blocks: 3}\n"
    project.matrix.write_text(f"{head}tiles:\n{row}exclude: []\n")


@pytest.fixture
def edit() -> Callable[[Path, str, str], None]:
    """Replace a text that must stand exactly once in a file."""

    def replace(path: Path, old: str, new: str) -> None:
        text = path.read_text()
        if text.count(old) != 1:
            raise ValueError(f"expected {old!r} once in {path}, got it {text.count(old)} times")
        path.write_text(text.replace(old, new))

    return replace
