"""explain(): the choice that the call makes, with its reasons; and the warning about PTX, which comes once."""

from __future__ import annotations

import dataclasses
import re
import warnings
from types import SimpleNamespace

import pytest
import torch
from records import manifest_of, record_of
from torch._subclasses.fake_tensor import FakeTensorMode

import sage_aot
from sage_aot._backends.cuda import device as cuda_device
from sage_aot._backends.cuda.backend import CudaBackend
from sage_aot._backends.emulation.backend import EmulationBackend
from sage_aot._call.backends import default_library, handing
from sage_aot._kernels.axes import AXES
from sage_aot._kernels.spec import AttnSpec
from sage_aot._launch.choose import Gpu, nearest_arch
from sage_aot._tools import explain as explaining
from sage_aot.errors import ArgumentError, PtxWarning, UnsupportedError


def tensors(headdim=64, **options):
    return torch.zeros(3, 1, 2, 5, headdim, dtype=torch.bfloat16, **options).unbind(0)


def attn_spec(arch, pv="f16", accumulator="f32", **changes):
    return dataclasses.replace(AttnSpec(arch, 64, "int8", pv, accumulator, "exp2", "full", "vraw", "qraw"), **changes)


def small_manifest(*archs, **changes):
    attn = [attn_spec(arch, mask=mask) for arch in archs for mask in ("full", "causal")]
    specs = {spec for a in attn for spec in (a, *map(a.companion, ("pack", "quant", "merge")))}
    return manifest_of((record_of(spec) for spec in specs), **changes)


@pytest.fixture
def folder_of(monkeypatch, tmp_path):
    """Let explain() and the call see a manifest: the environment names its folder."""
    def install(manifest):
        (tmp_path / "manifest.json").write_bytes(manifest.to_text().encode())
        monkeypatch.setenv("SAGE_AOT_KERNELS", str(tmp_path))
        return default_library().manifest

    return install


# --- for whom ---------------------------------------------------------------------------------------------------------


@pytest.mark.kernels("sm80", "sm86", "sm89", "sm90")
@pytest.mark.parametrize(("capability", "arch"), [
    ((8, 0), "sm80"), ((8, 6), "sm86"), ((8, 9), "sm89"), ((9, 0), "sm90")])
def test_a_capability_needs_no_gpu_and_no_tensors(capability, arch):
    told = sage_aot.explain(capability=capability, headdim=100, is_causal=True)
    assert told.gpu == Gpu(capability) and told.error is None
    assert (told.kernels.attn.spec.arch, told.kernels.attn.spec.headdim) == (arch, 128)
    assert told.kernels.attn.spec.mask == "causal"
    assert told.candidates[0].taken and told.candidates[0].record == told.kernels.attn


def test_tensors_on_the_cpu_are_explained_as_emulated(monkeypatch):
    assert sage_aot.explain(*tensors()).kernels.attn.spec.arch == "sm89"
    monkeypatch.setenv("SAGE_AOT_EMULATE", "sm80")
    told = sage_aot.explain(*tensors(), qk="int4")
    assert told.gpu is None and told.kernels.attn.spec == attn_spec("sm80", qk="int4", q="qsmooth")
    assert "delta" in told.kernels.companions
    others = {c.reason for c in told.candidates if c.record.spec.arch != "sm80"}
    assert others == {"sm80 is what CPU tensors emulate; SAGE_AOT_EMULATE names another"}


@pytest.mark.kernels("sm80", "sm86", "sm89", "sm90")
def test_tensors_can_be_explained_for_another_gpu():
    assert sage_aot.explain(*tensors(), capability=(8, 6)).kernels.attn.spec.arch == "sm86"


def test_a_gpu_here_is_asked_for_its_capability_and_driver(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: ((7, 5), (8, 9))[device])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU {device}")
    found = SimpleNamespace(cuda=12080)
    for module in (cuda_device, explaining):
        monkeypatch.setattr(module, "default_driver", lambda: found)
    monkeypatch.setattr(explaining, "sm_count", lambda device: (40, 128)[device])
    assert sage_aot.explain(headdim=64).gpu == Gpu((8, 9), 12080, "GPU 1")
    assert sage_aot.explain(headdim=64, driver=535).gpu.cuda == 12020

    def missing():
        raise UnsupportedError("neither")

    for module in (cuda_device, explaining):
        monkeypatch.setattr(module, "default_driver", missing)
    told = sage_aot.explain(headdim=64)
    assert told.gpu.cuda is None and told.candidates[0].taken
    assert told.kernels is None and told.error == "neither"  # as the call would say
    assert sage_aot.explain(headdim=64, capability=(8, 9)).error is None


