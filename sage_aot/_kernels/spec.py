"""Specializations of kernels, and the names that spell them.

:class:`KernelSpec` and its subclasses, one per kind of kernel, are the only writers and readers of kernel names. Code
generation and the runtime share this module, so it imports the standard library only.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, ClassVar

from sage_aot._kernels.axes import AXES, HALVES, ROWS

MOST_TRAINED = 128
"""Most channels of a head that the backward kernels compute: more would not fit into the registers."""

_PREFIX = {"headdim": "d", "qk": "qk", "pv": "pv", "pv_accum": "acc", "p": "p"}
_SHORT: dict[int | str, str] = {"two_level_f32": "2f32", "two_level_f16": "2f16"}
_UNSPELT = {"p": "exp2"}
"""Value, by axis, for which a name has no part."""

_ARCH = re.compile(r"(sm|ptx)(\d+)(\d)")
_NAME = re.compile(r"sage_(?P<kind>[a-z]+)_(?P<axes>\w+)")
_EXAMPLE = "sage_attn_sm80_d128_qkint8_pvf16_accf32_full_vraw_qraw"


def capability_of(arch: str) -> tuple[int, int]:
    """Compute capability of an arch: ``"sm89"`` → ``(8, 9)``."""
    match = _ARCH.fullmatch(arch)
    if match is None:
        raise ValueError(f"expected an arch such as 'sm89', got {arch!r}")
    return int(match[2]), int(match[3])


def is_ptx(arch: str) -> bool:
    """True for an arch whose kernels are PTX, which a driver compiles, and not cubins."""
    return arch.startswith("ptx")


def target_of(arch: str) -> str:
    """An arch as compilers spell it: ``"sm89"`` → ``"sm_89"``, ``"ptx80"`` → ``"compute_80"``."""
    return "{}_{}{}".format("compute" if is_ptx(arch) else "sm", *capability_of(arch))


@dataclass(frozen=True)
class KernelSpec:
    """One specialized kernel. Each kind is a subclass, whose fields are the axes that the kind depends on."""

    kind: ClassVar[str]
    rows: ClassVar[tuple[str, ...]] = ()  # members of ROWS with an entry point each; empty where it reads no rows
    packed: ClassVar[tuple[bool, ...]] = (False,)  # True: for packed sequences or keys, with entry points of their own
    arch: str

    @classmethod
    def axes(cls) -> tuple[str, ...]:
        """The axes in the order of the name."""
        return tuple(field.name for field in fields(cls))

    @property
    def values(self) -> dict[str, int | str]:
        """The value of every axis."""
        return {axis: getattr(self, axis) for axis in self.axes()}

    @cached_property
    def name(self) -> str:
        """File stem, manifest key, test id and bench row of this kernel."""
        parts = [_spell(axis, value) for axis, value in self.values.items() if _UNSPELT.get(axis) != value]
        return "_".join(["sage", self.kind, *parts])

    @property
    def entries(self) -> tuple[str, ...]:
        """The entry points: one for each of :attr:`rows` and :attr:`packed`, or one with the kernel's name."""
        return tuple(self.entry(rows, packed) for packed in self.packed for rows in self.rows) or (self.name,)

    def entry(self, rows: str, packed: bool = False) -> str:
        """The entry point for a member of ROWS."""
        return f"{self.name}_{rows}{'_packed' if packed else ''}"

    def companion(self, kind: str) -> KernelSpec:
        """The kernel of another kind that runs in the same call: same values on the axes that both have."""
        values: dict[str, Any] = self.values
        other = KINDS[kind]
        missing = [axis for axis in other.axes() if axis not in values]
        if missing:
            raise ValueError(f"{self.name} does not determine {missing} of its {kind} kernel")
        return other(**{axis: values[axis] for axis in other.axes()})


@dataclass(frozen=True)
class PackSpec(KernelSpec):
    """The keys that a key mask leaves, numbered."""

    kind = "pack"


@dataclass(frozen=True)
class ListsSpec(KernelSpec):
    """The KV tiles that query tiles see, of a call with a boolean mask or a mask of blocks."""

    kind = "lists"


@dataclass(frozen=True)
class MergeSpec(KernelSpec):
    """The attention of a call whose keys are split over blocks."""

    kind = "merge"


@dataclass(frozen=True)
class DeltaSpec(KernelSpec):
    """delta_s, the term of the scores that smoothing Q takes off."""

    kind = "delta"
    rows = ROWS
    headdim: int


@dataclass(frozen=True)
class QuantSpec(KernelSpec):
    """Quantization of Q, K and V, and in a launch in front of it statistics of K and V."""

    kind = "quant"
    rows = ROWS
    headdim: int
    qk: str
    pv: str

    @property
    def entries(self) -> tuple[str, ...]:
        quantizers = super().entries
        return (*quantizers, *map(statistics_entry, quantizers))


