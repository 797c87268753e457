"""manifest.json: written and read back, sealed, and which GPUs a file serves."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import pytest
from records import manifest_of, record_of

from sage_aot._kernels.manifest import FILE_NAME, FORMAT, AttnRecord, KernelRecord, MainLoop, Manifest, sealed_text
from sage_aot._kernels.spec import AttnSpec, DeltaSpec

ATTN = AttnSpec("sm80", 64, "int8", "f16", "f32", "exp2", "full", "vraw", "qraw")
PTX = AttnSpec("ptx80", 64, "int8", "f16", "f32", "exp2", "full", "vraw", "qraw")
MANIFEST = manifest_of([
    record_of(ATTN, opcodes={"HMMA.16816.F32": 256}, main_loop=MainLoop(192, 513, 420)),
    record_of(DeltaSpec("sm80", 64)), record_of(DeltaSpec("sm90", 64)), record_of(PTX)])


@pytest.fixture
def folder(tmp_path):
    (tmp_path / FILE_NAME).write_bytes(MANIFEST.to_text().encode())
    return tmp_path


def test_what_is_written_is_read_back(folder):
    found = Manifest.read(folder)
    assert dict(found.kernels) == dict(MANIFEST.kernels)
    assert {name: value for name, value in vars(found).items() if name != "kernels"} == {
        name: value for name, value in vars(MANIFEST).items() if name != "kernels"}
    assert found.to_text() == MANIFEST.to_text()
    values = json.loads(MANIFEST.to_text())
    assert [record["spec"] for record in values["kernels"]] == sorted(MANIFEST.kernels)
    serves = {record["spec"]: record["serves"] for record in values["kernels"]}
    assert serves[ATTN.name] == "8.0 and later 8.x except 8.7"
    assert values["archs"]["sm80"] == {"capability": [8, 0], "least_driver": 525, "run_on": None}
    assert values["structs"]["AttnParams"]["fields"]["lse"] == ["Q", 88]
    assert values["structs"]["AttnParams"]["size"] == 312
    assert MANIFEST.compiler == "nvrtc 12.9.86"


def test_a_record_is_made_when_it_is_asked_for_and_only_once(folder):
    kernels = Manifest.read(folder).kernels
    rows = dict(kernels._rows)
    record = kernels[ATTN.name]
    assert record == MANIFEST.kernels[ATTN.name] and kernels[ATTN.name] is record
    assert [name for name, row in kernels._rows.items() if row is not rows[name]] == [ATTN.name]
    assert list(kernels) == sorted(kernels) and len(kernels) == 4
    with pytest.raises(KeyError):
        kernels["sage_delta_sm75_d64"]


def test_what_a_record_is_of_a_kind(folder):
    kernels: Mapping[str, Any] = Manifest.read(folder).kernels
    assert {type(kernels[spec.name]) for spec in (ATTN, PTX)} == {AttnRecord}
    assert type(kernels["sage_delta_sm80_d64"]) is KernelRecord
    assert kernels[ATTN.name].main_loop == MainLoop(192, 513, 420)
    assert (kernels[PTX.name].machine, kernels[PTX.name].main_loop) == (None, None)
    assert kernels[ATTN.name].fact("threads") == 128 and type(kernels[ATTN.name].fact("threads")) is int


def test_attention_kernels_are_found_by_arch():
    other = dataclasses.replace(ATTN, arch="sm100")
    manifest = manifest_of(map(record_of, (other, ATTN, PTX, dataclasses.replace(ATTN, mask="causal"),
                                           DeltaSpec("sm90", 64))))
    assert [record.spec.mask for record in manifest.attention("sm80")] == ["causal", "full"]
    assert manifest.attention("sm10") == manifest.attention("sm90") == ()
    assert manifest.attention_archs == ["ptx80", "sm80", "sm100"]
    assert len(manifest.every_attention()) == 4


def test_every_byte_is_sealed(folder):
    """A manifest is refused, whichever byte is changed, added or missing."""
    good = MANIFEST.to_text().encode()
    assert good.endswith(b'"\n}\n')
    for i in range(0, len(good), 7):
        before, behind = good[:i], good[i + 1:]
        for bad in (before + bytes([good[i] ^ 1]) + behind, before + behind, before + b" " + good[i:]):
            (folder / FILE_NAME).write_bytes(bad)
            with pytest.raises(ValueError, match="is not a manifest of this version of sage_aot"):
                Manifest.read(folder)
    (folder / FILE_NAME).write_bytes(good + b"\n")
    with pytest.raises(ValueError, match="it was edited or damaged"):
        Manifest.read(folder)


def test_a_manifest_that_is_nested_too_deeply_is_refused(folder):
    (folder / FILE_NAME).write_bytes(b"[" * 100000)
    with pytest.raises(ValueError, match="is not a manifest of this version of sage_aot: maximum recursion depth"):
        Manifest.read(folder)


@pytest.mark.parametrize(("edit", "message"), [
    (lambda values: values.update(format=FORMAT - 1), f"expected format {FORMAT}, got {FORMAT - 1}"),
    (lambda values: values.pop("structs"), "structs"),
    (lambda values: values.update(surprise=1), "surprise"),
    (lambda values: values["archs"]["sm80"].pop("run_on"), "run_on"),
    (lambda values: values["structs"]["AttnParams"].pop("size"), "size"),
    (lambda values: values["structs"]["AttnParams"]["fields"].update(lse=["Q"]), "unpack"),
    (lambda values: values["kernels"][0].pop("spec"), "spec"),
])
def test_a_sealed_manifest_of_another_form_is_refused(folder, edit, message):
    values = json.loads(MANIFEST.to_text())
    values.pop("sha256")
    edit(values)
    (folder / FILE_NAME).write_bytes(sealed_text(values).encode())
    with pytest.raises(ValueError, match=f"is not a manifest of this version of sage_aot: .*{message}"):
        Manifest.read(folder)


@pytest.mark.parametrize(("target", "words", "served", "refused"), [
    ("sm_80", "8.0 and later 8.x except 8.7", [(8, 0), (8, 6), (8, 9)], [(7, 5), (8, 7), (9, 0), (12, 0)]),
    ("sm_86", "8.6 and later 8.x except 8.7", [(8, 6), (8, 9)], [(8, 0), (8, 7), (9, 0)]),
    ("sm_87", "8.7", [(8, 7)], [(8, 6), (8, 9), (9, 0)]),
    ("sm_89", "8.9 and later 8.x", [(8, 9)], [(8, 7), (9, 0)]),
    ("sm_100", "10.0 and later 10.x except 10.1", [(10, 0), (10, 3)], [(10, 1), (11, 0), (9, 0)]),
    ("sm_90", "9.0 and later 9.x", [(9, 0)], [(8, 9), (10, 0)]),
    ("sm_90a", "9.0", [(9, 0)], [(9, 1), (8, 9), (10, 0)]),
    ("sm_120", "12.0 and later 12.x", [(12, 0), (12, 1)], [(11, 0), (10, 0), (9, 0)]),
    ("sm_120f", "12.0 and later 12.x", [(12, 0), (12, 1)], [(11, 0), (10, 0), (9, 0), (13, 0)]),
    ("compute_80", "8.0 and later", [(8, 0), (8, 7), (9, 0), (10, 3), (11, 0), (13, 0)], [(7, 5)]),
])
def test_which_gpus_a_file_serves(target, words, served, refused):
    record = record_of(ATTN, target=target)
    assert record.served == words
    assert all(record.serves(capability) for capability in served)
    assert not any(record.serves(capability) for capability in refused)


def test_an_unknown_target_is_refused():
    with pytest.raises(ValueError, match="expected a target such as 'sm_89', got 'sm_120x'"):
        record_of(ATTN, target="sm_120x").serves((12, 0))
