"""Workspace, grids and structs of a call, without a device."""

from __future__ import annotations

import dataclasses
import math
import struct

import pytest
from records import record_of

from sage_aot._params import FIELDS, STRUCT_OF, offsets
from sage_aot._plan import (ALIGNMENT, DELTA_BYTES, MAX_CHUNKS, TensorArgument, chunk_rows_of, kv_tiles_per_block,
                            launches, plan)
from sage_aot._problem import Problem
from sage_aot._select import Kernels
from sage_aot._spec import KernelSpec, Tile
from sage_aot.errors import UnsupportedError

TILE = Tile(128, 64, 32, 2, 2)
PROBLEM = Problem(batch=2, num_q_heads=6, num_kv_heads=3, seqlen_q=130, seqlen_kv=200, headdim=80, dtype="bf16",
                  is_causal=False, softmax_scale=0.5, qk_bits=8, smooth_q=False, smooth_k=True,
                  smooth_v=False, pv_accum="auto")
SMOOTH_Q = dataclasses.replace(PROBLEM, smooth_q=True)
Q = TensorArgument(2**40, 1, 2, 3)


def kernels(pv_accum: str = "two_level_f32", problem: Problem = PROBLEM) -> Kernels:
    pv = "f16" if pv_accum == "f32" else "e4m3"
    attn = KernelSpec("attn", "sm89", 128, problem.qk_bits, pv, pv_accum, "full",
                      "vsmooth" if problem.smooth_v else "vraw", "qsmooth" if problem.smooth_q else "qraw")
    stats, quant, delta, attention = (
        record_of(attn.companion(kind), tile=TILE) for kind in ("stats", "quant", "delta", "attn"))
    return Kernels(stats, quant, delta if problem.smooth_q else None, attention)


def field(launch, struct_name, name, code="i"):
    return struct.unpack_from("<" + code, launch.params, offsets(struct_name)[name])[0]


def run(problem=PROBLEM, **arguments):
    tensors = {"q": Q, "k": Q, "v": Q, "out": Q, "lse": 0, **arguments}
    return launches(plan(problem, kernels(problem=problem)), 2**30, **tensors, multiprocessors=132)