@pytest.mark.kernels("sm80", "sm86", "sm89", "sm90")
@pytest.mark.parametrize(("shape", "options", "splits"), [
    ((32, 1, 8192), {}, 16),  # four q heads are rows of one: 8 query tiles, not 32
    ((32, 1, 8192), {"is_causal": True}, 4),
    ((8, 1, 8192), {}, 16),
    ((32, 4096, 8192), {}, 1)])
def test_the_splits_of_a_gpu_here_are_told(monkeypatch, shape, options, splits):
    heads, queries, keys = shape
    monkeypatch.setattr(explaining, "_gpu", lambda *_: Gpu((9, 0), 13000, "H200"))
    monkeypatch.setattr(explaining, "default_driver", lambda: None)
    monkeypatch.setattr(explaining, "sm_count", lambda device: 132)
    with FakeTensorMode():
        q, k, v = (torch.empty(1, own, rows, 128, device="cuda:0", dtype=torch.float16)
                   for own, rows in ((heads, queries), (8, keys), (8, keys)))
        told = sage_aot.explain(q, k, v, **options)
    assert told.splits == splits and ("merge" in told.kernels.companions) == (splits > 1)
    assert (told.problem.num_q_heads, told.problem.seqlen_q) == (heads, queries)
    assert ("keys    are split over" in str(told)) == (splits > 1)


@pytest.mark.kernels("sm80", "sm86", "sm89", "sm90")
def test_a_call_with_lists_splits_no_keys(monkeypatch):
    monkeypatch.setattr(explaining, "_gpu", lambda *_: Gpu((9, 0), 13000, "H200"))
    monkeypatch.setattr(explaining, "default_driver", lambda: None)
    monkeypatch.setattr(explaining, "sm_count", lambda device: 132)
    with FakeTensorMode():
        q, k, v = (torch.empty(1, 2, rows, 128, device="cuda:0", dtype=torch.float16) for rows in (64, 8192, 8192))
        told = sage_aot.explain(q, k, v, attn_mask=torch.ones(64, 8192, dtype=torch.bool, device="cuda:0"))
    assert told.splits == 1 and "merge" not in told.kernels.companions


@pytest.mark.kernels("sm80", "sm86", "sm89", "sm90")
def test_without_tensors_the_splits_are_not_known(monkeypatch):
    monkeypatch.setattr(explaining, "_gpu", lambda *_: Gpu((9, 0), 13000, "H200"))
    monkeypatch.setattr(explaining, "default_driver", lambda: None)
    monkeypatch.setattr(explaining, "sm_count", lambda device: 132)
    monkeypatch.setattr(explaining, "_current_device", lambda: 0)
    told = sage_aot.explain(headdim=128)
    assert told.splits is None and "merge" in told.kernels.companions
    assert "keys    are split, and sage_merge_* runs, where the query tiles do not fill the GPU" in str(told)


def test_the_order_of_kinds(folder_of):
    """The GPU's own arch, a lower minor, PTX, and last an error with the call's message."""
    manifest = folder_of(small_manifest("sm80", "sm89", "ptx80"))
    for capability, arch in [((8, 9), "sm89"), ((8, 6), "sm80"), ((12, 0), "ptx80")]:
        assert sage_aot.explain(capability=capability, headdim=64).kernels.attn.spec.arch == arch
    refused = sage_aot.explain(capability=(12, 0), headdim=64, driver=570)
    assert refused.kernels is None and not any(candidate.taken for candidate in refused.candidates)
    with pytest.raises(UnsupportedError) as raised:
        nearest_arch(Gpu((12, 0), 12080), manifest)
    assert refused.error == str(raised.value)
    assert "ptx80: it needs a driver from 575 on" in refused.error


def test_what_the_call_would_raise_is_told():
    with pytest.raises(UnsupportedError) as raised:
        sage_aot.attn(*tensors(), pv_accum="f32")
    told = sage_aot.explain(*tensors(), pv_accum="f32")
    assert told.error == str(raised.value) and told.kernels is None
    assert told.candidates[0].differing == ("pv_accum",)


