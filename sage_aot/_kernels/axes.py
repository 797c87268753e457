"""The axes that kernels are specialized on, and their values. A call imports this module at once."""

from __future__ import annotations

AXES: dict[str, tuple[int | str, ...]] = {
    "headdim": (64, 128),
    "qk": ("int8", "int4"),
    "pv": ("f16", "e4m3"),
    "pv_accum": ("f32", "two_level_f32", "two_level_f16"),
    "mask": ("full", "causal"),
    "v": ("vraw", "vsmooth"),
    "q": ("qraw", "qsmooth"),
}
"""Every axis but the arch, with its values. Archs are open: any ``sm<major><minor>`` may stand in the matrix, and
``ptx<major><minor>``, PTX that a driver compiles for GPUs from that capability on."""

ROWS = ("bf16", "f16", "any")
"""What an entry point of a quantizer knows of the rows that it reads: their type, and that each begins at a multiple of
16 bytes and holds whole 16-byte vectors; or nothing."""

HEADDIMS = tuple(value for value in AXES["headdim"] if isinstance(value, int))
MAX_HEADDIM = max(HEADDIMS)


def least_headdim(headdim: int) -> int:
    """The least head dim of a kernel that holds so many channels."""
    return min(d for d in HEADDIMS if d >= headdim)
