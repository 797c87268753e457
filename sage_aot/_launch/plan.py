"""The layout and the launches of a problem: workspace, grids and structs. Pure: strides in, launches out.

A backend runs the launches (sage_aot/_backends).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from sage_aot._families import FAMILIES
from sage_aot._kernels.axes import ROWS
from sage_aot._kernels.manifest import KernelRecord
from sage_aot._kernels.spec import statistics_entry
from sage_aot._kernels.tile import Tile
from sage_aot._launch.choose import Kernels
from sage_aot._launch.structs import DTYPE_CODES, NULL, FastDivmod, Params, Tensor
from sage_aot._problem.options import UNBOUNDED, bounds_of
from sage_aot._problem.problem import Problem
from sage_aot._problem.tensors import TENSORS
from sage_aot.errors import ArgumentError, UnsupportedError

DELTA_BYTES = 2**28
"""Limit in bytes on the workspace of delta_s, which takes 4 bytes per query tile, key and head. Where the heads do not
all fit, several launches compute them, a group of heads each. One head alone may exceed the limit."""

START, MERGE, MERGE_PARTIAL = 4.0, 5.0, 2.0
"""Costs of splits, in units of the time that a block takes for 128 keys of 128 channels. START: beginning and end of a
block. MERGE: the launch that merges. MERGE_PARTIAL: what merging adds per block of an SM, if all rows of the query tile
have queries. Measured on an H200 alone, whose SMs hold one block each: bench/results/h200-2026-11-25-split-keys."""

BY_NOTHING, BY_K, BY_K_AND_Q = range(3)
"""Tensors whose channels decide how Q and K are balanced: Balance of quant/params.cuh."""

ALIGNMENT = 256
"""Bytes to which every buffer is aligned."""

OF_KV = ("kv_hat", "k_mean", "k_factor", "q_unit", "v_scale", "v_mean", "key_rank", "key_index")
"""Buffers that follow from k and v alone. quantize_kv returns them; other calls have them in the workspace."""

KEPT = {"all": (), "kv": OF_KV, "q": OF_KV, "train": ("q_hat", "q_scale", "key_rank", "key_index")}
"""Buffers that lie in what a call keeps, or an earlier one kept, by the part of a problem."""

_OF_SOME_CALLS = ("delta_s", "key_rank", "key_index", "tile_lists", "tile_counts", "key_bits")
"""Buffers whose address is zero in calls without them."""

_MAX_GRID = 2**31 - 1
LOG2_E = 1.4426950408889634


class Launch(NamedTuple):
    """One kernel launch; grids are one-dimensional."""

    record: KernelRecord
    entry: str  # of the kernel's entry points
    blocks: int
    params: Params  # values by field name; the kernel's struct takes those of its own fields


class Strides(NamedTuple):
    """Strides of a [batch, heads, seq, headdim] tensor, in elements; that of the last dimension is 1."""

    batch: int
    head: int
    row: int


class Argument(NamedTuple):
    """A tensor of the call, as far as launches depend on it."""

    name: str  # in structs.SOURCES
    strides: Strides
    at_16_bytes: bool = True  # its first element lies at a multiple of 16 bytes

    @property
    def tensor(self) -> Tensor:
        return Tensor((self.name, 0), *self.strides)

    def aligned(self, headdim: int) -> bool:
        """True where every row starts at a multiple of 16 bytes and holds whole 16-byte vectors."""
        batch, head, row = self.strides
        return self.at_16_bytes and (headdim | batch | head | row) % 8 == 0


class Arguments(NamedTuple):
    """The tensors of a call."""

    q: Argument
    k: Argument
    v: Argument
    out: Argument
    optional: Mapping[str, Argument]  # of the table TENSORS, by name
    returns_lse: bool

    def of_call(self, at_16_bytes: tuple[bool, ...], returns_lse: bool) -> Arguments:
        """Arguments of a call whose q, k and v begin at a multiple of 16 bytes or not."""
        q, k, v = (tensor._replace(at_16_bytes=at) for tensor, at in zip((self.q, self.k, self.v), at_16_bytes))
        return self._replace(q=q, k=k, v=v, returns_lse=returns_lse)


MISSING = Strides(0, 0, 0)
"""Strides of a tensor that a part of a call does not take."""

ABSENT = Tensor(NULL, *MISSING)
"""An optional tensor that a call does not have."""


@dataclass(frozen=True)
class Plan:
    """Sizes that follow from a problem and its kernels; sizes and offsets in bytes."""

    problem: Problem
    kernels: Kernels
    q_tiles: int  # of a run of tiles, Problem.runs
    kv_tiles: int  # likewise
    columns: int  # keys of a row of delta_s
    heads_at_once: int  # of runs · q heads, those whose delta_s the workspace holds at once
    splits: int  # blocks that share the keys of a query tile
    sizes: dict[str, int]  # per buffer
    offsets: dict[str, int]  # from the workspace's beginning, per buffer in it
    workspace_bytes: int
    kept_offsets: dict[str, int]  # from the beginning of what is kept, per buffer in it: KEPT
    kept_bytes: int


def plan(problem: Problem, kernels: Kernels, splits: int = 1) -> Plan:
    """Lay out the workspace of a problem, and what its call keeps, or an earlier one kept. `splits`: blocks that share
    the keys of a query tile; ArgumentError for more than the merge kernel takes."""
    tile = kernels.attn.tile
    if splits == 1:
        kernels = kernels.without("merge")
    else:
        _check_splits(splits, kernels["merge"])
    q_tiles, kv_tiles = q_blocks_of(problem, tile.block_m), kv_blocks_of(problem, tile.block_n)
    columns = -(-problem.seqlen_kv // tile.block_n) * tile.block_n
    sizes = _buffer_bytes(problem, kernels, q_tiles, kv_tiles)
    if problem.is_listed:
        sizes |= _list_bytes(problem, kernels, q_tiles, kv_tiles)
    if splits > 1:
        sizes |= {"partial_out": 4 * splits * _rows_of_heads(problem) * _partial_headdim(problem),
                  "partial_lse": 4 * splits * _rows_of_heads(problem)}
    heads_at_once = problem.runs * problem.num_q_heads
    if problem.options.smooth_q and problem.part != "kv":
        head_bytes = 4 * q_tiles * columns
        heads_at_once = max(1, min(heads_at_once, DELTA_BYTES // max(1, head_bytes)))  # 0 bytes without queries or keys
        sizes["delta_s"] = heads_at_once * head_bytes
    apart = KEPT[problem.part]
    offsets, workspace_bytes = lay_out({name: size for name, size in sizes.items() if name not in apart})
    kept_offsets, kept_bytes = lay_out({name: size for name, size in sizes.items() if name in apart})
    return Plan(problem, kernels, q_tiles, kv_tiles, columns, heads_at_once, splits, sizes, offsets, workspace_bytes,
                kept_offsets, kept_bytes)


def _check_splits(splits: int, merge: KernelRecord) -> None:
    most = merge.fact("most_splits")
    if not 1 <= splits <= most:
        raise ArgumentError(f"splits: expected 1 to {most}, got {splits}; pass as many as {merge.name} takes")


def splits_of(problem: Problem, kernels: Kernels, sm_count: int) -> int:
    """The number of blocks that share the keys of a query tile on a GPU of `sm_count` SMs. One where the query tiles
    fill the GPU; else as many as make the call shortest, by the costs START, MERGE and MERGE_PARTIAL."""
    tile, headdim = kernels.attn.tile, kernels.attn.spec.headdim
    tiles = problem.runs * problem.num_q_heads * q_blocks_of(problem, tile.block_m)
    at_once = sm_count * tile.min_blocks
    if problem.part == "kv" or problem.is_empty or tiles >= at_once:
        return 1
    kv_tiles, rows = _most_kv_tiles(problem, tile), min(1.0, problem.seqlen_q / tile.block_m)
    time_of_tile = tile.block_n / 128 * max(1.0, headdim / 128)

    def time_of(splits: int) -> float:
        blocks = tiles * splits
        attention = -(-blocks // at_once) * (START + -(-kv_tiles // splits) * time_of_tile)
        return attention if splits == 1 else attention + MERGE + MERGE_PARTIAL * rows * blocks / at_once

    return min(range(1, min(kv_tiles, kernels["merge"].fact("most_splits")) + 1), key=time_of)


def _most_kv_tiles(problem: Problem, tile: Tile) -> int:
    """KV tiles that a query tile sees, at most."""
    in_window = sum(_window(problem)) + min(tile.block_m, problem.seqlen_q)  # keys, side by side
    return min(-(-problem.seqlen_kv // tile.block_n), -(-in_window // tile.block_n) + 1)


def _rows_of_heads(problem: Problem) -> int:
    """Rows of the output, of all heads."""
    return problem.runs * problem.num_q_heads * problem.q_rows


def _partial_headdim(problem: Problem) -> int:
    """Channels of a row of partial_out: whole vectors of 16 bytes."""
    return -(-problem.headdim // 4) * 4


def lay_out(sizes: dict[str, int]) -> tuple[dict[str, int], int]:
    """Offsets of buffers one behind the other, and the end of the last."""
    offsets, end = {}, 0
    for name, size in sizes.items():
        offsets[name] = end
        end += -(-size // ALIGNMENT) * ALIGNMENT
    return offsets, end


def q_blocks_of(problem: Problem, rows: int) -> int:
    """Blocks of so many queries in a run; of sequences the slots, problem/sequences.cuh."""
    return problem.q_rows // rows + problem.batch if problem.tokens else -(-problem.seqlen_q // rows)


def kv_blocks_of(problem: Problem, keys: int) -> int:
    """Blocks of so many keys, likewise."""
    return problem.kv_rows // keys + problem.batch if problem.tokens else -(-problem.seqlen_kv // keys)


def launches(plan: Plan, tensors: Arguments, sm_count: int) -> list[Launch]:
    """The launches of one call, in order, on a GPU of `sm_count` SMs."""
    known, part = _known(plan, tensors), plan.problem.part
    result = [_pack(plan, known)] if plan.problem.packs_keys and part != "q" else []
    if plan.problem.is_listed:
        result.append(_lists(plan, known))
    result += _quantize(plan, tensors, known)
    if part == "kv":
        return result
    heads = plan.problem.runs * plan.problem.num_q_heads
    for first in range(0, heads, plan.heads_at_once):
        own = {**known, "first_head": first, "num_heads": min(plan.heads_at_once, heads - first)}
        if plan.problem.options.smooth_q:
            result.append(_delta(plan, tensors, own))
        result.append(_attention(plan, own, sm_count))
    return result if plan.splits == 1 else [*result, _merge(plan, known)]


def _known(plan: Plan, tensors: Arguments) -> dict[str, Any]:
    """The values that all launches of a call share, by the names of the structs' fields."""
    problem, attn = plan.problem, plan.kernels.attn
    mask_batches, mask_heads = problem.masks
    buffers = {name: ("workspace", offset) for name, offset in plan.offsets.items()}
    buffers |= {name: ("kept", offset) for name, offset in plan.kept_offsets.items()}
    return {
        **vars(problem.options), **dict.fromkeys(_OF_SOME_CALLS, NULL), **buffers,
        **{name: (name, 0) if problem.tokens else NULL for name in ("cu_seqlens_q", "cu_seqlens_k")},
        "q": tensors.q.tensor, "k": tensors.k.tensor, "v": tensors.v.tensor, "out": tensors.out.tensor,
        **{name: tensors.optional[name].tensor if name in tensors.optional else ABSENT for name in TENSORS},
        "lse": ("lse", 0), "returns_lse": int(tensors.returns_lse),
        "batch": problem.batch, "num_q_heads": FastDivmod.of(problem.num_q_heads),
        "num_kv_heads": FastDivmod.of(problem.num_kv_heads),
        "q_heads_per_kv_head": FastDivmod.of(problem.num_q_heads // problem.num_kv_heads),
        "seqlen_q": problem.seqlen_q, "seqlen_kv": problem.seqlen_kv, "q_rows": problem.q_rows,
        "kv_rows": problem.kv_rows, "headdim": problem.headdim, "dtype": DTYPE_CODES[problem.dtype],
        "q_tiles": FastDivmod.of(plan.q_tiles), "kv_tiles": plan.kv_tiles, "block_m": attn.tile.block_m,
        "block_n": attn.tile.block_n, "columns": plan.columns, "softmax_scale_log2": problem.softmax_scale * LOG2_E,
        **{name: attn.facts[name] for name in ("v_typical", "v_least", "v_limit")}, "unused": 0,
        "splits": FastDivmod.of(plan.splits), "split_rows": _rows_of_heads(problem),
        **dict(zip(("window_left", "window_right"), _window(problem))), "mask_heads": FastDivmod.of(mask_heads),
        "mask_of_batch": mask_heads if mask_batches > 1 else 0, "mask_of_head": 1 if mask_heads > 1 else 0,
    }


def _window(problem: Problem) -> tuple[int, int]:
    """Numbers of keys that a query sees in front of its own and behind it, as problem/mask.cuh takes them."""
    every = problem.seqlen_q + problem.seqlen_kv
    left, right = bounds_of(problem.options.is_causal, problem.options.window)
    return every if left == UNBOUNDED else min(left, every), every if right == UNBOUNDED else min(right, every)


def _buffer_bytes(problem: Problem, kernels: Kernels, q_tiles: int, kv_tiles: int) -> dict[str, int]:
    tile, headdim = kernels.attn.tile, kernels.attn.spec.headdim
    quant = kernels["quant"]
    q_heads, kv_heads = problem.runs * problem.num_q_heads, problem.runs * problem.num_kv_heads
    if problem.part == "kv":
        q_heads = 0
    channels = problem.batch * problem.num_kv_heads * headdim
    warps = q_heads * q_tiles * tile.block_m // tile.warp_m
    return {
        "q_hat": q_heads * q_tiles * tile.block_m * quant.fact("q_row_bytes"),
        "kv_hat": kv_heads * kv_tiles * quant.fact("kv_tile_bytes"),
        "q_scale": warps * quant.fact("row_groups") * 4,
        "q_mean": q_heads * q_tiles * headdim * 4 if problem.options.smooth_q else 0,
        "k_mean": channels * 4,
        "k_factor": channels * 4,
        "q_unit": problem.batch * problem.num_kv_heads * 4,
        "v_scale": channels * 4,
        "v_inv_scale": channels * 4 if problem.part != "q" else 0,
        "v_mean": channels * 4,
        "row_bias": q_heads * q_tiles * tile.block_m * 4,
        "tile_counter": 4,
        **({"key_rank": problem.batch * (problem.seqlen_kv + 1) * 4, "key_index": problem.batch * problem.seqlen_kv * 4}
           if problem.packs_keys else {}),
    }


def _list_bytes(problem: Problem, kernels: Kernels, q_tiles: int, kv_tiles: int) -> dict[str, int]:
    """Bytes of the lists of KV tiles. UnsupportedError for more KV tiles than their numbers can tell apart."""
    if kv_tiles > (most := kernels["lists"].fact("most_tiles")):
        raise UnsupportedError(f"a mask over {problem.seqlen_kv} keys: lists number at most {most} KV tiles, got "
                               f"{kv_tiles}; split the keys, and merge the outputs by their log-sum-exps")
    masks = problem.masks[0] * problem.masks[1]
    has_elements = any(name in problem.optional for name in ("attn_mask", "key_mask"))
    tile, tiles = kernels.attn.tile, masks * q_tiles * kv_tiles
    bits = {"key_bits": tiles * tile.block_m * tile.block_n // 8} if has_elements else {}
    return {"tile_lists": 4 * tiles, "tile_counts": masks * q_tiles * 8, **bits}


def launch_of(record: KernelRecord, blocks: int, params: Params, rows: str | None = None, packed: bool = False,
              at_most: int = _MAX_GRID) -> Launch:
    """A launch of so many blocks, or of `at_most` blocks that share the work where there is more. `rows`: the entry
    point's member of ROWS, where the kernel reads rows; `packed`: of its entry points those for packed sequences or
    keys."""
    if blocks > _MAX_GRID:
        raise UnsupportedError(f"{record.name} would need {blocks} blocks, a launch takes {_MAX_GRID}; split the batch")
    spec = record.spec
    return Launch(record, spec.entry(rows, packed) if rows else spec.name, min(blocks, at_most), params)


def rows_of(headdim: int, dtype: str, *tensors: Argument) -> str:
    """The member of ROWS that holds for the rows of all of these tensors."""
    aligned = all(tensor.aligned(headdim) for tensor in tensors)
    return dtype if aligned and dtype in ROWS else "any"


def _pack(plan: Plan, known: Params) -> Launch:
    return launch_of(plan.kernels["pack"], plan.problem.batch, known)


def _lists(plan: Plan, known: Params) -> Launch:
    """A launch of a warp per list; of a block, where elements of a mask decide."""
    record, masks = plan.kernels["lists"], plan.problem.masks[0] * plan.problem.masks[1]
    blocks = plan.q_tiles if "key_bits" in plan.sizes else -(-plan.q_tiles // record.fact("lists_a_block"))
    return launch_of(record, masks * blocks, known)


def _quantize(plan: Plan, tensors: Arguments, known: Params) -> list[Launch]:
    """A launch that quantizes what the problem's part says; kv_blocks = 0 tells the kernel that K and V are quantized.
    Where they are not, a launch in front of it finds their statistics, with two blocks a KV head.
    """
    problem, record = plan.problem, plan.kernels["quant"]
    kv_heads = problem.runs * problem.num_kv_heads
    q_blocks = problem.num_q_heads // problem.num_kv_heads * plan.q_tiles  # of a KV head
    keys = record.fact("kv_tiles_per_block") * plan.kernels.attn.tile.block_n  # that a block takes
    kv_blocks = 0 if problem.part == "q" else kv_blocks_of(problem, keys)
    if problem.part == "kv":
        q_blocks = 0
    per_kv_head = 2 * kv_blocks + q_blocks
    own = {"kv_blocks": kv_blocks, "blocks_per_kv_head": FastDivmod.of(per_kv_head),
           "wants_row_bias": _wants_row_bias(plan, tensors.returns_lse), "balance": balance_of(problem)}
    read = {"kv": (tensors.k, tensors.v), "q": (tensors.q,)}.get(problem.part, (tensors.q, tensors.k, tensors.v))
    rows, params = rows_of(problem.headdim, problem.dtype, *read), {**known, **own}
    quantizer = launch_of(record, kv_heads * per_kv_head, params, rows)
    if problem.part == "q":
        return [quantizer]
    statistics = launch_of(record, 2 * problem.batch * problem.num_kv_heads, params, rows)
    return [statistics._replace(entry=statistics_entry(statistics.entry)), quantizer]


def balance_of(problem: Problem) -> int:
    """BY_NOTHING, BY_K or BY_K_AND_Q: the tensors whose channels decide how Q and K are balanced. K may be quantized
    before there is a Q. The backward pass multiplies by K̂ as it is; rotated rows have no channels that are larger than
    most."""
    options = problem.options
    if not options.smooth_k or options.qk != "int8" or options.rotate or problem.part == "train":
        return BY_NOTHING
    return BY_K_AND_Q if problem.part == "all" else BY_K


def _wants_row_bias(plan: Plan, returns_lse: bool) -> bool:
    """True where the attention kernel adds what smoothing K took off a row's scores: to the log-sum-exp, which is the
    weight of a split too, and before it weighs a sink against the scores."""
    problem = plan.problem
    if problem.part == "train":  # the backward pass recomputes P from scores without a row_bias
        return False
    joins = any(TENSORS[name].joins_softmax for name in problem.optional)
    return problem.options.smooth_k and (returns_lse or plan.splits > 1 or joins)


def _delta(plan: Plan, tensors: Arguments, known: Params) -> Launch:
    record = plan.kernels["delta"]
    edge = record.fact("tile")
    tile_blocks = q_blocks_of(plan.problem, edge * plan.kernels.attn.tile.block_m)
    key_blocks = -(-plan.columns // edge)
    own = {"key_blocks": FastDivmod.of(key_blocks), "tile_blocks": FastDivmod.of(tile_blocks)}
    return launch_of(record, known["num_heads"] * tile_blocks * key_blocks, {**known, **own},
                     rows_of(plan.problem.headdim, plan.problem.dtype, tensors.k))


def _attention(plan: Plan, known: Params, sm_count: int) -> Launch:
    """A launch of a block per work tile; of persistent blocks, at most as many as the GPU holds at once."""
    record = plan.kernels.attn
    if plan.splits > 1:
        known = {**known, **_partial(plan)}
    resident = sm_count * record.tile.min_blocks if FAMILIES[record.family].persistent else _MAX_GRID
    return launch_of(record, known["num_heads"] * plan.q_tiles * plan.splits, known, at_most=resident)


def _partial(plan: Plan) -> Params:
    """The places where blocks that share a row's keys store it: not the output and the log-sum-exp."""
    problem, headdim = plan.problem, _partial_headdim(plan.problem)
    head = problem.q_rows * headdim
    out = Tensor(("workspace", plan.offsets["partial_out"]), 0 if problem.tokens else problem.num_q_heads * head, head,
                 headdim)
    return {"out": out, "lse": ("workspace", plan.offsets["partial_lse"]), "headdim": headdim,
            "dtype": DTYPE_CODES["f32"]}


def _merge(plan: Plan, known: Params) -> Launch:
    record, problem = plan.kernels["merge"], plan.problem
    row_blocks = q_blocks_of(problem, record.fact("rows"))
    own = {"partial_headdim": _partial_headdim(problem), "row_blocks": FastDivmod.of(row_blocks)}
    return launch_of(record, problem.runs * problem.num_q_heads * row_blocks, {**known, **own})
