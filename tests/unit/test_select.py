"""Kernels that a problem gets on a GPU."""

from __future__ import annotations

import dataclasses
from itertools import product

import pytest
import torch
from records import STRUCTS, manifest_of, record_of

from sage_aot._backends.loader import KERNEL_FOLDER
from sage_aot._kernels.axes import AXES
from sage_aot._kernels.manifest import KernelRecord, Manifest, records_by_name
from sage_aot._kernels.spec import AttnSpec
from sage_aot._launch import choose
from sage_aot._launch.choose import (
    Gpu,
    built_archs,
    candidates,
    choose_arch,
    kernels_of,
    nearest_arch,
    unsupported,
    wanted_values,
)
from sage_aot._problem.check import check
from sage_aot._problem.given import Given
from sage_aot._problem.options import Options
from sage_aot._problem.problem import Problem
from sage_aot.errors import CubinError, UnsupportedError

F16 = [("f16", "f32", "exp2")]
PV = {"sm80": F16, "sm86": F16, "sm90": F16,
      "sm89": [("e4m3", "two_level_f16", "exp2"), ("e4m3", "two_level_f32", "exp2")]}
"""Per arch, the types of P and V that are built, with their accumulators, and how P follows from a score."""
LINEAR = {"sm90": [("e4m3", accumulator, p) for accumulator in ("two_level_f16", "two_level_f32")
                   for p in ("exp2", "linear")]}
"""Types of P and V, with their accumulators, and how P follows from a score, where a call leaves two axes open."""
PROBLEM = Problem(batch=1, num_q_heads=2, num_kv_heads=2, seqlen_q=64, seqlen_kv=64, headdim=128, dtype="bf16",
                  softmax_scale=1.0, options=Options().resolved)


def changed(*, headdim=128, **options):
    return dataclasses.replace(PROBLEM, headdim=headdim, options=Options(**options).resolved)


def manifest(archs=PV, without=(), targets=None):
    """A manifest with kernels of these archs, which may be PTX. `targets`: per arch, a target instead of its own."""
    attn = [AttnSpec(arch, headdim, qk, *pv, mask, v, q)
            for arch, headdim, qk, mask, v, q in product(archs, (64, 128, 256), ("int8", "int4"), ("full", "causal"),
                                                         ("vraw", "vsmooth"), ("qraw", "qsmooth"))
            if arch != "sm90" or qk == "int8"
            for pv in (archs[arch] if isinstance(archs, dict) else PV.get(arch, F16))]
    kinds = ("pack", "quant", "delta", "merge")
    specs = {spec for a in attn for spec in (a, *map(a.companion, kinds))}
    return manifest_of(record_of(spec, **{"target": targets[spec.arch]} if spec.arch in (targets or {}) else {})
                       for spec in specs if spec.name not in without)


def select(gpu, problem, built):
    """The kernels that a call chooses: the arch by the GPU, then the kernels by the problem."""
    return kernels_of(nearest_arch(gpu, built), wanted_values(problem), built)


def in_order(records, built):
    return dataclasses.replace(built, kernels=records_by_name(records))


@pytest.mark.parametrize(("capability", "arch"), [
    ((8, 0), "sm80"), ((8, 6), "sm86"), ((8, 8), "sm86"), ((8, 9), "sm89"), ((9, 0), "sm90"),
])
def test_arch_is_exact_or_the_nearest_lower_minor(capability, arch):
    assert nearest_arch(Gpu(capability), manifest()) == arch


@pytest.mark.parametrize(("capability", "remedy"), [
    ((7, 5), "On GPUs before 8.0 call torch"), ((10, 0), "Look for a newer sage-aot"), ((12, 0), "Look for")])
def test_other_majors_are_refused_by_name(capability, remedy):
    message = (rf"no kernels for this GPU \(Some GPU, compute capability {capability[0]}\.{capability[1]}, driver for "
               rf"CUDA 12\.9\)\. There are sm80: machine code for compute capability 8\.0 and later 8\.x except 8\.7; "
               rf"sm86: .*{remedy}")
    gpu, built = Gpu(capability, 12090, "Some GPU"), manifest()
    with pytest.raises(UnsupportedError, match=message) as refused:
        nearest_arch(gpu, built)
    assert str(refused.value) == unsupported(gpu, built)
    assert refused.value.reasons == choose_arch(gpu, built).reasons