@dataclass(frozen=True)
class AttnSpec(KernelSpec):
    """Attention on quantized inputs; depends on every axis."""

    kind = "attn"
    headdim: int
    qk: str
    pv: str
    pv_accum: str
    p: str
    mask: str
    v: str
    q: str

    @property
    def trains(self) -> bool:
        """True where the backward pass takes what this kernel read, and the log-sum-exp that it wrote."""
        plain = self.q == "qraw" and self.v == "vraw" and self.p == "exp2" and self.mask != "sparse"
        return self.qk == "int8" and plain and self.headdim <= MOST_TRAINED

    def impossible(self) -> str | None:
        """The reason why this arch has no such kernel, or None. The matrix may exclude more kernels, never fewer."""
        capability = capability_of(self.arch)
        if self.pv == "e4m3" and capability < (8, 9):
            return "no FP8 tensor cores before sm89"
        if "nvfp4" in (self.qk, self.pv) and capability < (12, 0):
            return "no NVFP4 in mma.sync before sm120"
        if self.qk == "int4" and capability >= (9, 0):
            return "no INT4 tensor cores from sm90 on"
        if self.pv == "nvfp4" and self.pv_accum != "f32":
            return "block-scaled products add up in f32 as they are, a second level would gain nothing"
        if self.pv == "f16" and self.pv_accum != "f32":
            return "f16 products add up in f32 as they are, a second level would gain nothing"
        if self.pv == "e4m3" and self.pv_accum == "f32" and capability < (12, 0):
            return "accumulators of FP8 products keep 13 mantissa bits before sm120, too few without a second level"
        return None


@dataclass(frozen=True)
class PoolSpec(KernelSpec):
    """Means of blocks of rows."""

    kind = "pool"
    rows = ROWS
    headdim: int


@dataclass(frozen=True)
class ChooseSpec(KernelSpec):
    """The blocks of keys that blocks of queries see, chosen by their means."""

    kind = "choose"
    headdim: int


@dataclass(frozen=True)
class BwdPrepSpec(KernelSpec):
    """The operands of the backward kernels in addition to the caller's tensors and what is saved, in the layouts of the
    attention kernel's quantizer."""

    kind = "bwdprep"
    rows = HALVES
    packed = False, True
    headdim: int
    qk: str
    pv: str


@dataclass(frozen=True)
class BwdKvSpec(KernelSpec):
    """The gradients of K and V."""

    kind = "bwdkv"
    rows = HALVES
    packed = False, True
    headdim: int


@dataclass(frozen=True)
class BwdQSpec(KernelSpec):
    """The gradient of Q."""

    kind = "bwdq"
    rows = HALVES
    packed = False, True
    headdim: int


@dataclass(frozen=True)
class BwdQkvSpec(KernelSpec):
    """The gradients of K and V, and sums of that of Q."""

    kind = "bwdqkv"
    rows = HALVES
    packed = False, True
    headdim: int


@dataclass(frozen=True)
class BwdSumSpec(KernelSpec):
    """The gradient of Q from its sums."""

    kind = "bwdsum"
    rows = HALVES
    packed = False, True
    headdim: int


KINDS: dict[str, type[KernelSpec]] = {spec.kind: spec for spec in (
    PoolSpec, ChooseSpec, PackSpec, ListsSpec, QuantSpec, DeltaSpec, AttnSpec, MergeSpec, BwdPrepSpec, BwdKvSpec,
    BwdQSpec, BwdQkvSpec, BwdSumSpec)}
"""Every kind of kernel, in the order in which a selection of blocks, a call, and its backward pass run them."""

SELECTION = ("pool", "choose")
"""The kinds that choose blocks of keys, for a later call with a mask of blocks."""

BACKWARD = ("bwdprep", "bwdkv", "bwdq")
"""The kinds of the backward pass in every family: two kernels find the gradients."""

BACKWARD_TOGETHER = ("bwdqkv", "bwdsum")
"""Kinds that replace bwdkv and bwdq where all gradients are asked for, in families that have them."""

OF_BACKWARD = (*BACKWARD, *BACKWARD_TOGETHER)
"""Every kind of the backward pass."""

IN_EVERY_FAMILY = ("pack", "quant", "attn", "merge")
"""The kinds that every family has. Every call runs quant and attn; pack runs where a call has a key mask, lists where
it has another boolean mask, delta where Q is smoothed, merge where keys are split (sage_aot/_launch/plan.py)."""


def statistics_entry(quantizer: str) -> str:
    """The entry point of the statistics that a quantizer's entry point reads."""
    return f"{quantizer}_statistics"


def spec_of(name: str) -> KernelSpec:
    """Read a kernel's name; ValueError where it is not one."""
    match = _NAME.fullmatch(name)
    kind = KINDS.get(match["kind"]) if match else None
    parts = match["axes"].split("_") if match else []
    spelt = [axis for axis in kind.axes() if axis not in _UNSPELT] if kind else []
    if kind and len(parts) > len(spelt):
        spelt = list(kind.axes())
    if kind is None or len(parts) != len(spelt):
        raise ValueError(f"expected a name such as {_EXAMPLE!r}, got {name!r}")
    values = _UNSPELT | {axis: _read(name, axis, part) for axis, part in zip(spelt, parts)}
    return kind(**{axis: values[axis] for axis in kind.axes()})  # type: ignore[arg-type]


def _spell(axis: str, value: int | str) -> str:
    return f"{_PREFIX.get(axis, '')}{_SHORT.get(value, value)}"


def _read(name: str, axis: str, part: str) -> int | str:
    """The value that one part of a kernel's name spells."""
    if axis == "arch":
        capability_of(part)
        return part
    spelt = {_spell(axis, value): value for value in AXES[axis] if _UNSPELT.get(axis) != value}
    if part not in spelt:
        raise ValueError(f"{name!r}: expected one of {sorted(spelt)} for the axis {axis!r}, got {part!r}")
    return spelt[part]