@pytest.mark.parametrize("changes", [{}, {"qk": "int4"}, {"smooth_v": True, "is_causal": True}, {"smooth_q": True},
                                     {"pv_accum": "two_level_f16"}, {"layout": "NHD", "scale": 0.3}], ids=str)
def test_what_is_told_is_what_runs(changes):
    bound = []

    class Remembering(EmulationBackend):
        def bind(self, plan, given, out):
            bound.append(plan)
            return super().bind(plan, given, out)

    told = sage_aot.explain(*tensors(), **changes)
    with handing(Remembering(default_library().manifest)):
        sage_aot.attn(*tensors(), **changes)
    assert [(plan.problem, plan.kernels) for plan in bound] == [(told.problem, told.kernels)]


# --- wrong arguments --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("arguments", "message"), [
    ({"capability": (8, 9)}, "headdim: expected an integer from 1 to 256 where no tensors are given, got None"),
    ({"capability": (8, 9), "headdim": 0}, "headdim: expected an integer from 1 to 256"),
    ({"capability": (8, 9), "headdim": 257}, "expected a head dim from 1 to 256, got 257"),
    ({"capability": 89, "headdim": 64}, r"capability: expected two integers such as \(8, 9\), got 89"),
    ({"capability": (8, 9.0), "headdim": 64}, "capability: expected two integers"),
    ({"capability": (8, 9), "headdim": 64, "driver": 12.4}, "driver: expected the branch of a driver, 525 or later"),
    ({"capability": (8, 9), "headdim": 64, "driver": 470}, "driver: expected the branch of a driver, 525 or later"),
    ({"capability": (8, 9), "headdim": 64, "qk": "int5"}, "qk: expected 'auto', 'int8', 'int4' or 'nvfp4', got 'int5'"),
    ({"capability": (8, 9), "headdim": 64, "return_lse": 1}, "return_lse: expected True or False, got 1"),
    ({"capability": (8, 9), "headdim": 64, "out": 3}, "out: expected a tensor like q, got int"),
    ({**dict(zip("qkv", tensors())), "headdim": 64}, "headdim: that of q holds, got 64 with tensors"),
    ({"q": tensors()[0]}, "k: expected a torch.Tensor, got NoneType"),
])
def test_wrong_arguments_are_refused(arguments, message):
    with pytest.raises(ArgumentError, match=message):
        sage_aot.explain(**arguments)


def test_nothing_to_explain_for_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ArgumentError, match=r"expected q, k and v, or capability=\(major, minor\)"):
        sage_aot.explain(headdim=64)


# --- the table --------------------------------------------------------------------------------------------------------


def test_the_table(folder_of):
    folder_of(small_manifest("sm80", "ptx80"))
    assert str(sage_aot.explain(capability=(8, 8), headdim=64, driver=535)) == """\
GPU     compute capability 8.8, driver for CUDA 12.2
call    headdim=64, is_causal=False, qk='int8', smooth_q=False, smooth_v=False, pv_accum='auto', p='auto', window=None
runs    sage_quant_sm80_d64_qkint8_pvf16
        sage_attn_sm80_d64_qkint8_pvf16_accf32_full_vraw_qraw
        sage_merge_sm80
note    the kernels of sm80 were not run on hardware, but simulated or rebuilt
keys    are split, and sage_merge_* runs, where the query tiles do not fill the GPU

taken   sage_attn_sm80_d64_qkint8_pvf16_accf32_full_vraw_qraw    sm80 is the nearest that this GPU runs
        sage_attn_sm80_d64_qkint8_pvf16_accf32_causal_vraw_qraw  for is_causal=True
        sage_attn_ptx80_* (2 kernels)                            it needs a driver from 575 on (CUDA 12.9), this one \
is for CUDA 12.2"""


@pytest.mark.kernels("sm90")
def test_the_reason_against_a_kernel_that_auto_does_not_take():
    first, other = AXES["p"]
    told = sage_aot.explain(capability=(9, 0), headdim=64)
    taken, next_one = told.candidates[:2]
    assert (taken.taken, taken.record.spec.p) == (True, first)
    assert (next_one.record.spec, next_one.differing) == (dataclasses.replace(taken.record.spec, p=other), ())
    assert f"{next_one.record.name}  for p={other!r}, on request: 'auto' takes p={first!r}\n" in re.sub(
        "  +", "  ", str(told))
    asked = sage_aot.explain(capability=(9, 0), headdim=64, p=other)
    assert asked.kernels.attn == next_one.record and asked.candidates[1].reason == f"for p={first!r}"


