"""``manifest.json``: what each file in a kernel folder is. Written by codegen, read by the runtime; stdlib only."""

from __future__ import annotations

import hashlib
import json
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple
from zipfile import BadZipFile

from sage_aot._kernels.spec import AttnSpec, KernelSpec, capability_of, is_ptx, spec_of
from sage_aot._kernels.tile import Tile
from sage_aot.errors import CubinError

if TYPE_CHECKING:
    from importlib.abc import Traversable

FILE_NAME = "manifest.json"
FORMAT = 12
"""Version of the format; every change that an older reader would misunderstand takes the next number."""

SUFFIXES = "a", "f"
"""Suffixes of a target whose instructions not every later chip has. "a": the chip alone has them. "f": the later chips
of its family, which has its major version, have them too. Source: PTX ISA, ".target"."""

_TARGET = re.compile(rf"(sm|compute)_(\d+)(\d)([{''.join(SUFFIXES)}]?)")

_TEGRA = ((8, 7), (10, 1), (11, 0))
"""Compute capabilities of Tegra: Orin, then Thor before CUDA 13 (10.1) and since (11.0). By NVIDIA's documentation
these chips run no other chip's machine code, and no other chip runs theirs."""


class MainLoop(NamedTuple):
    """Instructions of one iteration of an attention kernel's loop over the full tiles; codegen/census.py says which."""

    matrix: int  # of the tensor cores
    other: int  # the others on the straight path
    rare: int  # off the straight path, in branches


class MachineCode(NamedTuple):
    """Figures of a cubin's machine code. PTX has none: the user's driver compiles it."""

    registers: int  # of a thread
    spill_bytes: int  # stores and loads that the compiler spilt to local memory
    elf_abi: int  # ABI version in the cubin's ELF header: 7; 8 for newer chips and compilers


class Struct(NamedTuple):
    """A struct that kernels take by value, as their compiler laid it out."""

    size: int  # bytes
    fields: dict[str, tuple[str, int]]  # by name: a character for the type (kernel_info.cuh) and the offset in bytes


@dataclass(frozen=True)
class KernelRecord:
    """One cubin or PTX file: what it computes, how it is launched, what the compiler made of it."""

    spec: KernelSpec
    family: str  # instruction family: a key of sage_aot._families.FAMILIES
    file: str  # relative to the manifest; .cubin or .ptx
    sha256: str  # of the file, lower-case hex
    target: str  # what the file is for, as the compiler spells it: "sm_80", "sm_90a", of PTX "compute_80"
    least_driver: int  # first branch of the driver that loads the file: 525
    params: str  # name of the struct that the kernel takes by value: a key of Manifest.structs
    facts: dict[str, float]  # what the kernel says of itself, kernel_info.cuh: threads, shared_bytes, ...
    opcodes: dict[str, int]  # tensor-core instructions of the whole kernel, of SASS or PTX: {"IMMA.16832.S8.S8": 128}
    machine: MachineCode | None  # None for PTX
    compiler: str  # name and full version: "nvrtc 12.9.86"
    source_sha256: str  # of what the compiler was given, less comments: source, headers, target, flags

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def is_ptx(self) -> bool:
        return self.file.endswith(".ptx")

    def fact(self, name: str) -> int:
        """A fact that is a whole number."""
        return int(self.facts[name])

    @property
    def programmatic_launch(self) -> bool:
        """True where the kernel itself waits for the grids in front of it, by griddepcontrol.wait. It may then be
        launched before they end."""
        return bool(self.facts.get("programmatic_launch", 0))

    def serves(self, capability: tuple[int, int]) -> bool:
        """True where a GPU of this compute capability can run the file. PTX runs on its target's capability and all
        later ones. A cubin runs on its target's capability and on later minors of the same major, with the suffix `f`
        too; with the suffix `a`, or for Tegra, on its target's alone.

        Source: CUDA C++ programming guide, "Binary compatibility" and "Application compatibility".
        """
        kind, own, suffix = read_target(self.target)
        if kind == "compute":
            return capability >= own
        if capability in _TEGRA or own in _TEGRA:
            return capability == own
        return runs(suffix, own, capability)

    @property
    def served(self) -> str:
        """The compute capabilities that the file serves, in words."""
        kind, own, suffix = read_target(self.target)
        major, minor = own
        if kind == "compute":
            return f"{major}.{minor} and later"
        if suffix == "a" or own in _TEGRA:
            return f"{major}.{minor}"
        apart = [f"{other}.{of_other}" for other, of_other in _TEGRA if other == major and of_other > minor]
        return f"{major}.{minor} and later {major}.x" + (f" except {', '.join(apart)}" if apart else "")

    def to_json(self) -> dict[str, Any]:
        values = {"spec": self.name, "serves": self.served, **vars(self)}
        return {**values, "spec": self.name, "machine": self.machine and self.machine._asdict()}


