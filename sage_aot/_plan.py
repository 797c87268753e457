"""How a problem is laid out and launched: workspace, grids and packed structs. Pure: addresses in, launches out.

What runs the launches is none of its business.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from sage_aot._manifest import KernelRecord
from sage_aot._params import DTYPE_CODES, pack
from sage_aot._problem import Problem
from sage_aot._select import Kernels
from sage_aot._spec import IN_FLIGHT, SCALES_LINE, VECTOR, KernelSpec, Tile
from sage_aot.errors import UnsupportedError

MAX_CHUNKS = 16
"""At most so many parts in which the statistics of a head are computed: enough to fill a GPU from a few heads."""

CHUNK_ROWS_STEP = 64
"""Keys of a chunk are a multiple of this, so that every thread of a block has rows to read."""

KEY_GROUPS = 4
"""Scales of K in a KV tile; at least a warp of the quantizer computes each."""

ROW_GROUPS = 8
"""Scales of Q in the rows of a warp of the attention kernel."""

STATISTICS = 4
"""Per chunk and channel: sum, largest and smallest value, first key that is not finite."""

V_LIMIT = {"f32": 0.0, "two_level_f32": 448.0, "two_level_f16": 4.5}
"""Largest magnitude of V̂ by accumulator. e4m3 reaches to 448; with P up to 224, a tile of 64 keys and f16 sums V̂ may
reach to 4.5. f16 V̂ has a power of two for its scale, whatever stands here."""

DELTA_BYTES = 2**28
"""Workspace for delta_s, which takes 4 bytes per query tile, key and head. Heads that do not fit together take turns;
one head alone may take more."""

DELTA_TILE = 64
"""Query tiles, and keys, of a block of the delta kernel."""

ALIGNMENT = 256
"""Bytes to which every buffer of the workspace is aligned."""

_MAX_GRID = 2**31 - 1
LOG2_E = 1.4426950408889634


@dataclass(frozen=True)
class Launch:
    """One kernel launch; grids are one-dimensional."""

    record: KernelRecord
    blocks: int
    params: bytes


@dataclass(frozen=True)
class TensorArgument:
    """Address and strides, in elements, of a [batch, heads, seq, headdim] tensor."""

    data: int
    batch: int
    head: int
    row: int

    @property
    def fields(self) -> tuple[int, int, int, int]:
        return self.data, self.batch, self.head, self.row

    def aligned(self, headdim: int) -> bool:
        """Whether every row starts at a multiple of 16 bytes and holds whole 16-byte vectors."""
        return (self.data % 16 == 0 and headdim % 8 == 0
                and all(stride % 8 == 0 for stride in (self.batch, self.head, self.row)))


@dataclass(frozen=True)
class Plan:
    """Sizes that follow from a problem and its kernels. Those of the workspace are in bytes."""

    problem: Problem
    kernels: Kernels
    q_tiles: int
    kv_tiles: int
    num_chunks: int
    chunk_rows: int
    heads_at_once: int  # query heads, over the batch, whose delta_s the workspace holds
    sizes: dict[str, int]  # of the buffers of the workspace
    offsets: dict[str, int]
    workspace_bytes: int


def plan(problem: Problem, kernels: Kernels) -> Plan:
    """Lay out the workspace of a problem."""
    spec, tile = kernels.attn.spec, kernels.attn.tile
    q_tiles = math.ceil(problem.seqlen_q / tile.block_m)
    kv_tiles = math.ceil(problem.seqlen_kv / tile.block_n)
    chunk_rows = chunk_rows_of(problem.seqlen_kv)
    num_chunks = math.ceil(problem.seqlen_kv / chunk_rows)
    heads_at_once = problem.batch * problem.num_q_heads
    if problem.smooth_q:
        head_bytes = max(1, 4 * q_tiles * kv_tiles * tile.block_n)  # nothing without queries or keys
        heads_at_once = max(1, min(heads_at_once, DELTA_BYTES // head_bytes))
    sizes = _buffer_bytes(problem, spec, tile, q_tiles, kv_tiles, num_chunks)
    if problem.smooth_q:
        sizes["delta_s"] = heads_at_once * q_tiles * kv_tiles * tile.block_n * 4
    offsets, end = {}, 0
    for name, size in sizes.items():
        offsets[name] = end
        end += -(-size // ALIGNMENT) * ALIGNMENT
    return Plan(problem, kernels, q_tiles, kv_tiles, num_chunks, chunk_rows, heads_at_once, sizes, offsets, end)


def chunk_rows_of(seqlen_kv: int) -> int:
    """Keys in a chunk of the statistics: at most MAX_CHUNKS chunks of a multiple of CHUNK_ROWS_STEP keys."""
    return max(1, math.ceil(seqlen_kv / (MAX_CHUNKS * CHUNK_ROWS_STEP))) * CHUNK_ROWS_STEP


def kv_tiles_per_block(threads: int, block_n: int, headdim: int) -> int:
    """Tiles of K or V that a block of the quantizer takes, as quant/quantize.cuh has it."""
    return min(threads // (32 * KEY_GROUPS), IN_FLIGHT * VECTOR * threads // (block_n * headdim))


def launches(plan: Plan, workspace: int, q: TensorArgument, k: TensorArgument, v: TensorArgument,
             out: TensorArgument, lse: int, multiprocessors: int) -> list[Launch]:
    """The launches of one call, in order, on a GPU of so many multiprocessors.

    `workspace` and `lse` are addresses; lse 0 means it is not wanted.
    """
    at = {name: workspace + offset for name, offset in plan.offsets.items()}
    result = [*_stats(plan, at, k, v), _quantize(plan, at, q, k, v)]
    heads = plan.problem.batch * plan.problem.num_q_heads
    for first in range(0, heads, plan.heads_at_once):
        count = min(plan.heads_at_once, heads - first)
        if plan.problem.smooth_q:
            result.append(_delta(plan, at, k, first, count))
        result.append(_attention(plan, at, out, lse, first, count, multiprocessors))
    return result


def _buffer_bytes(problem: Problem, spec: KernelSpec, tile: Tile, q_tiles: int, kv_tiles: int,
                  num_chunks: int) -> dict[str, int]:
    q_heads, kv_heads = problem.batch * problem.num_q_heads, problem.batch * problem.num_kv_heads
    q_rows, keys = q_heads * q_tiles * tile.block_m, kv_heads * kv_tiles * tile.block_n
    qk_row_bytes, v_row_bytes = spec.headdim * spec.qk // 8, spec.headdim * (2 if spec.pv == "f16" else 1)
    return {
        "k_stats": kv_heads * num_chunks * STATISTICS * spec.headdim * 4,
        "v_stats": kv_heads * num_chunks * STATISTICS * spec.headdim * 4,
        "q_hat": q_rows * qk_row_bytes,
        "kv_hat": keys * (qk_row_bytes + v_row_bytes) + kv_heads * kv_tiles * SCALES_LINE,
        "q_scale": q_rows // tile.warp_m * ROW_GROUPS * 4,
        "q_mean": q_heads * q_tiles * spec.headdim * 4 if problem.smooth_q else 0,
        "k_mean": kv_heads * spec.headdim * 4,
        "v_scale": kv_heads * spec.headdim * 4,
        "v_mean": kv_heads * spec.headdim * 4,
        "v_amax": kv_heads * spec.headdim * 4,
        "k_finite": kv_heads * 4,
        "v_finite": kv_heads * spec.headdim * 4,
        "row_bias": q_rows * 4,
        "taken": 4,
    }


def _launch(record: KernelRecord, blocks: int, params: bytes, at_most: int = _MAX_GRID) -> Launch:
    """A launch of so many blocks; where there are more than `at_most`, these share the work of the others."""
    if blocks > _MAX_GRID:
        raise UnsupportedError(f"{record.spec.name} would need {blocks} blocks, a launch takes {_MAX_GRID}; split the "
                               f"batch")
    return Launch(record, min(blocks, at_most), params)


def _stats(plan: Plan, at: dict[str, int], k: TensorArgument, v: TensorArgument) -> list[Launch]:
    """Statistics of every chunk, then of all of them."""
    problem, record = plan.problem, plan.kernels.stats
    heads, tensors = problem.batch * problem.num_kv_heads, 2 if problem.smooth_k else 1
    aligned = k.aligned(problem.headdim) and v.aligned(problem.headdim)
    fields = (*k.fields, *v.fields, at["k_stats"], at["v_stats"], at["k_mean"], at["v_mean"], at["v_amax"],
              at["v_finite"], at["k_finite"], at["taken"], problem.num_kv_heads, problem.seqlen_kv, problem.headdim,
              plan.chunk_rows, plan.num_chunks, DTYPE_CODES[problem.dtype], aligned, problem.smooth_k, problem.smooth_v)
    return [_launch(record, blocks, pack("StatsParams", *fields, merge))
            for merge, blocks in ((False, heads * tensors * plan.num_chunks), (True, heads * 2))]


def _quantize(plan: Plan, at: dict[str, int], q: TensorArgument, k: TensorArgument, v: TensorArgument) -> Launch:
    problem, record = plan.problem, plan.kernels.quant
    tiles_per_block = kv_tiles_per_block(record.threads, plan.kernels.attn.tile.block_n, record.spec.headdim)
    q_blocks = problem.batch * problem.num_q_heads * plan.q_tiles
    kv_blocks = problem.batch * problem.num_kv_heads * math.ceil(plan.kv_tiles / tiles_per_block)
    aligned = all(tensor.aligned(problem.headdim) for tensor in (q, k, v))
    return _launch(record, q_blocks + 2 * kv_blocks, pack(
        "QuantParams", *q.fields, *k.fields, *v.fields, at["k_mean"], at["v_mean"], at["v_amax"], at["v_finite"],
        at["q_hat"], at["kv_hat"], at["q_scale"], at["q_mean"], at["v_scale"], at["k_finite"], at["row_bias"],
        problem.batch, problem.num_q_heads, problem.num_kv_heads, problem.seqlen_q, problem.seqlen_kv, problem.headdim,
        plan.q_tiles, plan.kv_tiles, problem.softmax_scale * LOG2_E, DTYPE_CODES[problem.dtype], aligned,
        problem.smooth_q, problem.smooth_v, V_LIMIT[plan.kernels.attn.spec.pv_accum]))


def _delta(plan: Plan, at: dict[str, int], k: TensorArgument, first_head: int, num_heads: int) -> Launch:
    problem, tile = plan.problem, plan.kernels.attn.tile
    columns = plan.kv_tiles * tile.block_n
    blocks = num_heads * math.ceil(plan.q_tiles / DELTA_TILE) * math.ceil(columns / DELTA_TILE)
    return _launch(plan.kernels.delta, blocks, pack(
        "DeltaParams", *k.fields, at["q_mean"], at["k_mean"], at["delta_s"], first_head, num_heads,
        problem.num_q_heads, problem.num_kv_heads, problem.seqlen_q, problem.seqlen_kv, problem.headdim, plan.q_tiles,
        columns, DTYPE_CODES[problem.dtype], k.aligned(problem.headdim), tile.block_m, tile.block_n, problem.is_causal))


def _attention(plan: Plan, at: dict[str, int], out: TensorArgument, lse: int, first_head: int, num_heads: int,
               multiprocessors: int) -> Launch:
    """A block per query tile, or where blocks take several, as many as the GPU holds at once."""
    problem, record = plan.problem, plan.kernels.attn
    resident = multiprocessors * record.tile.min_blocks if record.tile.producer_warps else _MAX_GRID
    return _launch(record, num_heads * plan.q_tiles, pack(
        "AttnParams", at["q_hat"], at["kv_hat"], at["q_scale"], at["v_scale"], at["v_mean"], at["k_finite"],
        at["v_finite"], at["row_bias"], at.get("delta_s", 0), *out.fields, lse, at["taken"], first_head,
        problem.num_q_heads, problem.num_kv_heads, problem.seqlen_q, problem.seqlen_kv, problem.headdim, plan.q_tiles,
        plan.kv_tiles, DTYPE_CODES[problem.dtype], num_heads), resident)