def test_a_lower_gpu_than_any_built_is_refused():
    with pytest.raises(UnsupportedError, match="sm86: machine code for compute capability 8.6 and later 8.x except"):
        nearest_arch(Gpu((8, 0)), manifest(archs=["sm86"]))


# --- PTX, suffixes, drivers -------------------------------------------------------------------------------------------


PTX = {**PV, "ptx80": F16}


@pytest.mark.parametrize(("capability", "arch"), [
    ((8, 0), "sm80"), ((8, 7), "ptx80"), ((8, 8), "sm86"), ((9, 0), "sm90"), ((10, 0), "ptx80"), ((12, 1), "ptx80"),
    ((13, 0), "ptx80")])
def test_ptx_is_for_gpus_without_machine_code(capability, arch):
    assert nearest_arch(Gpu(capability), manifest(PTX)) == arch
    assert select(Gpu(capability), PROBLEM, manifest(PTX)).attn.spec.arch == arch


def test_ptx_is_for_a_gpu_that_a_narrowed_build_left_out():
    assert nearest_arch(Gpu((8, 0)), manifest(["ptx80", "sm90"])) == "ptx80"
    with pytest.raises(UnsupportedError, match="ptx80: PTX for compute capability 8.0 and later"):
        nearest_arch(Gpu((7, 5)), manifest(["ptx80"]))


def test_of_several_ptx_the_newest_that_a_gpu_takes():
    several = manifest({**PTX, "ptx90": F16})
    assert nearest_arch(Gpu((10, 0)), several) == "ptx90"
    assert choose_arch(Gpu((10, 0)), several).reasons["ptx80"] == "ptx90 is nearer"


def of_one_chip(archs=PV):
    """sm90 as it is built: for compute capability 9.0 alone."""
    return manifest(archs, targets={"sm90": "sm_90a"})


def test_code_for_one_chip_is_for_no_other():
    assert nearest_arch(Gpu((9, 0)), of_one_chip()) == "sm90"
    with pytest.raises(UnsupportedError, match=r"compute capability 9\.1\).* sm90: machine code for compute capability "
                                               r"9\.0\."):
        nearest_arch(Gpu((9, 1)), of_one_chip())
    assert nearest_arch(Gpu((9, 1)), of_one_chip(PTX)) == "ptx80"
    assert nearest_arch(Gpu((9, 1)), manifest()) == "sm90"


@pytest.mark.parametrize(("cuda", "arch"), [(None, "sm80"), (12000, "sm80"), (12090, "sm80"), (13000, "sm80")])
def test_a_driver_at_its_floor_is_enough(cuda, arch):
    assert nearest_arch(Gpu((8, 0), cuda), manifest(PTX)) == arch


def test_a_driver_below_the_floor_is_refused_before_anything_is_loaded():
    message = (r"no kernels for this GPU \(compute capability 12\.0, driver for CUDA 12\.8\)\. .*ptx80: it needs a "
               r"driver from 575 on \(CUDA 12\.9\), this one is for CUDA 12\.8; .*\. Update the driver, at least to "
               r"575$")
    with pytest.raises(UnsupportedError, match=message):
        nearest_arch(Gpu((12, 0), 12080), manifest(PTX))
    assert nearest_arch(Gpu((12, 0), 12090), manifest(PTX)) == "ptx80"
    with pytest.raises(UnsupportedError, match="sm80: it needs a driver from 525 on .*Update the driver, .* to 525"):
        nearest_arch(Gpu((8, 9), 11080), manifest(PTX))


# --- candidates -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("capability", [(8, 0), (8, 8), (8, 9), (9, 0), (12, 0), (7, 5)])
@pytest.mark.parametrize("changes", [{}, {"qk": "int4", "smooth_q": True}, {"pv_accum": "two_level_f16"},
                                     {"is_causal": True, "headdim": 33}], ids=str)
def test_candidates_are_every_kernel_and_the_one_taken_is_that_of_the_call(capability, changes):
    gpu, problem, built = Gpu(capability), changed(**changes), manifest(PTX)
    found = candidates(choose_arch(gpu, built), problem, built)
    assert sorted(c.record.name for c in found) == sorted(record.name for record in built.every_attention())
    assert all(candidate.reason for candidate in found)
    taken = [candidate.record for candidate in found if candidate.taken]
    try:
        assert taken == [select(gpu, problem, built).attn] == [found[0].record]
    except UnsupportedError:
        assert taken == []


def reasons(gpu, problem, built):
    return {c.record.name: c.reason for c in candidates(choose_arch(gpu, built), problem, built)}


