"""build_matrix.yaml: the kernels that follow from it, and the message for every kind of mistake in it."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from records import record_of

from codegen.errors import MatrixError, UsageError
from codegen.matrix import read_matrix
from codegen.project import ROOT
from codegen.selection import Selection
from sage_aot._kernels.axes import AXES
from sage_aot._kernels.manifest import Arch
from sage_aot._kernels.spec import (
    BACKWARD,
    KINDS,
    OF_BACKWARD,
    SELECTION,
    AttnSpec,
    capability_of,
    is_ptx,
    spec_of,
    target_of,
)
from sage_aot._kernels.tile import Tile

SM80_ROW = "{family: mma, arch: [sm80, sm90], headdim: 128, pv: f16,"
SM86_ROW = "{family: mma, arch: sm86, headdim: 128, pv: f16,"
D64_ROW = "{family: mma, headdim: 64, q: qraw,"
D64_SMOOTH_ROW = "{family: mma, headdim: 64, q: qsmooth,"
D64_SIZES = "block_m: 128, block_n: 64, warp_m: 32, stages: 2, min_blocks: 3}"

# Replaced text, its replacement, the text that the line of the complaint holds, the complaint.
BAD = {
    "unknown key": ("exclude:", "colour: 1\nexclude:", "colour",
                    "expected a key of the matrix (archs, axes, families, tiles, exclude), got 'colour'"),
    "missing key": ("families:", "colour:", "archs:", "expected the key 'families' in the matrix, got none"),
    "key twice": ("  headdim: [64, 128]", "  v: [vraw]\n  headdim: [64, 128]", "  v: [vraw, vsmooth]",
                  "expected the key 'v' once in 'axes', got it twice"),
    "unknown axis": ("  qk: [int8, int4]", "  bits: [int8, int4]", "  bits:",
                     "expected a key of 'axes' (headdim, qk, pv, pv_accum, p, mask, v, q), got 'bits'"),
    "missing axis": ("  qk: [int8, int4]\n", "", "  headdim:", "expected the key 'qk' in 'axes', got none"),
    "unknown value": ("headdim: [64, 128]", "headdim: [64, 96]", "headdim: [64, 96]",
                      "expected a value of the axis 'headdim' (64, 128, 256), got 96"),
    "float value": ("headdim: [64, 128]", "headdim: [64.0, 128]", "headdim: [64.0",
                    "expected a value of the axis 'headdim' (64, 128, 256), got 64.0"),
    "bad arch": ("axes:", "  hopper: {shared_bytes: 1, least_driver: 1}\naxes:", "hopper",
                 "expected an arch such as 'sm89', got 'hopper'"),
    "arch twice": ("axes:", "  sm80: {shared_bytes: 1, least_driver: 1}\naxes:", "sm80: {shared_bytes: 1,",
                   "expected the key 'sm80' once in 'archs', got it twice"),
    "arch's key": ("run_on: NVIDIA", "ran_on: NVIDIA", "ran_on",
                   "expected a key of the arch 'sm90' (shared_bytes, least_driver, run_on), got 'ran_on'"),
    "arch's driver": ("sm86: {shared_bytes: 101376, least_driver: 525}", "sm86: {shared_bytes: 101376}", "sm86:",
                      "expected the key 'least_driver' in the arch 'sm86', got none"),
    "arch's memory": ("sm86: {shared_bytes: 101376", "sm86: {shared_bytes: 99 KB", "99 KB",
                      "expected shared_bytes as a positive number, got '99 KB'"),
    "arch's GPU": ("run_on: NVIDIA H200", "run_on: ' '", "run_on", "expected 'run_on' as a sentence, got ' '"),
    "value twice": ("headdim: [64, 128]", "headdim: [64, 128, 64]", "headdim: [64",
                    "expected each value once, got 64 twice"),
    "no values": ("headdim: [64, 128]", "headdim: []", "headdim: []", "expected one value or more, got an empty list"),
    "value twice in a row": ("[sm80, sm86], pv", "[sm80, sm80], pv", "[sm80, sm80]",
                             "expected each value once, got 'sm80' twice"),
    "row's value": (SM86_ROW, SM86_ROW.replace("sm86", "sm87"), "sm87",
                    "expected a value of the axis 'arch' (sm80, sm86, sm89, sm90), got 'sm87'"),
    "row's key": (D64_ROW, D64_ROW.replace("headdim", "headim"), "headim",
                  ("expected a key of a row of 'tiles' (family, block_m, block_n, warp_m, stages, min_blocks, arch, "
                   "headdim, qk, pv, pv_accum, p, mask, v, q, v_stages, allow_spills, why, suffix), got 'headim'")),
    "stages of V": (D64_SIZES, D64_SIZES.replace("stages: 2", "stages: 2, v_stages: 2"), D64_ROW,
                    "v_stages may be 1 with stages 2 (V arrives under the scores of its tile), got 2 and 2"),
    "suffix": (D64_SIZES, D64_SIZES.replace("stages: 2", "suffix: x, stages: 2"), "suffix: x",
               "expected a suffix of the target (a, f), got 'x'"),
    "exclusion's key": ("{qk: int4, why", "{bits: 4, why", "{bits",
                        ("expected a key of a row of 'exclude' (why, arch, headdim, qk, pv, pv_accum, p, mask, v, q), "
                         "got 'bits'")),
    "no size": (D64_SIZES, D64_SIZES.replace(" stages: 2,", ""), D64_ROW,
                "expected the key 'stages' in a row of 'tiles', got none"),
    "bad size": (D64_SIZES, D64_SIZES.replace("warp_m: 32", "warp_m: 24"), D64_ROW,
                 "warp_m must be 16 or 32 (one or two m16 fragments), got 24"),
    "size of no number": (D64_SIZES, D64_SIZES.replace("block_n: 64", "block_n: wide"), D64_ROW,
                          "block_n must be a positive integer, got 'wide'"),
    "unknown family": (D64_ROW, D64_ROW.replace("mma", "wgmma"), "family: wgmma",
                       "expected a family (mma), got 'wgmma'"),
    "family that no code knows": ("  mma:\n", "  mma2:\n", "  mma2:",
                                  "expected a key of 'families' (mma, wgmma), got 'mma2'"),
    "no attention": ("    attn: {template: attn_mma.cu.jinja}\n", "", "    quant: {",
                     "expected the key 'attn' in the family 'mma', got none"),
    "unknown kind": ("    delta: {", "    means: {", "    means: {",
                     "expected a key of the family 'mma' (pack, quant, attn, merge, pool, choose, lists, delta, "
                     "bwdprep, bwdkv, bwdq, bwdqkv, bwdsum), got 'means'"),
    "no quantizer": ("    quant: {template: quantize.cu.jinja, threads: 256, min_blocks: 2}\n", "", "    attn: {",
                     "expected the key 'quant' in the family 'mma', got none"),
    "no delta": ("    delta: {template: delta_s.cu.jinja, threads: 256}\n", "", D64_SMOOTH_ROW,
                 ("expected the kind delta in the family 'mma', which "
                  "sage_attn_sm80_d64_qkint8_pvf16_accf32_full_vraw_qsmooth needs, got none")),
    "template's key": ("{template: attn_mma.cu.jinja}", "{template: attn_mma.cu.jinja, threads: 128}", "threads: 128",
                       "expected a key of 'attn' of the family 'mma' (template), got 'threads'"),
    "lost template": ("template: quantize.cu.jinja", "template: lost.cu.jinja", "lost",
                      "expected a file in templates/, got 'lost.cu.jinja'"),
    "suffix of a quantizer": ("quantize.cu.jinja, threads: 256", "quantize.cu.jinja, suffix: a, threads: 256", "suffix",
                              "expected a key of 'quant' of the family 'mma' (template, threads, min_blocks, "
                              "allow_spills, why), got 'suffix'"),
    "bad threads": ("quantize.cu.jinja, threads: 256", "quantize.cu.jinja, threads: 250", "threads: 250",
                    "expected threads as a multiple of 32, at most 1024, got 250"),
    "bad min_blocks": ("threads: 256, min_blocks: 2", "threads: 256, min_blocks: 0", "min_blocks: 0",
                       "expected min_blocks as a positive integer, got 0"),
    "bad min_blocks of a head dim": ("threads: 256, min_blocks: 2", "threads: 256, min_blocks: {64: 3, 128: 0}",
                                     "min_blocks: {64: 3, 128: 0}", "expected 128 as a positive integer, got 0"),
    "min_blocks of another head dim": ("min_blocks: 2}\n    delta", "min_blocks: {64: 3, 128: 2, 32: 4}}\n    delta",
                                       "min_blocks: {64: 3", "expected a key of 'min_blocks' (64, 128), got '32'"),
    "min_blocks of some head dims": ("threads: 256, min_blocks: 2", "threads: 256, min_blocks: {64: 3}",
                                     "min_blocks: {64: 3}", "expected the key '128' in 'min_blocks', got none"),
    "no min_blocks": ("threads: 256, min_blocks: 2", "threads: 256", "    quant: {",
                      "expected the key 'min_blocks' in 'quant' of the family 'mma', got none"),
    "too many threads": ("quantize.cu.jinja, threads: 256", "quantize.cu.jinja, threads: 2048", "threads: 2048",
                         "expected threads as a multiple of 32, at most 1024, got 2048"),
    "no why": (', why: "not written yet: smoothing of V"', "", "{v: vsmooth",
               "expected the key 'why' in a row of 'exclude', got none"),
    "empty why": ('"not written yet: smoothing of V"', '" "', "{v: vsmooth", "expected 'why' as a sentence, got ' '"),
    "spills without why": (D64_SIZES, D64_SIZES.replace("}", ", allow_spills: 8}"), D64_ROW,
                           "expected 'allow_spills' and 'why' together, got only 'allow_spills'"),
    "why without spills": (D64_SIZES, D64_SIZES.replace("}", ", why: fine}"), D64_ROW,
                           "expected 'allow_spills' and 'why' together, got only 'why'"),
    "bad spills": (D64_SIZES, D64_SIZES.replace("}", ", allow_spills: -8, why: fine}"), "allow_spills",
                   "expected allow_spills as a positive number of bytes, got -8"),
    "uncovered": (D64_ROW, D64_ROW.replace("64", "64, mask: full"), SM80_ROW,
                  ("expected one row of 'tiles' or an exclusion for "
                   "sage_attn_sm90_d64_qkint8_pvf16_accf32_causal_vraw_qraw, got none")),
    "covered twice": (SM86_ROW, SM86_ROW.replace("sm86", "[sm80, sm86]"), "[sm80, sm86], headdim",
                      ("expected one row of 'tiles' for sage_attn_sm80_d128_qkint8_pvf16_accf32_full_vraw_qraw, got "
                       "those of lines {SM80} and {SM86}")),
    "useless exclusion": ("  - {qk: int4, why", "  - {arch: sm80, pv: e4m3, why: again}\n  - {qk: int4, why", "again",
                          ("expected a row that matches a combination left by those above, got one that matches "
                           "nothing")),
    "useless row": ("exclude:", "  - {family: mma, qk: int4, headdim: 64,\n     " + D64_SIZES + "\nexclude:",
                    "qk: int4, headdim",
                    "expected a row that matches a combination that is not excluded, got one that matches nothing"),
    "impossible": ("{arch: [sm80, sm86], pv: e4m3", "{arch: sm80, pv: e4m3", D64_ROW,
                   ("expected an exclusion of sage_attn_sm86_d64_qkint8_pve4m3_acc2f32_full_vraw_qraw, got tiles: no "
                    "FP8 tensor cores before sm89")),
    "shared quantizer": (D64_ROW, D64_ROW + " mask: causal,\n     "
                         + D64_SIZES.replace("warp_m: 32", "warp_m: 16") + "\n  - " + D64_ROW + " mask: full,",
                         "mask: causal",
                         ("expected the tiles and family of line {FULL} for "
                          "sage_attn_sm80_d64_qkint8_pvf16_accf32_causal_vraw_qraw, got others: both rows "
                          "share sage_quant_sm80_d64_qkint8_pvf16")),
    "block_n of no power of two": (D64_SIZES, D64_SIZES.replace("block_n: 64", "block_n: 192"), D64_ROW,
                                   "block_n must be 32, 64 or 128, got 192"),
    "no list": ("exclude:", "exclude: none\nrest:", "exclude: none", "expected 'exclude' as a list, got 'none'"),
    "no mapping": ("  - {qk: int4, why: \"not written yet: the INT4 products of the mma family\"}", "  - qk", "  - qk",
                   "expected a row of 'exclude' as a mapping, got 'qk'"),
}


def _line(text: str, part: str) -> int:
    """The first line that holds a text, from 1."""
    return text[:text.index(part)].count("\n") + 1


@pytest.mark.parametrize("case", BAD)
def test_bad_row_is_reported_with_its_line(project, edit, case):
    old, new, place, sentence = BAD[case]
    edit(project.matrix, old, new)
    text = project.matrix.read_text()
    lines = {"{SM80}": SM80_ROW, "{SM86}": "arch: [sm80, sm86], headdim", "{FULL}": "mask: full,"}
    for mark, part in lines.items():
        if mark in sentence:
            sentence = sentence.replace(mark, str(_line(text, part)))
    with pytest.raises(MatrixError) as error:
        read_matrix(project.matrix, project.templates)
    assert f"build_matrix.yaml:{_line(text, place)}: {sentence}" in error.value.problems


@pytest.mark.parametrize("text, problem", [
    ("axes: [", "build_matrix.yaml:1: expected YAML, got an error: "),
    ("axes: \x07", "build_matrix.yaml:1: expected YAML, got an error: "),
    ("", "build_matrix.yaml:1: expected a build matrix, got nothing"),
    ("- a", "build_matrix.yaml:1: expected the matrix as a mapping, got a list"),
])
def test_what_is_no_matrix_at_all(project, text, problem):
    project.matrix.write_text(text)
    with pytest.raises(MatrixError) as error:
        read_matrix(project.matrix, project.templates)
    assert [found[:len(problem)] for found in error.value.problems] == [problem]


def test_all_problems_come_at_once_in_the_order_of_the_file(project, edit):
    edit(project.matrix, "quantize.cu.jinja, threads: 256", "quantize.cu.jinja, threads: 1")
    edit(project.matrix, D64_SIZES, D64_SIZES.replace("stages: 2", "stages: 1"))
    edit(project.matrix, '"not written yet: smoothing of V"', '""')
    edit(project.matrix, "{arch: sm89, pv: f16, why", "{arch: sm89, qk: int8, pv: f16, headdim: 64, why")
    with pytest.raises(MatrixError) as error:
        read_matrix(project.matrix, project.templates)
    problems = error.value.problems
    for part in ("threads", "stages must be", "'why' as a sentence",
                 "sage_attn_sm89_d128_qkint8_pvf16_accf32_full_vraw_qraw"):
        assert any(part in problem for problem in problems), part
    lines = [int(problem.split(":")[1]) for problem in problems]
    assert lines == sorted(lines)


def test_a_misspelt_axis_does_not_echo_through_the_combinations(project, edit):
    edit(project.matrix, "{qk: int4, why", "{bits: 4, why")
    with pytest.raises(MatrixError) as error:
        read_matrix(project.matrix, project.templates)
    assert len(error.value.problems) == 1


def test_every_combination_is_built_or_has_a_reason(matrix):
    axes = {"arch": ("sm80", "sm86", "sm89", "sm90"), "headdim": (64, 128), "qk": ("int8", "int4"),
            "pv": ("f16", "e4m3"), "pv_accum": ("f32", "two_level_f32", "two_level_f16"),
            "p": ("exp2", "linear"), "mask": ("full", "causal"), "v": ("vraw", "vsmooth"), "q": ("qraw", "qsmooth")}
    everything = {AttnSpec(**dict(zip(axes, values))).name for values in product(*axes.values())}
    built = {kernel.spec.name for kernel in matrix.kernels if kernel.spec.kind == "attn"}
    missing = dict(matrix.missing)
    assert built | missing.keys() == everything
    assert not built & missing.keys()
    assert all(missing.values())


def test_the_first_exclusion_gives_the_reason(matrix):
    missing = dict(matrix.missing)
    assert missing["sage_attn_sm90_d64_qkint4_pve4m3_acc2f32_full_vsmooth_qraw"].startswith("Hopper has no INT4")
    assert missing["sage_attn_sm80_d64_qkint4_pve4m3_acc2f32_full_vsmooth_qraw"] == "no FP8 tensor cores before sm89"
    assert missing["sage_attn_sm80_d64_qkint8_pvf16_accf32_full_vsmooth_qraw"] == "not written yet: smoothing of V"
    assert missing["sage_attn_sm80_d64_qkint8_pvf16_acc2f16_full_vraw_qraw"] == "f16 products add up in f32 as they are"
    assert missing["sage_attn_sm89_d64_qkint8_pve4m3_accf32_full_vraw_qraw"].startswith("accumulators of FP8 products")
    assert missing["sage_attn_sm80_d64_qkint8_pvf16_accf32_plinear_full_vraw_qraw"].startswith("not written yet: lines")


def test_names_are_unique_sorted_and_round_trip(matrix):
    names = [kernel.spec.name for kernel in matrix.kernels]
    assert names == sorted(set(names))
    assert [spec_of(name) for name in names] == [kernel.spec for kernel in matrix.kernels]


def test_every_attention_kernel_has_its_companions(matrix):
    kernels = {kernel.spec.name: kernel for kernel in matrix.kernels}
    needed = set()
    for kernel in matrix.kernels:
        if kernel.spec.kind == "attn":
            needed |= {kernel.spec.name, *kernel.companions}
            kinds = ["pack", "quant", *(["delta"] if kernel.spec.q == "qsmooth" else []), "merge"]
            assert kernel.companions == tuple(kernel.spec.companion(kind).name for kind in kinds)
            assert kernels[kernel.spec.companion("quant").name].tile.quantized == kernel.tile.quantized
        else:
            assert kernel.companions == ()
    assert needed == kernels.keys()


def test_the_delta_kernel_is_planned_only_where_q_is_smoothed(project, edit):
    row = '  - {q: qsmooth, arch: [sm80, sm86, sm89], why: "a test"}\n  - {qk: int4, why'
    edit(project.matrix, "  - {qk: int4, why", row)
    kernels = read_matrix(project.matrix, project.templates).kernels
    assert {kernel.spec.arch for kernel in kernels if kernel.spec.kind == "delta"} == {"sm90"}
    delta = next(kernel for kernel in kernels if kernel.spec.name == "sage_delta_sm90_d64")
    assert (delta.how.threads, delta.how.template, delta.min_blocks) == (256, "delta_s.cu.jinja", 1)
    assert delta.row == "{family: mma, headdim: 64, q: qsmooth}"


def without_smooth_q(project, edit) -> None:
    """Changes the project's matrix: Q is never smoothed, and the family has no delta kernel."""
    edit(project.matrix, "  q: [qraw, qsmooth]", "  q: qraw")
    text = project.matrix.read_text()
    row = text[text.index(f"  - {D64_SMOOTH_ROW}"):text.index("\nexclude:")]
    edit(project.matrix, row, "")
    edit(project.matrix, "    delta: {template: delta_s.cu.jinja, threads: 256}\n", "")