def test_grids_cover_every_tile():
    stats, merged, quant, attn = run()
    q_tiles, kv_tiles, chunks = 2, 4, 4
    assert stats.blocks == 2 * 3 * 2 * chunks
    assert merged.blocks == 2 * 3 * 2
    assert quant.blocks == 2 * 6 * q_tiles + 2 * (2 * 3 * kv_tiles // 2)
    assert attn.blocks == 2 * 6 * q_tiles


@pytest.mark.parametrize(("threads", "block_n", "headdim", "tiles"), [
    (256, 64, 64, 2), (256, 64, 128, 2), (256, 128, 64, 2), (256, 128, 128, 1)])
def test_a_block_takes_tiles_for_its_threads(threads, block_n, headdim, tiles):
    assert kv_tiles_per_block(threads, block_n, headdim) == tiles


def test_statistics_are_merged_by_a_second_launch_of_the_same_kernel():
    first, second, *_ = run()
    assert (first.record, second.record) == (kernels().stats, kernels().stats)
    assert [field(launch, "StatsParams", "merge") for launch in (first, second)] == [0, 1]
    differ = [name for name, code in FIELDS["StatsParams"] if code in "iQ"
              and field(first, "StatsParams", name, code) != field(second, "StatsParams", name, code)]
    assert differ == ["merge"]


def test_k_needs_no_statistics_where_it_is_not_smoothed():
    stats, merged, *_ = run(dataclasses.replace(PROBLEM, smooth_k=False))
    assert (stats.blocks, merged.blocks) == (2 * 3 * 4, 2 * 3 * 2)  # the mean is written all the same: zeros
    assert field(stats, "StatsParams", "smooth_k") == field(merged, "StatsParams", "smooth_k") == 0


def test_structs_hold_the_problem():
    stats, _, quant, attn = run(lse=2**41)
    assert field(stats, "StatsParams", "seqlen_kv") == 200
    assert field(quant, "QuantParams", "seqlen_q") == 130
    assert field(quant, "QuantParams", "softmax_scale_log2", "f") == pytest.approx(0.5 / math.log(2))
    assert field(attn, "AttnParams", "headdim") == 80
    assert field(attn, "AttnParams", "lse", "Q") == 2**41
    assert [struct.unpack_from("<Qqqq", quant.params, offsets("QuantParams")["q"])] == [(2**40, 1, 2, 3)]


@pytest.mark.parametrize("pv_accum", ["f32", "two_level_f32", "two_level_f16"])
@pytest.mark.parametrize("qk_bits", [8, 4])
@pytest.mark.parametrize("smooth_q", [False, True])
def test_buffers_are_aligned_disjoint_and_large_enough(pv_accum, qk_bits, smooth_q):
    problem = dataclasses.replace(PROBLEM, qk_bits=qk_bits, smooth_q=smooth_q)
    layout = plan(problem, kernels(pv_accum, problem))
    q_rows, keys = 2 * 6 * 2 * 128, 2 * 3 * 4 * 64
    chunks, statistics = 4, 4
    qk_row, v_row = 128 * qk_bits // 8, 128 * (2 if pv_accum == "f32" else 1)
    least = {"k_stats": 6 * chunks * statistics * 128 * 4, "v_stats": 6 * chunks * statistics * 128 * 4,
             "q_hat": q_rows * qk_row, "kv_hat": keys * (qk_row + v_row) + 2 * 3 * 4 * 128,
             "q_scale": q_rows // 4 * 4, "q_mean": 12 * 2 * 128 * 4 if smooth_q else 0, "k_mean": 6 * 128 * 4,
             "v_scale": 6 * 128 * 4, "v_mean": 6 * 128 * 4, "v_amax": 6 * 128 * 4,
             "k_finite": 6 * 4, "v_finite": 6 * 128 * 4, "row_bias": q_rows * 4, "taken": 4}
    if smooth_q:
        least["delta_s"] = 12 * 2 * 4 * 64 * 4
    assert set(layout.offsets) == set(least)
    starts = list(layout.offsets.values())
    assert starts == sorted(starts)
    for name, start, end in zip(layout.offsets, starts, [*starts[1:], layout.workspace_bytes]):
        assert start % ALIGNMENT == 0
        assert least[name] <= end - start < least[name] + ALIGNMENT


@pytest.mark.parametrize(("tensor", "headdim", "aligned"), [
    (TensorArgument(2**40, 1024, 512, 128), 128, True),
    (TensorArgument(2**40 + 8, 1024, 512, 128), 128, False),
    (TensorArgument(2**40, 1024, 512, 132), 128, False),
    (TensorArgument(2**40, 1024, 516, 128), 128, False),
    (TensorArgument(2**40, 1024, 512, 128), 100, False),
    (TensorArgument(2**40, 1024, 512, 128), 72, True),
])
def test_vector_loads_need_aligned_rows(tensor, headdim, aligned):
    assert tensor.aligned(headdim) is aligned
    quant = run(dataclasses.replace(PROBLEM, headdim=headdim), q=tensor, k=TensorArgument(0, 8, 8, 8),
                v=TensorArgument(0, 8, 8, 8))[2]
    assert field(quant, "QuantParams", "aligned") == aligned


@pytest.mark.parametrize("seqlen", [1, 63, 64, 65, 1024, 1025, 16384, 118800, 2**20 + 1])
def test_chunks_cover_the_sequence(seqlen):
    rows = chunk_rows_of(seqlen)
    chunks = math.ceil(seqlen / rows)
    assert rows % 64 == 0 and chunks <= MAX_CHUNKS and (chunks - 1) * rows < seqlen <= chunks * rows


def test_a_grid_beyond_the_limit_is_refused():
    with pytest.raises(UnsupportedError, match="blocks, a launch takes 2147483647; split the batch"):
        run(dataclasses.replace(PROBLEM, batch=2**30))


@pytest.mark.parametrize(("producer_warps", "multiprocessors", "blocks"), [(0, 5, 24), (4, 5, 10), (4, 132, 24)])
def test_blocks_of_a_kernel_with_producers_share_the_query_tiles(producer_warps, multiprocessors, blocks):
    chosen = kernels()
    tile = dataclasses.replace(TILE, producer_warps=producer_warps)
    chosen = dataclasses.replace(chosen, attn=dataclasses.replace(chosen.attn, tile=tile))
    *_, attn = launches(plan(PROBLEM, chosen), 2**30, Q, Q, Q, Q, 0, multiprocessors)
    assert attn.blocks == blocks
    assert field(attn, "AttnParams", "num_heads") == 12


# --- what smoothing adds ---


@pytest.mark.parametrize("smooth_q", [False, True])
@pytest.mark.parametrize("smooth_k", [False, True])
@pytest.mark.parametrize("smooth_v", [False, True])
def test_structs_say_what_is_smoothed(smooth_q, smooth_k, smooth_v):
    *stats, quant, _ = (launch for launch in run(dataclasses.replace(PROBLEM, smooth_q=smooth_q, smooth_k=smooth_k,
                                                                     smooth_v=smooth_v))
                        if launch.record.spec.kind != "delta")
    for launch in stats:
        assert [field(launch, "StatsParams", name) for name in ("smooth_k", "smooth_v")] == [smooth_k, smooth_v]
    assert [field(quant, "QuantParams", name) for name in ("smooth_q", "smooth_v")] == [smooth_q, smooth_v]


def test_without_smoothing_of_q_there_is_no_delta():
    assert [launch.record.spec.kind for launch in run()] == ["stats", "stats", "quant", "attn"]
    attn = run()[-1]
    assert (field(attn, "AttnParams", "delta_s", "Q"), field(attn, "AttnParams", "first_head")) == (0, 0)


@pytest.mark.parametrize(("pv_accum", "limit"), [("two_level_f32", 448.0), ("two_level_f16", 4.5), ("f32", 0.0)])
def test_v_is_scaled_to_what_the_accumulator_holds(pv_accum, limit):
    chosen = kernels(pv_accum)
    quant = launches(plan(PROBLEM, chosen), 2**30, Q, Q, Q, Q, 0, 132)[2]
    assert field(quant, "QuantParams", "v_limit", "f") == limit


def test_delta_precedes_attention_and_holds_the_problem():
    causal = dataclasses.replace(SMOOTH_Q, is_causal=True)
    *before, delta, attn = run(causal)
    kinds = [launch.record.spec.kind for launch in (*before, delta, attn)]
    assert kinds == ["stats", "stats", "quant", "delta", "attn"]
    assert delta.blocks == 2 * 6 * 1 * 4  # 2 query tiles, 4 * 64 keys, in blocks of 64 x 64
    values = {name: field(delta, "DeltaParams", name) for name, code in FIELDS["DeltaParams"] if code == "i"}
    assert values == {"first_head": 0, "num_heads": 12, "num_q_heads": 6, "num_kv_heads": 3, "seqlen_q": 130,
                      "seqlen_kv": 200, "headdim": 80, "q_tiles": 2, "columns": 256, "dtype": 1, "aligned": 0,
                      "block_m": 128, "block_n": 64, "is_causal": 1}
    assert struct.unpack_from("<Qqqq", delta.params) == (2**40, 1, 2, 3)


def test_kernels_agree_on_addresses():
    problem = dataclasses.replace(SMOOTH_Q, smooth_v=True)
    at = {name: 2**30 + offset for name, offset in plan(problem, kernels(problem=problem)).offsets.items()}
    for launch in run(problem):
        name = STRUCT_OF[launch.record.spec.kind]
        pointers = {field_name for field_name, code in FIELDS[name] if code == "Q"} - {"lse"}
        assert pointers <= at.keys()
        assert all(field(launch, name, pointer, "Q") == at[pointer] for pointer in pointers)


@pytest.mark.parametrize(("batch", "num_q_heads", "seqlen", "turns"), [
    (2, 6, 1000, 1),  # everything fits
    (2, 6, 32768, 2),  # 32 MiB a head: eight at once, then four
    (3, 7, 65536, 11),  # 128 MiB a head: two at once, the last one alone
    (1, 3, 100_000, 3),  # more than DELTA_BYTES a head: one at a time
])
def test_heads_take_turns_and_each_is_covered_once(batch, num_q_heads, seqlen, turns):
    problem = dataclasses.replace(SMOOTH_Q, batch=batch, num_q_heads=num_q_heads, num_kv_heads=1, seqlen_q=seqlen,
                                  seqlen_kv=seqlen)
    layout = plan(problem, kernels(problem=problem))
    head_bytes = 4 * layout.q_tiles * layout.kv_tiles * 64
    assert layout.workspace_bytes - layout.offsets["delta_s"] <= max(DELTA_BYTES, head_bytes) + ALIGNMENT
    _, _, _, *rest = run(problem)
    deltas, attns = rest[::2], rest[1::2]
    assert len(deltas) == len(attns) == turns
    covered = []
    for delta, attn in zip(deltas, attns):
        assert (delta.record.spec.kind, attn.record.spec.kind) == ("delta", "attn")
        first, count = field(delta, "DeltaParams", "first_head"), field(delta, "DeltaParams", "num_heads")
        assert field(attn, "AttnParams", "first_head") == first
        assert attn.blocks == count * layout.q_tiles
        assert delta.blocks == count * math.ceil(layout.q_tiles / 64) * layout.kv_tiles
        assert 1 <= count <= layout.heads_at_once
        covered += range(first, first + count)
    assert covered == list(range(batch * num_q_heads))


def test_the_workspace_of_delta_is_bounded_whatever_the_batch():
    many = dataclasses.replace(SMOOTH_Q, batch=64, num_q_heads=24, num_kv_heads=24, seqlen_q=16384, seqlen_kv=16384)
    layout = plan(many, kernels(problem=many))
    assert layout.workspace_bytes - layout.offsets["delta_s"] <= DELTA_BYTES
    assert 1 < layout.heads_at_once < 64 * 24