def test_reasons_are_those_of_the_choice():
    found = reasons(Gpu((8, 9), 12080), PROBLEM, manifest({**PTX, "sm120": PV["sm89"]}))
    name = "sage_attn_{}_d128_qkint8_{}_{}_vraw_qraw".format
    assert found[name("sm89", "pve4m3_acc2f32", "full")] == "sm89 is this GPU's own"
    assert found[name("sm89", "pve4m3_acc2f16", "full")] == (
        "for pv_accum='two_level_f16', on request: 'auto' takes pv_accum='two_level_f32'")
    assert found[name("sm89", "pve4m3_acc2f32", "causal")] == "for is_causal=True"
    other = found["sage_attn_sm89_d64_qkint4_pve4m3_acc2f32_full_vsmooth_qraw"]
    assert other == "for headdim=64, qk='int4', smooth_v=True"
    assert found[name("sm86", "pvf16_accf32", "full")] == "sm89 is nearer"
    assert found[name("sm120", "pve4m3_acc2f32", "full")] == "machine code for compute capability 12.0 and later 12.x"
    assert found[name("ptx80", "pvf16_accf32", "full")] == (
        "it needs a driver from 575 on (CUDA 12.9), this one is for CUDA 12.8")
    assert reasons(Gpu((8, 9)), PROBLEM, manifest(PTX))[name("ptx80", "pvf16_accf32", "full")] == (
        "sm89 is machine code for this GPU")
    assert reasons(Gpu((8, 8)), PROBLEM, manifest())[name("sm86", "pvf16_accf32", "full")] == (
        "sm86 is the nearest that this GPU runs")
    assert reasons(Gpu((12, 0)), PROBLEM, manifest(PTX))[name("ptx80", "pvf16_accf32", "full")] == (
        "no machine code is for this GPU, and the driver compiles PTX for it")


def test_a_reason_names_every_axis_that_the_call_leaves_open():
    first, other = AXES["p"]
    found = {(c.record.spec.pv_accum, c.record.spec.p): c.reason for c in candidates(
        choose_arch(Gpu((9, 0)), manifest(LINEAR)), PROBLEM, manifest(LINEAR)) if not c.differing}
    assert found == {
        ("two_level_f32", first): "sm90 is this GPU's own",
        ("two_level_f32", other): f"for p={other!r}, on request: 'auto' takes p={first!r}",
        ("two_level_f16", first):
            "for pv_accum='two_level_f16', on request: 'auto' takes pv_accum='two_level_f32'",
        ("two_level_f16", other): f"for pv_accum='two_level_f16', p={other!r}, on request: 'auto' takes "
                                  f"pv_accum='two_level_f32', p={first!r}"}


def test_kernels_of_an_arch_need_no_gpu_of_it():
    chosen = kernels_of("sm86", wanted_values(PROBLEM), manifest(PTX))
    assert [record.spec.arch for record in chosen.records] == ["sm86"] * 3


# --- the kernel -------------------------------------------------------------------------------------------------------


def test_archs_are_ordered_by_capability():
    newest = record_of(AttnSpec("sm120", 64, "int8", "e4m3", "two_level_f32", "exp2", "full", "vraw", "qraw"))
    several = in_order([newest, *manifest(PTX).kernels.values()], manifest(PTX))
    assert several.attention_archs == ["ptx80", "sm80", "sm86", "sm89", "sm90", "sm120"]
    assert built_archs(several) == several.attention_archs[1:]


@pytest.mark.parametrize(("headdim", "kernel"), [(1, 64), (64, 64), (65, 128), (128, 128), (129, 256), (256, 256)])
def test_head_dim_is_the_least_that_holds_the_problem(headdim, kernel):
    chosen = select(Gpu((8, 9)), changed(headdim=headdim), manifest())
    assert chosen.attn.spec == AttnSpec("sm89", kernel, "int8", "e4m3", "two_level_f32", "exp2", "full", "vraw", "qraw")
    assert chosen["quant"].spec == chosen.attn.spec.companion("quant")
    smoothed = select(Gpu((8, 9)), changed(headdim=headdim, smooth_q=True), manifest())
    assert smoothed.attn.spec == dataclasses.replace(chosen.attn.spec, q="qsmooth")
    assert smoothed["delta"].spec == chosen.attn.spec.companion("delta")