def test_a_family_has_the_kinds_that_its_kernels_need(project, edit):
    without_smooth_q(project, edit)
    matrix = read_matrix(project.matrix, project.templates)
    assert {kernel.spec.kind for kernel in matrix.kernels} == {"attn", "quant", "pack", "merge"}


def test_each_kernel_without_its_delta_is_one_complaint(project, edit):
    edit(project.matrix, "    delta: {template: delta_s.cu.jinja, threads: 256}\n", "")
    with pytest.raises(MatrixError) as error:
        read_matrix(project.matrix, project.templates)
    assert len(error.value.problems) == len(set(error.value.problems)) > 1
    assert all("expected the kind delta in the family 'mma', which sage_attn_" in problem
               and "_qsmooth needs" in problem for problem in error.value.problems)


def test_kernels_that_share_a_quantizer_may_differ_in_stages_and_blocks(matrix):
    kernels = {kernel.spec.name: kernel for kernel in matrix.kernels}
    raw, smooth = (kernels[f"sage_attn_sm80_d64_qkint8_pvf16_accf32_full_vraw_{q}"] for q in ("qraw", "qsmooth"))
    assert (raw.tile.stages, raw.tile.min_blocks) == (2, 3)
    assert (smooth.tile.stages, smooth.tile.min_blocks) == (3, 2)
    assert raw.spec.companion("quant") == smooth.spec.companion("quant")


