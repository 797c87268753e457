"""What a kernel is specialized for, and how its name spells that.

:class:`KernelSpec` is the only writer and reader of kernel names and the only home of the rules that no matrix may
break. Code generation and the runtime share it, so it imports nothing but the standard library.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields

KINDS = ("attn", "quant", "stats", "delta")
"""Attention on quantized inputs; quantization of Q, K, V; statistics of K and V over the sequence; what smoothing Q
takes off the scores."""

AXES = {
    "headdim": (64, 128),
    "qk": (8, 4),
    "pv": ("f16", "e4m3"),
    "pv_accum": ("f32", "two_level_f32", "two_level_f16"),
    "mask": ("full", "causal"),
    "v": ("vraw", "vsmooth"),
    "q": ("qraw", "qsmooth"),
}
"""Every axis but the arch, with its values. Archs are open: any ``sm<major><minor>`` may stand in the matrix, and
``ptx<major><minor>``, PTX that a driver compiles for GPUs from that capability on."""

KIND_AXES = {
    "attn": ("arch", "headdim", "qk", "pv", "pv_accum", "mask", "v", "q"),
    "quant": ("arch", "headdim", "qk", "pv"),
    "stats": ("arch", "headdim"),
    "delta": ("arch", "headdim"),
}
"""The axes that a kind of kernel depends on."""

_PREFIX = {"headdim": "d", "qk": "qk", "pv": "pv", "pv_accum": "acc"}
_SHORT = {"two_level_f32": "2f32", "two_level_f16": "2f16"}
_ARCH = re.compile(r"(sm|ptx)(\d+)(\d)")
_NAME = re.compile(rf"sage_(?P<kind>{'|'.join(KINDS)})_(?P<axes>\w+)")


def capability_of(arch: str) -> tuple[int, int]:
    """Compute capability of an arch: ``"sm89"`` → ``(8, 9)``."""
    match = _ARCH.fullmatch(arch)
    if match is None:
        raise ValueError(f"expected an arch such as 'sm89', got {arch!r}")
    return int(match[2]), int(match[3])


def is_ptx(arch: str) -> bool:
    """Whether an arch's kernels are PTX, which a driver compiles, and not cubins."""
    return arch.startswith("ptx")


def target_of(arch: str) -> str:
    """An arch as compilers spell it: ``"sm89"`` → ``"sm_89"``, ``"ptx80"`` → ``"compute_80"``."""
    return "{}_{}{}".format("compute" if is_ptx(arch) else "sm", *capability_of(arch))


def _spell(axis: str, value: object) -> str:
    return f"{_PREFIX.get(axis, '')}{_SHORT.get(value, value)}"


def _read(name: str, axis: str, part: str) -> object:
    """The value that one part of a kernel's name spells."""
    if axis == "arch":
        capability_of(part)
        return part
    spelt = {_spell(axis, value): value for value in AXES[axis]}
    if part not in spelt:
        raise ValueError(f"{name!r}: expected one of {sorted(spelt)} for the axis {axis!r}, got {part!r}")
    return spelt[part]


@dataclass(frozen=True, order=True)
class KernelSpec:
    """One specialized kernel. Axes that its kind does not depend on are None."""

    kind: str
    arch: str
    headdim: int
    qk: int | None = None
    pv: str | None = None
    pv_accum: str | None = None
    mask: str | None = None
    v: str | None = None
    q: str | None = None

    @property
    def name(self) -> str:
        """Entry point, file stem, manifest key, test id and bench row of this kernel."""
        return "_".join(["sage", self.kind, *(_spell(axis, getattr(self, axis)) for axis in KIND_AXES[self.kind])])

    @classmethod
    def from_name(cls, name: str) -> KernelSpec:
        """Read a kernel's name; ValueError where it is not one."""
        match = _NAME.fullmatch(name)
        parts = match["axes"].split("_") if match else []
        if match is None or len(parts) != len(KIND_AXES[match["kind"]]):
            raise ValueError(f"expected a name such as {_EXAMPLE!r}, got {name!r}")
        axes = KIND_AXES[match["kind"]]
        return cls(match["kind"], **{axis: _read(name, axis, part) for axis, part in zip(axes, parts)})

    def companion(self, kind: str) -> KernelSpec:
        """The kernel of another kind that works beside this one: same values on the axes that both have."""
        missing = [axis for axis in KIND_AXES[kind] if getattr(self, axis) is None]
        if missing:
            raise ValueError(f"{self.name} does not determine {missing} of its {kind} kernel")
        return KernelSpec(kind, **{axis: getattr(self, axis) for axis in KIND_AXES[kind]})

    @property
    def companions(self) -> tuple[KernelSpec, ...]:
        """The kernels that this attention kernel needs beside it: the delta kernel only where Q is smoothed."""
        kinds = [kind for kind in KINDS[1:] if kind != "delta" or self.q == "qsmooth"]
        return tuple(self.companion(kind) for kind in kinds)

    def impossible(self) -> str | None:
        """Why no such kernel can exist on this arch, or None. The matrix may exclude more, never less."""
        capability = capability_of(self.arch)
        if self.pv == "e4m3" and capability < (8, 9):
            return "no FP8 tensor cores before sm89"
        if self.qk == 4 and capability >= (9, 0):
            return "no INT4 tensor cores from sm90 on"
        if self.kind == "attn" and (self.pv == "f16") != (self.pv_accum == "f32"):
            return "f16 products add up in f32; those of e4m3 need two levels, their accumulators keep too few bits"
        return None


