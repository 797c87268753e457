"""``manifest.json``: what each file in a kernel folder is. Written by codegen, read by the runtime; stdlib only."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path

from sage_aot._spec import KernelSpec, Tile

FILE_NAME = "manifest.json"
FORMAT = 5
"""Raised by every change that an older reader would misunderstand."""


@dataclass(frozen=True)
class MainLoop:
    """Instructions of one turn of an attention kernel's loop over the full tiles; codegen/census.py says which."""

    matrix: int  # of the tensor cores
    other: int  # beside them on the straight path
    rare: int  # off the straight path, in branches


_TARGET = re.compile(r"(sm|compute)_(\d+)(\d)(a?)")

_TEGRA = ((8, 7), (10, 1), (11, 0))
"""Orin, and Thor by the number that it had before CUDA 13 and the one since: chips that run no other chip's machine code
by NVIDIA's word, and whose own no other runs."""


@dataclass(frozen=True)
class KernelRecord:
    """One cubin or PTX file: what it computes, how it is launched, what the compiler made of it.

    PTX becomes machine code in the user's driver, so what only machine code has is None or empty for it.
    """

    spec: KernelSpec
    file: str  # relative to the manifest; .cubin or .ptx
    sha256: str  # of the file, lower-case hex
    target: str  # what the file is for, as the compiler spells it: "sm_80", "sm_90a", of PTX "compute_80"
    tile: Tile | None  # None for the statistics kernels, which know no tiles
    threads: int  # of a block
    shared_bytes: int  # dynamic shared memory of a block
    registers: int | None  # of a thread
    spill_bytes: int | None  # stores and loads that the compiler spilt to local memory
    opcodes: dict[str, int]  # tensor-core instructions of the whole kernel: {"IMMA.16832.S8.S8": 128, ...}; PTX's own
    main_loop: MainLoop | None  # of an attention kernel
    params: str  # name of the struct that the kernel takes by value; Manifest.layouts has its fields
    compiler: str  # name and full version: "nvrtc 12.9.86"
    source_sha256: str  # of all the compiler was given: source, headers, target, flags
    elf_abi: int | None  # ABI version in the cubin's header: 7, or 8 of newer chips and compilers
    least_driver: int  # the first that loads the file: 525

    @property
    def is_ptx(self) -> bool:
        return self.file.endswith(".ptx")

    def serves(self, capability: tuple[int, int]) -> bool:
        """Whether a GPU of this compute capability can run the file: PTX, by the driver's compiler, from its own on;
        a cubin on its own and later minors of the same major; with the suffix `a`, or for Tegra, on its own alone.

        Source: CUDA C++ programming guide, "Binary compatibility" and "Application compatibility".
        """
        kind, own, suffix = read_target(self.target)
        if kind == "compute":
            return capability >= own
        if suffix or capability in _TEGRA or own in _TEGRA:
            return capability == own
        return capability >= own and capability[0] == own[0]

    @property
    def served(self) -> str:
        """The compute capabilities that it serves, in words."""
        kind, own, suffix = read_target(self.target)
        major, minor = own
        if kind == "compute":
            return f"{major}.{minor} and later"
        if suffix or own in _TEGRA:
            return f"{major}.{minor}"
        apart = [f"{other}.{of_other}" for other, of_other in _TEGRA if other == major and of_other > minor]
        return f"{major}.{minor} and later {major}.x" + (f" except {', '.join(apart)}" if apart else "")

    def to_json(self) -> dict:
        return {**asdict(self), "spec": self.spec.name, "serves": self.served}

    @classmethod
    def from_json(cls, values: dict) -> KernelRecord:
        tile, loop = values["tile"], values["main_loop"]
        fields = {name: value for name, value in values.items() if name != "serves"}
        return cls(**{**fields, "spec": KernelSpec.from_name(values["spec"]), "tile": Tile(**tile) if tile else None,
                      "main_loop": MainLoop(**loop) if loop else None})


def read_target(target: str) -> tuple[str, tuple[int, int], str]:
    """``"sm_90a"`` → ``("sm", (9, 0), "a")``; ValueError where it is no target."""
    match = _TARGET.fullmatch(target)
    if match is None:
        raise ValueError(f"expected a target such as 'sm_89', got {target!r}")
    return match[1], (int(match[2]), int(match[3])), match[4]


@dataclass(frozen=True)
class Arch:
    """An arch that a folder has kernels for."""

    capability: tuple[int, int]
    least_driver: int  # the first that loads its kernels
    run_on: str | None  # GPU that ran its files as they are; None where they were not run on hardware


@dataclass(frozen=True)
class Manifest:
    """Every kernel of one folder, by name."""

    version: str  # of sage_aot
    flags: tuple[str, ...]  # given to the compiler, less target and include folders
    structs: str  # sage_aot._params.layout_digest() of the structs that the kernels take
    layouts: dict[str, dict[str, int]]  # sage_aot._params.offsets() of each of them
    retarget: str | None  # chip that every kernel was built for in place of its own; such folders are for tests
    complete: bool  # False where the build was narrowed, and other kernels could have been made
    archs: dict[str, Arch]
    kernels: dict[str, KernelRecord]

    @property
    def compiler(self) -> str:
        """Of all kernels: "nvrtc 12.9.86"."""
        return ", ".join(sorted({record.compiler for record in self.kernels.values()}))

    def to_text(self) -> str:
        """The file's text; the same kernels always give the same bytes."""
        values = {**asdict(self), "kernels": [record.to_json() for _, record in sorted(self.kernels.items())]}
        return sealed_text({"format": FORMAT, **values})

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Read a folder's manifest. OSError where it is missing, ValueError where it is not one of this format."""
        try:
            text = (folder / FILE_NAME).read_bytes().decode()
            values = json.loads(text)
            found = values.pop("format")
            if found != FORMAT:
                raise ValueError(f"expected format {FORMAT}, got {found}")
            _check_seal(text, values.pop("sha256"))
            records = [KernelRecord.from_json(record) for record in values["kernels"]]
            archs = {name: Arch(**{**arch, "capability": tuple(arch["capability"])})
                     for name, arch in values["archs"].items()}
            return cls(**{**values, "flags": tuple(values["flags"]), "archs": archs,
                          "kernels": {record.spec.name: record for record in records}})
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"{folder / FILE_NAME} is not a manifest of this version of sage_aot: {error}") from error


def sealed_text(values: dict) -> str:
    """Values as the text of a manifest, whose last entry is the sha256 of all bytes before it.

    It tells a manifest that was edited or damaged; one that was forged is told by the wheel's own signature.
    """
    body = json.dumps(values, indent=1).removesuffix("\n}") + ",\n"
    return f'{body}{_seal(body)}'


def _seal(body: str) -> str:
    return f' "sha256": "{hashlib.sha256(body.encode()).hexdigest()}"\n}}\n'


def _check_seal(text: str, said: str) -> None:
    seal = _seal(text[:text.rindex(' "sha256"')])
    if not text.endswith(seal):
        raise ValueError(f"expected it to end in{seal.rstrip()[:-1].rstrip()}, got {said!r}: it was edited or damaged")