@pytest.mark.parametrize("old, new", [
    ("block_n: 64", "block_n: 128"), ("warp_m: 32", "warp_m: 16"),
])
def test_kernels_that_share_a_quantizer_agree_on_its_layout(project, edit, old, new):
    sizes = "block_m: 128, block_n: 64, warp_m: 32, stages: 3"
    edit(project.matrix, sizes, sizes.replace(old, new))
    text = project.matrix.read_text()
    with pytest.raises(MatrixError) as error:
        read_matrix(project.matrix, project.templates)
    assert (f"build_matrix.yaml:{_line(text, D64_SMOOTH_ROW)}: expected the tiles and family of line "
            f"{_line(text, D64_ROW)} for sage_attn_sm80_d64_qkint8_pvf16_accf32_full_vraw_qsmooth, got others: both "
            "rows share sage_quant_sm80_d64_qkint8_pvf16") in error.value.problems


SMOOTH_SIZES = "block_m: 128, block_n: 64, warp_m: 32, stages: 3"


def test_a_quantizer_makes_query_tiles_of_two_heights(project, edit, matrix):
    edit(project.matrix, SMOOTH_SIZES, SMOOTH_SIZES.replace("128", "256"))
    for kernel in read_matrix(project.matrix, project.templates).kernels:
        if kernel.spec.kind == "quant":
            two = kernel.spec.values["headdim"] == 64
            assert {kernel.tile.block_m, kernel.other_block_m} == ({128, 256} if two else {kernel.tile.block_m})
    assert all(kernel.other_block_m == kernel.tile.block_m for kernel in matrix.kernels)


