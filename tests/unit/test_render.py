"""Templates → sources: strict about names, deterministic, and no file touched without need."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from codegen.errors import BuildError
from codegen.matrix import read_matrix
from codegen.project import ROOT
from codegen.render import CONTEXT, Renderer, context, cpp, render_all, source_path

REAL = read_matrix(ROOT / "build_matrix.yaml", ROOT / "templates")
TEMPLATES = sorted({(kernel.spec.kind, kernel.how.template) for kernel in REAL.kernels})


@pytest.fixture
def attn(matrix):
    name = "sage_attn_sm89_d128_qkint8_pve4m3_acc2f32_causal_vraw_qraw"
    return next(kernel for kernel in matrix.kernels if kernel.spec.name == name)


@pytest.mark.parametrize("value, spelt", [
    (True, "true"), (False, "false"), (128, "128"), (-1, "-1"), ("Pv::kF16", "Pv::kF16"), ("kF16", "kF16"),
])
def test_cpp_spells(value, spelt):
    assert cpp(value) == spelt


@pytest.mark.parametrize("value", [1.0, None, "", "two words", "1st", "a::", "::a", "a:b", "é", "aé", "x;", "x\n", [1]])
def test_cpp_refuses(value):
    with pytest.raises(TypeError, match="expected a bool, an int or a C\\+\\+ name"):
        cpp(value)


@pytest.mark.parametrize("kind, template", TEMPLATES)
def test_templates_use_exactly_the_names_of_their_kind(kind, template):
    assert Renderer(ROOT / "templates").variable_problems(kind, template) == []


@pytest.mark.parametrize("kernel", REAL.kernels, ids=lambda kernel: kernel.spec.name)
def test_real_sources_name_kernel_template_and_row(kernel):
    text = Renderer(ROOT / "templates").render(kernel)
    assert [text.count(f"\n{entry}(const __grid_constant__") for entry in kernel.spec.entries] == [1] * len(
        kernel.spec.entries)
    assert all(part in text for part in (kernel.spec.name, f"templates/{kernel.how.template}", kernel.row))
    assert str(ROOT) not in text
    assert text.endswith("\n")


def test_values_reach_their_names(attn):
    assert context(attn) == {
        "name": "sage_attn_sm89_d128_qkint8_pve4m3_acc2f32_causal_vraw_qraw", "template": "attn_mma.cu.jinja",
        "row": "{family: mma, arch: sm89, headdim: 128, pv: e4m3}", "headdim": 128, "qk": "Qk::kInt8",
        "pv": "Pv::kE4m3", "pv_accum": "PvAccum::kTwoLevelF32", "p": "P::kExp2", "mask": "Mask::kCausal",
        "smooth_v": False, "smooth_q": False,
        "block_m": 128, "block_n": 64, "warp_m": 32, "stages": 2, "v_stages": 2, "min_blocks": 2,
    }


def test_a_quantizer_has_the_blocks_of_its_family_and_not_of_its_tile(matrix):
    quant, = (kernel for kernel in matrix.kernels if kernel.spec.name == "sage_quant_sm80_d64_qkint8_pvf16")
    assert (quant.tile.min_blocks, context(quant)["min_blocks"]) == (3, 2)


def test_smoothing_reaches_its_name(attn):
    smoothed = replace(attn, spec=replace(attn.spec, q="qsmooth", v="vsmooth", qk="int4"))
    values = context(smoothed)
    assert (values["smooth_q"], values["smooth_v"], values["qk"]) == (True, True, "Qk::kInt4")


@pytest.mark.parametrize(("accumulator", "spelt"), [
    ("f32", "PvAccum::kF32"), ("two_level_f32", "PvAccum::kTwoLevelF32"), ("two_level_f16", "PvAccum::kTwoLevelF16")])
def test_the_accumulator_reaches_its_name(attn, accumulator, spelt):
    kernel = replace(attn, spec=replace(attn.spec, pv_accum=accumulator))
    assert context(kernel)["pv_accum"] == spelt
    assert spelt in Renderer(ROOT / "templates").render(kernel)
    assert re.search(rf"\b{spelt.split('::')[1]}\b", (ROOT / "templates/include/sage/types.cuh").read_text())


@pytest.mark.parametrize(("p", "spelt"), [("exp2", "P::kExp2"), ("linear", "P::kLinear")])
def test_how_p_follows_from_a_score_reaches_its_name(attn, p, spelt):
    kernel = replace(attn, spec=replace(attn.spec, p=p))
    assert context(kernel)["p"] == spelt
    assert spelt in Renderer(ROOT / "templates").render(kernel)
    assert re.search(rf"enum class P {{.*\b{spelt.split('::')[1]}\b", (
        ROOT / "templates/include/sage/types.cuh").read_text())


def test_quantizers_of_a_family_that_bounds_scores_leave_norms_of_keys():
    found = {(kernel.family, context(kernel)["key_norms"]) for kernel in REAL.kernels if kernel.spec.kind == "quant"}
    assert found == {("mma", False), ("wgmma", True)}


def test_each_kind_gets_its_names(matrix):
    for kernel in matrix.kernels:
        assert tuple(context(kernel)) == CONTEXT[kernel.spec.kind]


def test_variable_problems_name_both_directions(project, edit):
    edit(project.templates / "attn_mma.cu.jinja", "{{ stages | cpp }}", "{{ stagse | cpp }}")
    assert Renderer(project.templates).variable_problems("attn", "attn_mma.cu.jinja") == [
        "templates/attn_mma.cu.jinja: expected a name given to attn templates, got 'stagse'",
        "templates/attn_mma.cu.jinja: expected 'stages' to be used, as attn templates are given it",
    ]


@pytest.mark.parametrize("old, new, message", [
    ("{{ stages | cpp }}", "{{ stagse }}", "'stagse' is undefined"),
    ("{{ stages | cpp }}", "{{ stagse | cpp }}", "'stagse' is undefined"),
    ("{{ stages | cpp }}", "{% if stagse %}1{% endif %}", "'stagse' is undefined"),
    ("{{ stages | cpp }}", "{{ 1.5 | cpp }}", "got 1.5"),
    ("{{ stages | cpp }}", "{{ stages | cppp }}", "cppp"),
    ("{{ stages | cpp }}", "{%0 }", "templates/attn_mma.cu.jinja"),
])
def test_a_template_that_does_not_render_is_named(project, edit, attn, old, new, message):
    edit(project.templates / "attn_mma.cu.jinja", old, new)
    with pytest.raises(BuildError) as error:
        Renderer(project.templates).render(attn)
    assert "templates/attn_mma.cu.jinja" in str(error.value)
    assert message in str(error.value)


def test_blocks_leave_no_blank_lines_and_the_last_newline_stays(project, attn):
    (project.templates / "attn_mma.cu.jinja").write_text("a\n  {% if headdim %}\nb < c\n  {% endif %}\nd\n")
    assert Renderer(project.templates).render(attn) == "a\nb < c\nd\n"


def test_rendering_is_deterministic_and_writes_only_changes(project, matrix, edit):
    render_all(matrix.kernels, matrix, project)
    first = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in project.sources.iterdir()}
    assert {path.stem for path in first} == {kernel.spec.name for kernel in matrix.kernels}
    edit(project.templates / "delta_s.cu.jinja", "x[0] = kValue", "x[1] = kValue")
    render_all(reversed(matrix.kernels), matrix, project)
    for path, (data, time) in first.items():
        changed = path.name.startswith("sage_delta")
        assert (path.read_bytes() != data) == changed, path
        assert (path.stat().st_mtime_ns != time) == changed, path


def test_sources_that_left_the_matrix_go_and_unselected_ones_stay(project, matrix):
    render_all(matrix.kernels, matrix, project)
    stale = project.sources / "sage_attn_sm75_d64_qkint8_pvf16_accf32_full_vraw_qraw.cu"
    stale.write_text("")
    render_all(matrix.kernels[:1], matrix, project)
    assert not stale.exists()
    assert all(source_path(kernel, project).is_file() for kernel in matrix.kernels)
