"""Manifests for tests: what a test is not about has a value here."""

from __future__ import annotations

from collections.abc import Iterable

from sage_aot._manifest import Arch, KernelRecord, Manifest
from sage_aot._params import FIELDS, STRUCT_OF, layout_digest, offsets
from sage_aot._spec import KernelSpec, Tile, capability_of, is_ptx, target_of
from sage_aot._version import __version__

TILE = Tile(128, 64, 32, 2, 2)


def record_of(spec: KernelSpec, **changes: object) -> KernelRecord:
    """A kernel's record."""
    ptx = is_ptx(spec.arch)
    values = {
        "file": f"{spec.name}.{'ptx' if ptx else 'cubin'}", "sha256": "", "target": target_of(spec.arch),
        "tile": TILE if spec.kind in ("attn", "quant") else None, "threads": 128 if spec.kind == "attn" else 256,
        "shared_bytes": 0, "registers": None if ptx else 40, "spill_bytes": None if ptx else 0, "opcodes": {},
        "main_loop": None, "params": STRUCT_OF[spec.kind], "compiler": "nvrtc 12.9.86", "source_sha256": "",
        "elf_abi": None if ptx else 7, "least_driver": 575 if ptx else 525}
    return KernelRecord(spec, **{**values, **changes})


def manifest_of(records: Iterable[KernelRecord], **changes: object) -> Manifest:
    """The manifest of some kernels; of the archs only sm90 was run."""
    kernels = {record.spec.name: record for record in records}
    archs = {record.spec.arch: Arch(capability_of(record.spec.arch), record.least_driver,
                                    "NVIDIA H200" if record.spec.arch == "sm90" else None)
             for record in kernels.values()}
    values = {"version": __version__, "flags": ("-x",), "structs": layout_digest(),
              "layouts": {name: offsets(name) for name in FIELDS}, "retarget": None, "complete": True, "archs": archs}
    return Manifest(kernels=kernels, **{**values, **changes})