def test_a_quantizer_makes_no_query_tiles_of_a_third_height(project, edit):
    """Raw Q: tiles of 128 rows; smoothed Q: of 256, causal of 64."""
    begin = project.matrix.read_text().index(D64_SMOOTH_ROW)
    row = project.matrix.read_text()[begin:].splitlines()[:2]
    taller, lower = (f"  - {row[0]} mask: {mask},\n{row[1].replace('128', size)}\n" for mask, size in (
        ("full", "256"), ("causal", "64")))
    edit(project.matrix, f"  - {row[0]}\n{row[1]}\n", taller + lower)
    with pytest.raises(MatrixError) as error:
        read_matrix(project.matrix, project.templates)
    assert ("sage_attn_sm80_d64_qkint8_pvf16_accf32_causal_vraw_qsmooth, got others: both rows share "
            "sage_quant_sm80_d64_qkint8_pvf16") in "\n".join(error.value.problems)


def test_a_matrix_that_cannot_be_read_is_one_sentence(project):
    project.matrix.write_bytes(b"axes:\n  # caf\xe9\n")
    with pytest.raises(MatrixError) as error:
        read_matrix(project.matrix, project.templates)
    assert error.value.problems == ["build_matrix.yaml:2: expected UTF-8, got the byte 0xe9"]
    project.matrix.unlink()
    with pytest.raises(UsageError, match="expected a build matrix in .*build_matrix.yaml, got: No such file"):
        read_matrix(project.matrix, project.templates)
    project.matrix.mkdir()
    with pytest.raises(UsageError, match="got: Is a directory"):
        read_matrix(project.matrix, project.templates)


