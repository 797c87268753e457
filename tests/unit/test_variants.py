"""The kernels that the GPU tests run: the package's own where the GPU runs them, others where codegen can build
them."""

from __future__ import annotations

import pytest
import torch
import variants
from records import manifest_of, record_of

from sage_aot._call.backends import default_library
from sage_aot._kernels.spec import AttnSpec, DeltaSpec
from sage_aot._launch.choose import Gpu

ATTN = [AttnSpec(arch, 64, "int8", "f16", "f32", "exp2", "full", "vraw", "qraw") for arch in ("sm80", "sm90", "ptx80")]
MANIFEST = manifest_of([*map(record_of, ATTN), record_of(DeltaSpec("sm90", 64))])


@pytest.mark.parametrize(("gpu", "archs"), [
    (Gpu((8, 9), 13000), ["sm80", "ptx80"]), (Gpu((9, 0), 13000), ["sm90", "ptx80"]),
    (Gpu((9, 0), 12080), ["sm90"]), (Gpu((12, 0), 13000), ["ptx80"]), (Gpu((7, 5), 13000), []),
], ids=str)
def test_what_a_gpu_takes_runs_from_the_package(monkeypatch, gpu, archs):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(variants, "gpu_here", lambda device: gpu)
    assert variants.native_archs(MANIFEST) == set(archs)
    assert [spec.arch for spec in variants.variants_of(MANIFEST, set(archs), set(archs))] == sorted(archs)
    monkeypatch.setattr(variants, "_NATIVE", set(archs))
    assert all(variants.library_of.__wrapped__(arch) is default_library() for arch in archs)  # which remembers nothing


def test_without_a_gpu_every_variant_has_its_name(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    native = variants.native_archs(MANIFEST)
    assert variants.variants_of(MANIFEST, native, native) == tuple(sorted(ATTN, key=lambda s: s.name))


@pytest.mark.kernels("sm90", "sm120")
def test_kernels_with_instructions_of_another_chip_are_left_out():
    manifest = default_library().manifest
    found = variants.variants_of(manifest, {"sm90", "sm120"}, {"sm90"})
    assert {(spec.arch, spec.pv_accum) for spec in found} == {("sm90", "two_level_f32"), ("sm120", "two_level_f32")}
    assert not any(spec.qk == "nvfp4" for spec in found)
