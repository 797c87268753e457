"""Manifests for tests. Entries that a test does not set have the values of the real kernels."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable
from typing import Any

from sage_aot._backends.loader import KERNEL_FOLDER
from sage_aot._kernels.manifest import Arch, AttnRecord, KernelRecord, MachineCode, Manifest, records_by_name
from sage_aot._kernels.spec import (
    BACKWARD,
    OF_BACKWARD,
    SELECTION,
    AttnSpec,
    KernelSpec,
    QuantSpec,
    capability_of,
    is_ptx,
    target_of,
)
from sage_aot._kernels.tile import Tile
from sage_aot._launch.structs import vocabulary
from sage_aot._version import __version__

TILE = Tile(128, 64, 32, 2, 2)
WGMMA_TILE = Tile(128, 128, 16, 4, 1)

_PARAMS = {"pack": "PackParams", "lists": "ListsParams", "quant": "QuantParams", "delta": "DeltaParams",
           "attn": "AttnParams", "merge": "MergeParams", "pool": "PoolParams", "choose": "ChooseParams",
           **dict.fromkeys(OF_BACKWARD, "BwdParams")}

_SHARED_BYTES = {"sm80": 166912, "sm87": 166912, "sm90": 232448, "sm100": 232448}
"""Shared memory that a block can have; 101,376 on the other archs."""


def record_of(spec: KernelSpec, tile: Tile = TILE, family: str = "mma", **changes: Any) -> KernelRecord:
    """A kernel's record. `tile`: of the attention kernel; for a companion, of the one that names it. `facts`: added to
    those that follow from the tile."""
    ptx = is_ptx(spec.arch)
    values = {
        "spec": spec, "family": family, "file": f"{spec.name}.{'ptx' if ptx else 'cubin'}", "sha256": "",
        "target": target_of(spec.arch), "least_driver": 575 if ptx else 525, "params": _PARAMS[spec.kind],
        "opcodes": {}, "machine": None if ptx else MachineCode(40, 0, 7), "compiler": "nvrtc 12.9.86",
        "source_sha256": "", **changes, "facts": {**facts_of(spec, tile, family), **changes.pop("facts", {})}}
    if not isinstance(spec, AttnSpec):
        return KernelRecord(**values)
    return AttnRecord(**{"companions": companions_of(spec), "main_loop": None, **values, "tile": tile})


def companions_of(spec: AttnSpec) -> tuple[str, ...]:
    """Names of an attention kernel's companions."""
    kinds = ("pack", *(["lists"] if spec.mask == "sparse" else []), "quant",
             *(["delta"] if spec.q == "qsmooth" else []), "merge")
    return tuple(spec.companion(kind).name for kind in kinds)


def backward_of(spec: AttnSpec) -> tuple[str, ...]:
    """Names of the kernels of its backward pass."""
    kinds = OF_BACKWARD if spec.arch == "sm90" else BACKWARD
    return tuple(spec.companion(kind).name for kind in kinds if spec.trains)


def selection_of(spec: AttnSpec) -> tuple[str, ...]:
    """Names of the kernels that choose blocks of keys for it."""
    return tuple(spec.companion(kind).name for kind in SELECTION if spec.mask == "sparse")


def facts_of(spec: KernelSpec, tile: Tile, family: str) -> dict[str, float]:
    """The facts of a kernel; test_kernel_info.py compares them with the real kernels' facts."""
    make = {"pack": _pack, "lists": _lists, "quant": _quant, "delta": _delta, "attn": _attn, "merge": _merge,
            "bwdprep": _bwdprep, "bwdkv": _bwdkv, "bwdq": _bwdq, "bwdqkv": _bwdqkv, "bwdsum": _bwdsum, "pool": _pool,
            "choose": _choose}[spec.kind]
    return {name: float(value) for name, value in make(spec, tile, family).items()}


STRUCTS = Manifest.read(KERNEL_FOLDER).structs
"""The structs of the kernels that are built, by name."""


def manifest_of(records: Iterable[KernelRecord], **changes: object) -> Manifest:
    """The manifest of some kernels; sm90 is the only arch with a GPU in `run_on`."""
    kernels = records_by_name(records)
    archs = {record.spec.arch: Arch(capability_of(record.spec.arch), record.least_driver,
                                    "NVIDIA H200" if record.spec.arch == "sm90" else None)
             for record in kernels.values()}
    values = {"version": __version__, "flags": ("-x",), "retarget": None, "complete": True, "archs": archs,
              "structs": STRUCTS, "vocabulary": vocabulary()}
    return Manifest(**{**values, "kernels": kernels, **changes})