def test_what_a_kernel_takes_from_its_row(project, edit):
    edit(project.matrix, "pv: e4m3,\n     block_m: 128", "pv: [e4m3],\n     allow_spills: 32, why: tried, block_m: 128")
    kernels = {kernel.spec.name: kernel for kernel in read_matrix(project.matrix, project.templates).kernels}
    attn = kernels["sage_attn_sm89_d128_qkint8_pve4m3_acc2f32_full_vraw_qraw"]
    quant = kernels["sage_quant_sm89_d128_qkint8_pve4m3"]
    assert attn.row == quant.row == "{family: mma, arch: sm89, headdim: 128, pv: e4m3}"
    assert (attn.how.threads, attn.how.template, attn.allowed_spill_bytes) == (None, "attn_mma.cu.jinja", 32)
    assert (quant.how.threads, quant.how.template, quant.allowed_spill_bytes) == (256, "quantize.cu.jinja", 0)
    assert (attn.family, attn.tile, attn.min_blocks, quant.min_blocks) == ("mma", Tile(128, 64, 32, 2, 2), 2, 2)
    twin = kernels["sage_attn_sm89_d128_qkint8_pve4m3_acc2f16_full_vraw_qraw"]
    assert (twin.row, twin.tile, twin.spec.companion("quant")) == (attn.row, attn.tile, quant.spec)
    assert kernels["sage_attn_sm90_d128_qkint8_pvf16_accf32_full_vraw_qraw"].row == (
        "{family: mma, arch: sm90, headdim: 128, pv: f16}")