@pytest.mark.parametrize(("changes", "axes"), [
    ({"is_causal": True}, {"mask": "causal"}),
    ({"qk": "int4", "smooth_q": False}, {"qk": "int4"}),
    ({"qk": "int4"}, {"qk": "int4", "q": "qsmooth"}),
    ({"smooth_q": True}, {"q": "qsmooth"}),
    ({"smooth_v": True}, {"v": "vsmooth"}),
    ({"smooth_k": False}, {}),
    ({"qk": "int4", "smooth_q": True, "smooth_v": True}, {"qk": "int4", "q": "qsmooth", "v": "vsmooth"}),
])
def test_axes_are_those_of_the_problem(changes, axes):
    plain = AttnSpec("sm80", 128, "int8", "f16", "f32", "exp2", "full", "vraw", "qraw")
    chosen = select(Gpu((8, 0)), changed(**changes), manifest())
    assert chosen.attn.spec == dataclasses.replace(plain, **axes)
    assert chosen["quant"].spec.qk == chosen.attn.spec.qk


@pytest.mark.parametrize(("capability", "asked", "accumulator"), [
    ((8, 0), "auto", "f32"), ((8, 6), "auto", "f32"), ((8, 9), "auto", "two_level_f32"), ((9, 0), "auto", "f32"),
    ((8, 0), "f32", "f32"), ((8, 9), "two_level_f32", "two_level_f32"), ((8, 9), "two_level_f16", "two_level_f16"),
])
def test_the_accumulator_is_the_one_asked_for_or_the_archs_first(capability, asked, accumulator):
    chosen = select(Gpu(capability), changed(pv_accum=asked), manifest())
    assert chosen.attn.spec.pv_accum == accumulator
    assert chosen["quant"].spec == chosen.attn.spec.companion("quant")


def test_the_order_of_the_manifest_does_not_choose_the_accumulator():
    backwards = in_order(reversed(list(manifest().kernels.values())), manifest())
    assert select(Gpu((8, 9)), PROBLEM, backwards).attn.spec == select(Gpu((8, 9)), PROBLEM, manifest()).attn.spec


@pytest.mark.parametrize(("capability", "arch", "asked", "instead"), [
    ((8, 0), "sm80", "two_level_f16", "f32"), ((9, 0), "sm90", "two_level_f32", "f32"),
    ((8, 9), "sm89", "f32", "two_level_f32"),
])
def test_accumulators_that_an_arch_lacks_are_refused(capability, arch, asked, instead):
    message = f"no kernel for {arch}, head dim 128, .*pv_accum='{asked}'; use pv_accum='{instead}'\\. This folder holds"
    with pytest.raises(UnsupportedError, match=message):
        select(Gpu(capability), changed(pv_accum=asked), manifest())


@pytest.mark.parametrize("asked", ["auto", "exp2", "linear"])
def test_p_is_as_asked_for_or_the_first_that_the_arch_has(asked):
    assert select(Gpu((9, 0)), changed(p=asked), manifest(LINEAR)).attn.spec.p == (
        AXES["p"][0] if asked == "auto" else asked)
    if asked != "linear":
        assert select(Gpu((8, 9)), changed(p=asked), manifest()).attn.spec.p == "exp2"


def test_a_linear_p_that_an_arch_lacks_is_refused():
    with pytest.raises(UnsupportedError, match="no kernel for sm89, head dim 128, .*p='linear'; use p='exp2'\\. This"):
        select(Gpu((8, 9)), changed(p="linear"), manifest())


@pytest.mark.parametrize("asked", ["auto", "exp2", "linear"])
def test_a_call_that_is_trained_has_exponentials(asked):
    """Every kernel takes exponentials with a log-sum-exp, as here; backward kernels are those of such a kernel."""
    like = torch.zeros(1, 1, 2, 64, dtype=torch.bfloat16)
    problem = check(Given("train", like, like, like), Options(p=asked))
    chosen = select(Gpu((9, 0)), problem, manifest(LINEAR)).attn.spec
    assert (chosen.p, chosen.trains) == ("exp2", True)


def without_smooth_k(*archs):
    """A manifest in which the quantizers of some archs take a struct of their own, which lacks the field `smooth_k`."""
    built, layout = manifest(), STRUCTS["QuantParams"]
    fields = {name: field for name, field in layout.fields.items() if name != "smooth_k"}
    prefixes = tuple(f"sage_quant_{arch}_" for arch in archs)
    records = [dataclasses.replace(record, params="OwnParams") if record.name.startswith(prefixes) else record
               for record in built.kernels.values()]
    return dataclasses.replace(in_order(records, built),
                               structs={**STRUCTS, "OwnParams": layout._replace(fields=fields)})