def test_the_table_of_every_arch_has_each_kernel_once():
    for capability in [(7, 5), (8, 0), (8, 9), (9, 0), (14, 0)]:
        told = sage_aot.explain(capability=capability, headdim=64)
        lines = str(told).splitlines()
        assert lines[1].startswith("call    headdim=64, ") and len(lines) < 60
        counted = sum(int(line.split("(")[1].split()[0]) if " kernels)" in line else 1
                      for line in lines[lines.index("") + 1:])
        assert counted == len(told.candidates)
        assert any(line.startswith("taken ") for line in lines) == (told.kernels is not None)


# --- PTX --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def on_a_new_gpu(monkeypatch):
    """A backend of a manifest, on a GPU newer than its kernels."""
    monkeypatch.setattr(cuda_device, "gpu_here",
                        lambda device, driver=None: Gpu((13, 0), 13000, f"NVIDIA X{device or ''}"))
    monkeypatch.delenv("SAGE_AOT_PTX_WARNING", raising=False)
    return lambda *archs: CudaBackend(SimpleNamespace(manifest=small_manifest(*archs), driver=None))


def test_ptx_is_announced_once_a_device(on_a_new_gpu):
    backend = on_a_new_gpu("sm80", "ptx80")
    message = (r"no machine code for this GPU \(NVIDIA X, compute capability 13.0, driver for CUDA 13.0\): the driver "
               r"compiles the PTX of ptx80, .*SAGE_AOT_PTX_WARNING=0 silences this")
    with pytest.warns(PtxWarning, match=message):
        assert backend.arch(0) == "ptx80"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert backend.arch(0) == "ptx80"
    with pytest.warns(PtxWarning, match="NVIDIA X1, "):
        assert backend.arch(1) == "ptx80"


def test_the_word_about_ptx_can_be_switched_off(on_a_new_gpu, monkeypatch):
    monkeypatch.setenv("SAGE_AOT_PTX_WARNING", "0")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert on_a_new_gpu("sm80", "ptx80").arch(0) == "ptx80"


def test_a_gpu_without_kernels_is_refused_by_name(on_a_new_gpu):
    with pytest.raises(UnsupportedError, match=r"no kernels for this GPU \(NVIDIA X, compute capability 13.0"):
        on_a_new_gpu("sm80").arch(0)


def test_an_arch_that_was_asked_for_is_asked_of_no_gpu(on_a_new_gpu):
    backend = on_a_new_gpu("sm80")
    assert CudaBackend(backend.library, "sm80").arch(0) == "sm80"


def test_a_missing_loader_is_named_before_the_gpu_is(on_a_new_gpu):
    class Without:
        manifest = small_manifest("sm80")

        @property
        def driver(self):
            raise UnsupportedError("neither cupy nor cuda-bindings")

    with pytest.raises(UnsupportedError, match="neither cupy nor cuda-bindings"):
        CudaBackend(Without()).arch(0)


def test_a_choice_of_blocks_is_explained_as_its_call():
    q, k, v = tensors()
    sparse = sage_aot.Sparse(keep=0.5)
    assert sage_aot.explain(q, k, v, sparse=sparse).kernels.attn.spec.mask == "sparse"
    assert "no kernel" in sage_aot.explain(q, k, v, sparse=sparse, qk="int4").error
    with pytest.raises(ArgumentError, match="sparse: expected a sage_aot.Sparse or None, got float"):
        sage_aot.explain(q, k, v, sparse=0.5)
    lengths = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), torch.tensor([0, 1], dtype=torch.int32))
    with pytest.raises(ArgumentError, match="sparse: expected None in a call of attn_varlen"):
        sage_aot.explain(q[0], k[0], v[0], sparse=sparse, max_seqlen_q=1, max_seqlen_k=1, **lengths)
    with pytest.raises(ArgumentError, match="sparse: expected None without q, k and v"):
        sage_aot.explain(headdim=64, sparse=sparse)