def test_what_is_known_of_archs(matrix):
    assert matrix.archs["sm86"] == Arch((8, 6), 525, None)
    assert matrix.archs["sm90"] == Arch((9, 0), 525, "NVIDIA H200")
    assert matrix.shared_bytes == {"sm80": 166912, "sm86": 101376, "sm89": 101376, "sm90": 232448}


def test_the_matrix_of_this_project_is_right():
    assert read_matrix(ROOT / "build_matrix.yaml", ROOT / "templates").kernels


def test_a_row_may_say_how_many_stages_have_v(project, edit):
    edit(project.matrix, D64_SIZES, D64_SIZES.replace("stages: 2", "stages: 2, v_stages: 1"))
    kernels = read_matrix(project.matrix, project.templates).kernels
    found = {(kernel.spec.headdim, kernel.spec.q): kernel.tile.v_stages for kernel in kernels
             if isinstance(kernel.spec, AttnSpec)}
    assert found[64, "qraw"] == 1 and {stages for key, stages in found.items() if key != (64, "qraw")} == {None}


def test_kernels_of_a_linear_p_have_all_but_that_of_their_twins():
    kernels = {kernel.spec: kernel for kernel in read_matrix(ROOT / "build_matrix.yaml", ROOT / "templates").kernels}
    linear = [spec for spec in kernels if isinstance(spec, AttnSpec) and spec.p == "linear"]
    assert {(spec.arch, spec.headdim) for spec in linear} == {
        ("sm90", 64), ("sm90", 128), *product(("sm89", "sm120"), (64, 128, 256))}
    for spec in linear:
        own, twin = kernels[spec], kernels[replace(spec, p="exp2")]
        if (spec.arch, spec.headdim) == ("sm120", 64):  # whose exponentials take three blocks an SM
            own = replace(own, tile=own.tile._replace(min_blocks=3), allowed_spill_bytes=twin.allowed_spill_bytes,
                          row=twin.row)
        assert replace(own, spec=twin.spec) == twin