@dataclass(frozen=True)
class AttnRecord(KernelRecord):
    """An attention kernel."""

    spec: AttnSpec
    tile: Tile
    companions: tuple[str, ...]  # names of the other kernels of its calls, in the order in which they run
    main_loop: MainLoop | None  # None for PTX, and for a kernel that was built for another chip and has none

    def to_json(self) -> dict[str, Any]:
        return {**super().to_json(), "tile": self.tile._asdict(), "companions": list(self.companions),
                "main_loop": self.main_loop and self.main_loop._asdict()}


def _record(values: Mapping[str, Any]) -> KernelRecord:
    """The record that :meth:`KernelRecord.to_json` wrote."""
    spec, machine = spec_of(values["spec"]), values["machine"]
    fields = {name: value for name, value in values.items() if name != "serves"}
    fields |= {"spec": spec, "machine": MachineCode(**machine) if machine else None}
    if not isinstance(spec, AttnSpec):
        return KernelRecord(**fields)
    loop = values["main_loop"]
    return AttnRecord(**{**fields, "tile": Tile(**values["tile"]), "companions": tuple(values["companions"]),
                         "main_loop": MainLoop(**loop) if loop else None})


def runs(suffix: str, own: tuple[int, int], capability: tuple[int, int]) -> bool:
    """True where a chip has the instructions of another, those that a target's suffix stands for among them."""
    return capability == own if suffix == "a" else capability >= own and capability[0] == own[0]


def read_target(target: str) -> tuple[str, tuple[int, int], str]:
    """``"sm_90a"`` → ``("sm", (9, 0), "a")``; ValueError where it is no target."""
    match = _TARGET.fullmatch(target)
    if match is None:
        raise ValueError(f"expected a target such as 'sm_89', got {target!r}")
    return match[1], (int(match[2]), int(match[3])), match[4]


class Arch(NamedTuple):
    """An arch that a folder has kernels for."""

    capability: tuple[int, int]
    least_driver: int  # first branch of the driver that loads the arch's kernels
    run_on: str | None  # GPU on which these very files ran; None where no GPU ran them


class Records(Mapping[str, KernelRecord]):
    """Records by name. Each is made when it is first asked for: a call needs few records, of one arch."""

    def __init__(self, rows: Mapping[str, KernelRecord | Mapping[str, Any]]) -> None:
        self._rows = dict(sorted(rows.items()))

    def __getitem__(self, name: str) -> KernelRecord:
        row = self._rows[name]
        if not isinstance(row, KernelRecord):
            try:
                row = self._rows[name] = _record(row)
            except (KeyError, TypeError, ValueError) as error:
                raise CubinError(f"the manifest's entry of {name} is not one of this sage_aot ({error!r}); rebuild the "
                                 f"kernel folder with `python -m codegen build`, or reinstall sage-aot") from error
        return row

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __repr__(self) -> str:
        return f"<{len(self)} kernels>"


