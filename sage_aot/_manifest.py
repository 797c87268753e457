"""``manifest.json``: what each cubin in a kernel folder is. Written by codegen, read by the runtime; stdlib only."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from sage_aot._spec import KernelSpec, Tile

FILE_NAME = "manifest.json"
FORMAT = 4
"""Raised by every change that an older reader would misunderstand."""


@dataclass(frozen=True)
class MainLoop:
    """Instructions of one turn of an attention kernel's loop over the full tiles; codegen/census.py says which."""

    matrix: int  # of the tensor cores
    other: int  # beside them on the straight path
    rare: int  # off the straight path, in branches


@dataclass(frozen=True)
class KernelRecord:
    """One cubin: what it computes, how it is launched, what the compiler made of it."""

    spec: KernelSpec
    file: str  # relative to the manifest
    sha256: str  # of the cubin, lower-case hex
    target: str  # chip the cubin is for, as the compiler spells it: "sm_80"
    tile: Tile | None  # None for the statistics kernels, which know no tiles
    threads: int  # of a block
    shared_bytes: int  # dynamic shared memory of a block
    registers: int  # of a thread
    spill_bytes: int  # stores and loads that the compiler spilt to local memory
    opcodes: dict[str, int]  # tensor-core instructions of the whole kernel: {"IMMA.16832.S8.S8": 128, ...}
    main_loop: MainLoop | None  # of an attention kernel

    def to_json(self) -> dict:
        values = asdict(self)
        values["spec"] = self.spec.name
        return values

    @classmethod
    def from_json(cls, values: dict) -> KernelRecord:
        tile, loop = values["tile"], values["main_loop"]
        return cls(**{**values, "spec": KernelSpec.from_name(values["spec"]), "tile": Tile(**tile) if tile else None,
                      "main_loop": MainLoop(**loop) if loop else None})


@dataclass(frozen=True)
class Manifest:
    """Every kernel of one folder, by name."""

    version: str  # of sage_aot
    compiler: str  # "nvrtc 12.9.86"
    flags: tuple[str, ...]  # given to the compiler, less target and include folders
    structs: str  # sage_aot._params.layout_digest() of the structs that the kernels take
    retarget: str | None  # chip that every kernel was built for in place of its own; such folders are for tests
    kernels: dict[str, KernelRecord]

    def to_text(self) -> str:
        """The file's text; the same kernels always give the same bytes."""
        header = {"format": FORMAT, "version": self.version, "compiler": self.compiler, "flags": list(self.flags),
                  "structs": self.structs, "retarget": self.retarget}
        records = [record.to_json() for _, record in sorted(self.kernels.items())]
        return json.dumps({**header, "kernels": records}, indent=1) + "\n"

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Read a folder's manifest. OSError where it is missing, ValueError where it is not one of this format."""
        try:
            values = json.loads((folder / FILE_NAME).read_text())
            found = values.pop("format")
            if found != FORMAT:
                raise ValueError(f"format {found}, expected {FORMAT}")
            records = [KernelRecord.from_json(record) for record in values.pop("kernels")]
            return cls(**{**values, "flags": tuple(values["flags"])}, kernels={r.spec.name: r for r in records})
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"{folder / FILE_NAME} is not a manifest of this version of sage_aot: {error}") from error