def test_backward_kernels_by_wgmma_are_compiled_for_the_target_that_has_it():
    matrix = read_matrix(ROOT / "build_matrix.yaml", ROOT / "templates")
    suffixes = {(kernel.spec.kind, kernel.spec.arch): kernel.suffix for kernel in matrix.kernels
                if kernel.spec.kind in BACKWARD and kernel.spec.arch in ("sm89", "sm90")}
    assert suffixes == {(kind, arch): "a" if arch == "sm90" and kind != "bwdprep" else ""
                        for kind in BACKWARD for arch in ("sm89", "sm90")}


def test_every_kernel_fits_every_gpu_that_may_take_it():
    """A GPU takes kernels of an older chip where a wheel was narrowed: sm80's on 8.6, and PTX anywhere. The choice does
    not look at shared memory, so every such GPU must have what the kernels need. The build checks only their own
    chip."""
    matrix = read_matrix(ROOT / "build_matrix.yaml", ROOT / "templates")
    blocks = {capability_of(arch): most for arch, most in matrix.shared_bytes.items() if not is_ptx(arch)}
    excessive, judged = [], 0
    for kernel in matrix.kernels:
        if kernel.spec.kind == "attn":
            taken = record_of(kernel.spec, kernel.tile, kernel.family,
                              target=target_of(kernel.spec.arch) + kernel.suffix)
            judged += sum(taken.serves(capability) for capability in blocks)
            excessive += [f"{kernel.spec.name} on {capability}" for capability, most in blocks.items()
                          if taken.serves(capability) and taken.fact("shared_bytes") > most]
    assert judged > len(matrix.kernels)
    assert not excessive