def _pack(spec: KernelSpec, tile: Tile, family: str) -> dict[str, float]:
    return {"threads": 1024, "shared_bytes": 0}


def _lists(spec: KernelSpec, tile: Tile, family: str) -> dict[str, float]:
    return {"threads": 1024, "shared_bytes": 0, "mask_block": 64, "most_tiles": 2**20, "lists_a_block": 32}


def _pool(spec: Any, tile: Tile, family: str) -> dict[str, float]:
    return {"threads": 256, "shared_bytes": 0, "samples": 64, "rows_at_once": 2048 // spec.headdim, "vector": 8,
            "largest_mean": 2**103, "limit": 127, "smallest_abs_max": 1.0000000180025095e-35}


def _choose(spec: Any, tile: Tile, family: str) -> dict[str, float]:
    return {"threads": 256, "shared_bytes": 2**15, "most_rows": 16, "floats": 2**13, "pitch": 128, "mask_block": 64}


def _merge(spec: KernelSpec, tile: Tile, family: str) -> dict[str, float]:
    return {"threads": 256, "shared_bytes": 0, "rows": 8, "most_splits": 64,
            "programmatic_launch": capability_of(spec.arch) >= (9, 0)}


def _delta(spec: KernelSpec, tile: Tile, family: str) -> dict[str, float]:
    return {"threads": 256, "shared_bytes": 0, "tile": 64}