def test_an_option_that_kernels_do_not_take_at_run_time_is_refused():
    built, asked = without_smooth_k("sm80"), changed(smooth_k=False)
    with pytest.raises(UnsupportedError, match="no kernel for sm80, .*, smooth_k=False; use smooth_k=True\\. This"):
        select(Gpu((8, 0)), asked, built)
    assert select(Gpu((8, 0)), PROBLEM, built).attn == select(Gpu((8, 0)), PROBLEM, manifest()).attn
    assert select(Gpu((8, 6)), asked, built).attn == select(Gpu((8, 6)), asked, manifest()).attn
    found = candidates(choose_arch(Gpu((8, 0)), built), asked, built)
    assert not any(candidate.taken for candidate in found)
    assert (found[0].reason, found[0].differing) == ("for smooth_k=True", ("smooth_k",))


def test_of_an_option_that_is_part_of_the_problem_no_other_value_is_advised(monkeypatch):
    monkeypatch.setattr(choose, "_FIXED", {*choose._FIXED, "smooth_k"})
    with pytest.raises(UnsupportedError, match="smooth_k=False, nor with any other options"):
        select(Gpu((8, 0)), changed(smooth_k=False), without_smooth_k("sm80"))


def test_the_delta_kernel_is_chosen_only_where_q_is_smoothed():
    for built in (manifest(), manifest(without=["sage_delta_sm80_d128"])):
        assert list(select(Gpu((8, 0)), PROBLEM, built).companions) == ["quant", "merge"]
    smoothed = select(Gpu((8, 0)), changed(smooth_q=True), manifest())
    assert list(smoothed.companions) == ["quant", "delta", "merge"]
    assert smoothed["delta"].name == "sage_delta_sm80_d128"
    assert smoothed.records == (smoothed["quant"], smoothed["delta"], smoothed.attn, smoothed["merge"])


def test_companions_are_those_that_the_record_names():
    """The record's companions count, not those that the kernel's name suggests."""
    built, plain = manifest(), select(Gpu((8, 6)), PROBLEM, manifest()).attn
    companions = ("sage_delta_sm80_d128", "sage_quant_sm80_d128_qkint8_pvf16")
    in_the_order_of_a_call = (*companions[::-1], plain.name)
    other = in_order([*built.kernels.values(), dataclasses.replace(plain, companions=companions)], built)
    assert tuple(record.name for record in select(Gpu((8, 6)), PROBLEM, other).records) == in_the_order_of_a_call


@pytest.mark.parametrize("changes", [{}, {"smooth_q": True}, {"smooth_v": True, "is_causal": True}])
def test_bits_that_an_arch_lacks_are_refused_in_the_words_of_the_call(changes):
    message = "no kernel for sm90, head dim 128, is_causal=.*qk='int4'.*; use qk='int8'\\. This folder holds what was"
    with pytest.raises(UnsupportedError, match=message):
        select(Gpu((9, 0)), changed(**{"qk": "int4", "smooth_q": False, **changes}), manifest())


@pytest.mark.parametrize(("left", "changes"), [("d64", {"headdim": 65}), ("causal", {}), ("d64", {"qk": "int4"})])
def test_a_narrowed_build_says_so(left, changes):
    """The message proposes no other head dim or mask: these would be another problem."""
    narrowed = in_order([record for name, record in manifest().kernels.items() if f"_{left}_" in name], manifest())
    with pytest.raises(UnsupportedError, match="nor with any other options. This folder holds what was built"):
        select(Gpu((8, 9)), changed(**changes), narrowed)


@pytest.mark.parametrize("kind", ["quant", "delta", "merge"])
def test_a_missing_companion_is_an_incomplete_folder(kind):
    name = AttnSpec("sm90", 128, "int8", "f16", "f32", "exp2", "full", "vraw", "qsmooth").companion(kind).name
    with pytest.raises(CubinError, match=f"but not {name}"):
        select(Gpu((9, 0)), changed(smooth_q=True), manifest(without=[name]))


def test_choosing_an_arch_makes_objects_of_one_record_an_arch():
    """The first call of a process must not turn all records into objects."""
    manifest = Manifest.read(KERNEL_FOLDER)
    assert nearest_arch(Gpu((9, 0), 13000), manifest) == "sm90"
    made = [name for name, row in manifest.kernels._rows.items() if isinstance(row, KernelRecord)]
    assert len(made) == len(manifest.attention_archs) < len(manifest.kernels)