def test_a_combination_that_no_kernel_can_compute_is_one_sentence_when_its_exclusion_goes(tmp_path):
    """FP8 products of sm90 with sums in f32 alone: rows of 'tiles' cover them, but too few bits are kept."""
    text = (ROOT / "build_matrix.yaml").read_text()
    path = tmp_path / "build_matrix.yaml"
    path.write_text(text.replace("{arch: [sm89, sm90], pv: e4m3, pv_accum", "{arch: sm89, pv: e4m3, pv_accum"))
    with pytest.raises(MatrixError) as error:
        read_matrix(path, ROOT / "templates")
    kernels = {AttnSpec("sm90", headdim, "int8", "e4m3", "f32", p, mask, v, q).name for headdim, p, mask, v, q in
               product(*(AXES[axis] for axis in ("headdim", "p", "mask", "v", "q")))
               if (headdim, p) != (256, "linear")}
    assert {problem.split(": ", 1)[1] for problem in error.value.problems} == {
        f"expected an exclusion of {name}, got tiles: accumulators of FP8 products keep 13 mantissa bits before sm120, "
        "too few without a second level" for name in kernels}
    assert len(error.value.problems) == len(kernels)


def test_selection_takes_companions_along(matrix):
    selected = Selection(("sm90",), ("sage_attn_*_d64_*_full_*_qraw",)).kernels(matrix)
    assert [kernel.spec.name for kernel in selected] == [
        "sage_attn_sm90_d64_qkint8_pvf16_accf32_full_vraw_qraw", "sage_merge_sm90", "sage_pack_sm90",
        "sage_quant_sm90_d64_qkint8_pvf16"]
    smoothed = Selection(("sm90",), ("sage_attn_*_d64_*_full_*_qsmooth",)).kernels(matrix)
    assert [kernel.spec.kind for kernel in smoothed] == ["attn", "delta", "merge", "pack", "quant"]
    # the matrix has no sparse masks
    assert {kernel.spec.kind for kernel in Selection().kernels(matrix)} == set(KINDS) - {
        "lists", *SELECTION, *OF_BACKWARD}
    assert len(Selection(patterns=("*quant*sm80_d64*",)).kernels(matrix)) == 1


@pytest.mark.parametrize("selection, parts", [
    (Selection(archs=("sm90", "sm75")), ("sm80, sm86, sm89, sm90", "'sm75'")),
    (Selection(patterns=("*d64*", "*d96*")), ("'*d96*'", "python -m codegen list")),
])
def test_selection_of_nothing_lists_what_there_is(matrix, selection, parts):
    with pytest.raises(UsageError) as error:
        selection.kernels(matrix)
    assert all(part in str(error.value) for part in parts)