_EXAMPLE = KernelSpec("attn", "sm80", 128, 8, "f16", "f32", "full", "vraw", "qraw").name


@dataclass(frozen=True)
class Tile:
    """Tile sizes of one attention kernel and of the quantizers that feed it; they stand in the build matrix."""

    block_m: int  # query rows of a thread block
    block_n: int  # keys of a KV tile
    warp_m: int  # query rows of a warp; warp_m / 8 of them share a scale of Q
    stages: int  # KV tiles in shared memory
    min_blocks: int  # resident blocks an SM that the registers must allow
    producer_warps: int = 0  # that load and compute nothing; their blocks load by bulk copies, into aligned slots

    @property
    def threads(self) -> int:
        """Threads of the attention kernel's block."""
        return 32 * (self.block_m // self.warp_m + self.producer_warps)

    def shared_bytes(self, spec: KernelSpec) -> int:
        """Dynamic shared memory of an attention kernel: Q, and the stages of K with its scales, of V and of delta_s.

        With producers more, as WgmmaShared has it; every kernel asserts the sum.
        """
        qk_bytes = spec.headdim * spec.qk // 8
        v_bytes = spec.headdim * (2 if spec.pv == "f16" else 1)
        delta_bytes = 4 if spec.q == "qsmooth" else 0
        query_bytes = self.block_m * qk_bytes
        stage_bytes = self.block_n * (qk_bytes + v_bytes + delta_bytes) + SCALES_LINE
        if not self.producer_warps:
            return query_bytes + self.stages * stage_bytes
        query_bytes += 3 * 4 * spec.headdim  # scales, means and counts of finite keys of V's channels
        query_bytes += 4 * 8 * self.block_m // self.warp_m + 4 * self.block_m  # scales of Q, biases of rows
        query_bytes += QUERY_TILE_BYTES
        stage_bytes += 8 * self.block_n  # V's channels of ones
        row_bytes = 2 * spec.headdim + 16  # of O on its way to memory
        return self.block_m * row_bytes + sum(
            count * (-(-size // SLOT_ALIGNMENT) * SLOT_ALIGNMENT + 2 * BARRIER_BYTES)
            for count, size in ((2, query_bytes), (self.stages, stage_bytes)))

    @property
    def quantized(self) -> tuple[int, int, int]:
        """The sizes on which the layout of the quantized tensors depends."""
        return self.block_m, self.block_n, self.warp_m

    def invalid(self) -> list[str]:
        """Every rule that these sizes break, as sentences; empty when they are valid."""
        problems = [f"{size} must be a positive integer, got {getattr(self, size)!r}"
                    for size in SIZES if not _positive(getattr(self, size))]
        if self.producer_warps not in (0, 4) or isinstance(self.producer_warps, bool):
            problems.append(f"producer_warps must be 0 or a warpgroup of 4, got {self.producer_warps!r}")
        if problems:
            return problems
        if self.producer_warps and (self.warp_m != 16 or self.block_m % 64 or self.block_n != 128):
            problems.append(f"blocks with producer_warps multiply 64 rows a warpgroup by 128 keys: warp_m must be 16, "
                            f"block_m a multiple of 64 and block_n 128, got {self.warp_m}, {self.block_m} and {self.block_n}")
        if self.warp_m not in (16, 32):
            problems.append(f"warp_m must be 16 or 32 (one or two m16 fragments), got {self.warp_m}")
        elif self.block_m % self.warp_m:
            problems.append(f"block_m must be a multiple of warp_m = {self.warp_m}, got {self.block_m}")
        elif not 32 <= self.threads <= 1024:
            problems.append(f"block_m / warp_m must be 1 to 32 warps, got {self.block_m // self.warp_m}")
        if self.block_n not in (64, 128, 256):
            problems.append(f"block_n must be 64, 128 or 256, got {self.block_n}")
        if self.stages < 2:
            problems.append(f"stages must be at least 2 (loads run one tile ahead), got {self.stages}")
        return problems


SIZES = tuple(field.name for field in fields(Tile) if field.name != "producer_warps")
"""What every row of tiles must name."""

VECTOR = 8
"""Channels that a thread of the quantizers handles at once (quant/source.cuh)."""

IN_FLIGHT = 8
"""Loads of VECTOR channels that a thread of the quantizer has under way for K or V, at most (quant/quantize.cuh)."""

SCALES_LINE = 128
"""Bytes behind a KV tile that hold the scales of K, in memory and in shared memory (tile/layout.cuh)."""

SLOT_ALIGNMENT, BARRIER_BYTES, QUERY_TILE_BYTES = 1024, 8, 36
"""Of the buffers that bulk copies fill, for Q and for KV tiles; of each of their two barriers, full and empty; of what
the producer says of a query tile (attn/mainloop_wgmma.cuh)."""


def _positive(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