@dataclass(frozen=True, eq=False)
class Manifest:
    """Every kernel of one folder."""

    version: str  # of sage_aot
    flags: tuple[str, ...]  # given to the compiler, less target and include folders
    retarget: str | None  # target that every kernel was built for instead of its own; such folders are for tests
    vocabulary: str  # sage_aot._launch.structs.vocabulary() when the kernels were built
    complete: bool  # False where the build left out kernels that the matrix has
    archs: dict[str, Arch]
    structs: dict[str, Struct]  # by the name of the struct
    kernels: Records  # by name

    @property
    def compiler(self) -> str:
        """Name and version of the kernels' compiler: "nvrtc 12.9.86"."""
        return ", ".join(sorted({record.compiler for record in self.kernels.values()}))

    def attention(self, arch: str) -> tuple[AttnRecord, ...]:
        """An arch's attention kernels, by name."""
        prefix = f"sage_attn_{arch}_"
        return tuple(record for record in map(self.kernels.__getitem__, self._names(prefix))
                     if isinstance(record, AttnRecord))

    def any_attention(self, arch: str) -> KernelRecord:
        """One of an arch's attention kernels. All of them share target and least driver."""
        return self.kernels[self._names(f"sage_attn_{arch}_")[0]]

    def every_attention(self) -> tuple[AttnRecord, ...]:
        """Every attention kernel, by name."""
        return tuple(record for record in self.kernels.values() if isinstance(record, AttnRecord))

    @cached_property
    def attention_archs(self) -> list[str]:
        """Every arch that has attention kernels: PTX, then machine code, each oldest first."""
        return sorted({name.split("_")[2] for name in self._names("sage_attn_")}, key=arch_rank)

    def _names(self, prefix: str) -> list[str]:
        return [name for name in self.kernels if name.startswith(prefix)]

    def to_text(self) -> str:
        """The file's text; the same kernels always give the same bytes."""
        return sealed_text({
            "format": FORMAT, "version": self.version, "flags": self.flags, "retarget": self.retarget,
            "vocabulary": self.vocabulary, "complete": self.complete,
            "archs": {name: arch._asdict() for name, arch in self.archs.items()},
            "structs": {name: layout._asdict() for name, layout in sorted(self.structs.items())},
            "kernels": [record.to_json() for record in self.kernels.values()]})

    @classmethod
    def read(cls, folder: Traversable) -> Manifest:
        """Read a folder's manifest. OSError where it is missing, ValueError where it is not one of this format."""
        try:
            text = (folder / FILE_NAME).read_bytes().decode()
            values = json.loads(text)
            found = values.pop("format")
            if found != FORMAT:
                raise ValueError(f"expected format {FORMAT}, got {found}")
            _check_seal(text, values.pop("sha256"))
            return cls(**{**values, "flags": tuple(values["flags"]), "archs": _archs(values["archs"]),
                          "structs": _structs(values["structs"]),
                          "kernels": Records({row["spec"]: row for row in values["kernels"]})})
        except (KeyError, TypeError, AttributeError, ValueError, RecursionError, BadZipFile, zlib.error) as error:
            raise ValueError(f"{folder / FILE_NAME} is not a manifest of this version of sage_aot: {error}") from error


def arch_rank(arch: str) -> tuple[bool, tuple[int, int]]:
    """A key to sort archs by. Of the archs that a GPU runs, take the one with the highest rank."""
    return not is_ptx(arch), capability_of(arch)


def records_by_name(records: Iterable[KernelRecord]) -> Records:
    return Records({record.name: record for record in records})


def sealed_text(values: dict[str, Any]) -> str:
    """Values as the text of a manifest, whose last entry is the sha256 of all bytes before it.

    The sha256 shows that a manifest was edited or damaged. It does not show a forgery, which can have a new sha256.
    """
    body = json.dumps(values, indent=1).removesuffix("\n}") + ",\n"
    return f'{body}{_seal(body)}'


def _archs(values: Mapping[str, Any]) -> dict[str, Arch]:
    return {name: Arch(**{**arch, "capability": tuple(arch["capability"])}) for name, arch in values.items()}


def _structs(values: Mapping[str, Any]) -> dict[str, Struct]:
    return {name: Struct(layout["size"], {field: (code, offset) for field, (code, offset) in layout["fields"].items()})
            for name, layout in values.items()}


def _seal(body: str) -> str:
    return f' "sha256": "{hashlib.sha256(body.encode()).hexdigest()}"\n}}\n'


def _check_seal(text: str, said: str) -> None:
    seal = _seal(text[:text.rindex(' "sha256"')])
    if not text.endswith(seal):
        raise ValueError(f"expected it to end in{seal.rstrip()[:-1].rstrip()}, got {said!r}: it was edited or damaged")
