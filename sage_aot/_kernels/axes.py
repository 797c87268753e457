"""The axes that kernels are specialized on, and their values."""

from __future__ import annotations

AXES: dict[str, tuple[int | str, ...]] = {
    "headdim": (64, 128, 256),
    "qk": ("int8", "int4", "nvfp4"),
    "pv": ("f16", "e4m3", "nvfp4"),
    "pv_accum": ("f32", "two_level_f32", "two_level_f16"),
    "p": ("linear", "exp2"),
    "mask": ("full", "causal", "sparse"),
    "v": ("vraw", "vsmooth"),
    "q": ("qraw", "qsmooth"),
}
"""Every axis but the arch, with its values. The arch may be any ``sm<major><minor>``, or ``ptx<major><minor>``: PTX
that a driver compiles for GPUs from that compute capability on."""

ROWS = ("bf16", "f16", "any")
"""The rows that an entry point of a kernel takes. "bf16" and "f16": rows of this type, each of which begins at a
multiple of 16 bytes and holds whole 16-byte vectors. "any": all other rows, and all of f32."""

HALVES = ROWS[:2]
"""The rows that an entry point takes of a kernel that writes rows of 16 bits."""

HEADDIMS = tuple(value for value in AXES["headdim"] if isinstance(value, int))
MAX_HEADDIM = max(HEADDIMS)


def least_headdim(headdim: int) -> int:
    """The least head dim of a kernel that holds so many channels."""
    return min(d for d in HEADDIMS if d >= headdim)