def _quant(spec: QuantSpec, tile: Tile, family: str) -> dict[str, float]:
    row, int4, int8 = _row_bytes(spec), spec.qk == "int4", spec.qk == "int8"
    tiles = 2 if int4 or tile.block_n * spec.headdim <= 8192 else 1
    of_v = min(tiles, 2**14 // (tile.block_n * spec.headdim))
    pieces = of_v * tile.block_n * spec.headdim // 256  # of a thread: eight channels of a key, or squares of four keys
    return {
        "threads": 256, "shared_bytes": 0, "kv_tiles_per_block": tiles, "warps_per_key_group": 2 // tiles,
        "v_tiles_at_once": of_v, "v_squares": pieces // 8 if spec.pv == "f16" else pieces // 32,
        "rows_at_once": 2048 // spec.headdim, "vector": 8, "q_row_bytes": row,
        "kv_tile_bytes": _kv_tile_bytes(spec, tile),
        "row_groups": 8 if int8 else tile.warp_m, "key_groups": 4,
        "limit": {"int8": 127, "int4": 7, "nvfp4": 4 * 448}[spec.qk],
        "clips": 6 if int4 else 1, "clip_step": 0.8999999761581421,
        "clip_error_bias": 192 if tile.block_n * spec.headdim <= 8192 else 384,
        "smallest_abs_max": 1.0000000180025095e-35, "samples": 64, "largest_mean": 2**103,
        "rounding_of_mean": 2**-16, "most_balance": 4, "least_keys": 16,
        "programmatic_launch": capability_of(spec.arch) >= (9, 0)}


def _bwdprep(spec: Any, tile: Tile, family: str) -> dict[str, float]:
    return {"threads": 256, "shared_bytes": 0, "tile_rows": 64, "q_side_bytes": _q_side_bytes(spec),
            "kv_side_bytes": _kv_side_bytes(spec), "k_tile_bytes": tile.block_n * spec.headdim, "k_line_bytes": 128}


def _bwdkv(spec: Any, tile: Tile, family: str) -> dict[str, float]:
    limit, stage = _SHARED_BYTES.get(spec.arch, 101376), _rows_bytes(spec) + _q_side_bytes(spec)
    if spec.arch == "sm90":
        return {"threads": 384, "shared_bytes": 2 * _rows_bytes(spec) + _query_stages(spec, 4), "block_rows": 128,
                "halves": 1, "in_order": 0}
    of_keys = _rows_bytes(spec) if spec.headdim > 64 else 0
    blocks = 2 if 2 * (of_keys + stage) <= limit else 1
    own = of_keys if blocks == 2 else 2 * of_keys
    stages = 2 if blocks * (own + 2 * stage) <= limit else 1
    return {"threads": 256 // blocks, "shared_bytes": own + stages * stage, "block_rows": 128 // blocks, "halves": 0}


def _bwdqkv(spec: Any, tile: Tile, family: str) -> dict[str, float]:
    # K̂ and V, K̂ in 16 bits, dS of 128 keys and 64 queries, its product with K̂, mbarriers
    own = 2 * _rows_bytes(spec) + 128 * 2 * spec.headdim + 128 * 64 * 2 + 64 * 4 * spec.headdim + 1024
    return {"threads": 384, "shared_bytes": own + _query_stages(spec, 2 if spec.headdim > 64 else 4),
            "block_rows": 128, "halves": 1, "in_order": 1}


def _bwdsum(spec: Any, tile: Tile, family: str) -> dict[str, float]:
    return {"threads": 128, "shared_bytes": 64 * 2 * spec.headdim, "q_sum_bytes": 64 * 4 * spec.headdim}


def _bwdq(spec: Any, tile: Tile, family: str) -> dict[str, float]:
    stage = _rows_bytes(spec) + _kv_side_bytes(spec)
    if spec.arch == "sm90":
        consumers = 3 if spec.headdim <= 64 else 2
        of_queries = _rows_bytes(spec) if consumers == 3 else 128 * spec.headdim
        return {"threads": 128 * (1 + consumers), "shared_bytes": consumers * of_queries + 4 * _hopper_stage(stage),
                "block_rows": 64 * consumers, "halves": 1}
    stages = 2 if 4 * stage <= _SHARED_BYTES.get(spec.arch, 101376) else 1
    return {"threads": 128, "shared_bytes": stages * stage, "block_rows": 8192 // spec.headdim, "halves": 0}


def _hopper_stage(tile_bytes: int) -> int:
    """A tile in whole 1024 bytes, and its two mbarriers."""
    return -(-tile_bytes // 1024) * 1024 + 16


def _query_stages(spec: Any, count: int) -> int:
    """Stages of the codes and halves of 64 queries with four f32 each, and of their codes in 16 bits, with the
    mbarriers of both."""
    rows = -(-(_rows_bytes(spec) + 64 * 4 * 4) // 1024) * 1024
    return count * (rows + 128 * spec.headdim) + 2 * 1024


def _rows_bytes(spec: Any) -> int:
    """Codes and halves of 64 rows."""
    return 192 * spec.headdim


def _q_side_bytes(spec: Any) -> int:
    """Transposes of the codes of Q and dO, four f32 a query and eight scales: in whole lines of 128 bytes. On sm90 dO,
    four f32 a query, and the codes in 16 bits."""
    return 64 * (4 * spec.headdim + 4 * 4) if spec.arch == "sm90" else 64 * (2 * spec.headdim + 4 * 4) + 128


def _kv_side_bytes(spec: Any) -> int:
    """Transposes of the codes of K, on sm90 the codes in 16 bits, and an f32 a key."""
    return 64 * (spec.headdim * (2 if spec.arch == "sm90" else 1) + 4)


def _attn(spec: AttnSpec, tile: Tile, family: str) -> dict[str, float]:
    f16 = spec.pv == "f16"
    nvfp4 = spec.pv == "nvfp4"
    largest = 128 if f16 else 224 if spec.pv_accum == "two_level_f16" else 448
    facts = {
        "threads": _threads(tile, family), "shared_bytes": _shared_bytes(spec, tile, family),
        "p_top": _float32(11.392317 if nvfp4 else math.log2(largest)), "lazy_rise": 8 if f16 else 0,
        "whole_reference": f16,
        "most_fall": 40, "no_reference": -2.0**127, "largest_scale": 2.0**90 if nvfp4 else 2.0**100,
        "smallest_scale": 2**-60 if nvfp4 else 9.99999991097579e-38}
    if family == "mma":
        folds = spec.q == "qraw" and (spec.qk == "int8" or f16)
        facts |= {"largest_folded": 1 if f16 else 0 if nvfp4 else 2**-6, "score_bias": 12582912 if folds else 0,
                  "sums_rounded": not nvfp4, "sums_in_threads": not f16,
                  "may_fall": not f16, "lazy_fall": 0 if f16 else 6, "largest_sum": 2**66,
                  **_line_facts(facts["p_top"], 0 if f16 else 6, facts["most_fall"])}
    else:
        pairs = spec.q == "qraw" and spec.headdim <= 128
        facts |= {"slices": 4 if spec.headdim == 256 else 1, "pairs": pairs, "room": 3 if pairs else 0,
                  "open_end": pairs and spec.headdim == 128,
                  "bounds_scores": spec.p == "linear" and spec.q == "qraw", "largest_score": 65,
                  "line_shift": _float32(0.45884),
                  "rows_of_range": 64 if tile.block_m == 192 and spec.mask != "sparse" else tile.block_m,
                  "programmatic_launch": 1}
    limit, typical = (2**15, 0) if f16 else (4.5, 0.375) if spec.pv_accum == "two_level_f16" else (448, 11)
    limit, typical = (4 * 448, 16) if nvfp4 else (limit, typical)
    facts["sum_unit"] = 1 if f16 or nvfp4 else typical
    return {**facts, "v_typical": typical, "v_least": 2**-4 if f16 else 1 if nvfp4 else limit / 32, "v_limit": limit}


def _line_facts(top: float, lazy_fall: float, most_fall: float) -> dict[str, float]:
    """Facts of a linear P in the mma family: its FMA's values, in f32."""
    room, zero = 1.0, _float32(56 - _float32(0.45884))

    def value(log2_p: float) -> float:
        return _float32(_float32(8 * _float32(log2_p)) + zero)

    lower = _float32(top - room)
    return {"line_room": room, "line_zero": zero, "line_most": _float32(value(top) + 0.375),
            "line_far": value(lower - lazy_fall), "line_farthest": value(lower - most_fall)}


def _threads(tile: Tile, family: str) -> int:
    warps = tile.block_m // tile.warp_m
    return 32 * (warps + 4 if family == "wgmma" else warps)


def _shared_bytes(spec: AttnSpec, tile: Tile, family: str) -> int:
    """Shared memory of a block in bytes: Q, the stages, and in mma a word or, sparse, two a thread. In wgmma: two query
    buffers (Q, its scales and biases, V's scales and means, a work tile, a norm, votes), stages with ones behind V,
    rows of O, barriers, and a one; sparse, bits and an entry in each stage, and two tables of the warp that makes bits.
    """
    q, kv_tile = tile.block_m * _row_bytes(spec), _kv_tile_bytes(spec, tile)
    delta = 4 * tile.block_n if spec.q == "qsmooth" else 0
    if family == "mma":
        without_v = tile.stages - (tile.v_stages or tile.stages)
        v = tile.block_n * spec.headdim * (2 if spec.pv == "f16" else 1)
        return q + tile.stages * (kv_tile + delta) - without_v * v + 16 * -(-tile.block_m // tile.warp_m // 4) \
            + (8 if spec.mask == "sparse" else 4) * _threads(tile, family)
    warps = tile.block_m // tile.warp_m
    query = q + 8 * spec.headdim + 32 * warps + 4 * tile.block_m + 76
    rows = 2 * tile.block_m * ((spec.headdim if spec.headdim <= 128 else 64) + 8)
    one = 16 if spec.q == "qsmooth" else 0
    bits, of_bits = 0, 0
    if spec.mask == "sparse":
        bits, of_bits = tile.block_m * tile.block_n // 8 + 16, 8 * tile.block_m + 16 * (tile.block_n + 1)
    stage = _kib(kv_tile + 8 * tile.block_n + delta + bits)
    return 2 * _kib(query) + tile.stages * stage + rows + 16 * (3 + tile.stages) + one + of_bits


def _kib(size: int) -> int:
    return -(-size // 1024) * 1024


def _kv_tile_bytes(spec: AttnSpec | QuantSpec, tile: Tile) -> int:
    bits_of_v = {"f16": 16, "e4m3": 8, "nvfp4": 4.5}[spec.pv]  # NVFP4 has eight bits more for 16 elements
    return tile.block_n * (_row_bytes(spec) + int(spec.headdim * bits_of_v / 8)) + 128


def _row_bytes(spec: AttnSpec | QuantSpec) -> int:
    return int(spec.headdim * {"int8": 8, "int4": 4, "nvfp4": 4.5}[spec.qk] / 8)


def _float32(value: float) -> float:
    """A number rounded to f32, as kernels keep it."""
    return struct.unpack("<f", struct.pack("<f", value))[0]
