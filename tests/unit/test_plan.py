"""Workspace, grids and structs of a call, without a device."""

from __future__ import annotations

import dataclasses
import math

import pytest
from records import STRUCTS, TILE, WGMMA_TILE, record_of

from sage_aot._kernels.spec import AttnSpec
from sage_aot._kernels.tile import Tile
from sage_aot._launch.choose import Kernels
from sage_aot._launch.plan import (
    ALIGNMENT,
    BY_K,
    BY_K_AND_Q,
    BY_NOTHING,
    DELTA_BYTES,
    LOG2_E,
    MISSING,
    OF_KV,
    Argument,
    Arguments,
    Strides,
    launches,
    plan,
    splits_of,
)
from sage_aot._launch.structs import NULL, WORD, FastDivmod, Packer, Tensor
from sage_aot._problem.options import Options
from sage_aot._problem.problem import Problem
from sage_aot.errors import ArgumentError, UnsupportedError

PROBLEM = Problem(batch=2, num_q_heads=6, num_kv_heads=3, seqlen_q=130, seqlen_kv=200, headdim=80, dtype="bf16",
                  softmax_scale=0.5, options=Options().resolved)


def changed(problem=PROBLEM, **changes):
    """A problem with other sizes or other options."""
    options = {name: changes.pop(name) for name in vars(problem.options) if name in changes}
    return dataclasses.replace(problem, options=dataclasses.replace(problem.options, **options).resolved, **changes)


SMOOTH_Q = changed(smooth_q=True)


def kernels(pv_accum="two_level_f32", problem=PROBLEM, family="mma", tile=TILE):
    options = problem.options
    attn = AttnSpec("sm89", 128, options.qk, "f16" if pv_accum == "f32" else "e4m3", pv_accum, "exp2",
                    "full", "vsmooth" if options.smooth_v else "vraw", "qsmooth" if options.smooth_q else "qraw")
    kinds = ["quant", "merge"] + ["pack"] * problem.has_key_mask + ["delta"] * bool(options.smooth_q)
    companions = {kind: record_of(attn.companion(kind), tile, family) for kind in kinds}
    return Kernels(record_of(attn, tile, family), companions)


def argument(name, at_16_bytes=True, strides=(1, 2, 3)):
    return Argument(name, Strides(*strides), at_16_bytes)


def run(problem=PROBLEM, chosen=None, sm_count=132, splits=1, returns_lse=False, **tensors):
    """The launches of a problem. Tensors that are not given have rows that are not aligned."""
    rows = {name: tensors.pop(name, argument(name)) for name in ("q", "k", "v", "out")}
    arguments = Arguments(**rows, optional=tensors, returns_lse=returns_lse)
    return launches(plan(problem, chosen or kernels(problem=problem), splits), arguments, sm_count)


def number(value):
    """The value of a field; of a divisor the divisor."""
    return value.divisor if isinstance(value, FastDivmod) else value


def test_grids_cover_every_tile():
    _, quant, attn = run()
    q_tiles, kv_tiles = 2, 4
    assert quant.blocks == 2 * 6 * q_tiles + 2 * (2 * 3 * kv_tiles // 2)
    assert attn.blocks == 2 * 6 * q_tiles


@pytest.mark.parametrize(("tiles", "blocks"), [(1, 4), (2, 2), (3, 2), (4, 1), (5, 1)])
def test_blocks_of_the_quantizer_take_as_many_tiles_as_it_says(tiles, blocks):
    chosen = kernels()
    quant = dataclasses.replace(chosen["quant"], facts={**chosen["quant"].facts, "kv_tiles_per_block": float(tiles)})
    launch = run(chosen=Kernels(chosen.attn, {**chosen.companions, "quant": quant}))[1]
    assert launch.blocks == 2 * 6 * 2 + 2 * (2 * 3 * blocks)


def test_statistics_precede_the_quantizer_with_a_block_for_k_and_one_for_v_of_each_head():
    statistics, quant, attn = run()
    assert statistics.blocks == 2 * 2 * 3 and statistics.record is quant.record
    assert statistics.entry == f"{quant.entry}_statistics" and statistics.params == quant.params
    assert {statistics.entry, quant.entry} <= set(quant.record.spec.entries)


@pytest.mark.parametrize(("options", "balance"), [
    ({}, BY_K_AND_Q), ({"smooth_q": True}, BY_K_AND_Q), ({"part": "kv", "num_q_heads": 3, "seqlen_q": 1}, BY_K),
    ({"smooth_k": False}, BY_NOTHING), ({"rotate": True}, BY_NOTHING), ({"qk": "int4"}, BY_NOTHING),
    ({"qk": "int4", "rotate": False}, BY_NOTHING), ({"part": "train"}, BY_NOTHING)], ids=str)
def test_int8_is_balanced_where_k_is_smoothed_and_not_rotated(options, balance):
    options = dict(options)
    problem = dataclasses.replace(changed(**{name: value for name, value in options.items() if name != "part"}),
                                  part=options.get("part", "all"))
    launched = [launch for launch in run(problem) if launch.record.spec.kind == "quant"]
    assert [launch.params["balance"] for launch in launched] == [balance] * 2


def test_structs_hold_the_problem():
    _, quant, attn = run()
    found = {name: number(quant.params[name]) for name in (
        "batch", "num_q_heads", "num_kv_heads", "seqlen_q", "seqlen_kv", "headdim", "q_tiles", "kv_tiles")}
    assert found == {"batch": 2, "num_q_heads": 6, "num_kv_heads": 3, "seqlen_q": 130, "seqlen_kv": 200, "headdim": 80,
                     "q_tiles": 2, "kv_tiles": 4}
    assert quant.params["softmax_scale_log2"] == pytest.approx(0.5 / math.log(2)) and LOG2_E == 1 / math.log(2)
    assert {name: number(attn.params[name]) for name in found} == found
    assert attn.params["q_heads_per_kv_head"] == FastDivmod.of(2)
    assert attn.params["num_heads"] == 12
    assert {launch.params["dtype"] for launch in run()} == {1}
    assert {launch.params["dtype"] for launch in run(changed(dtype="f16"))} == {0}
    assert {launch.params["dtype"] for launch in run(changed(dtype="f32"))} == {2}


def test_tensors_are_named_and_have_their_own_strides():
    tensors = {name: argument(name, strides=(i, 10 * i, 100 * i)) for i, name in enumerate(("q", "k", "v", "out"), 1)}
    expected = {name: Tensor((name, 0), *given.strides) for name, given in tensors.items()}
    _, quant, delta, attn = run(SMOOTH_Q, **tensors)
    assert [quant.params[name] for name in "qkv"] == [expected[name] for name in "qkv"]
    assert delta.params["k"] == expected["k"] and attn.params["out"] == expected["out"]
    assert attn.params["lse"] == ("lse", 0)


@pytest.mark.parametrize(("wanted", "problem", "how"), [
    (False, PROBLEM, {}), (True, PROBLEM, {"returns_lse": True}), (True, PROBLEM, {"splits": 2}),
    (True, changed(optional=("sinks",)), {"sinks": argument("sinks")}),
    (False, changed(smooth_k=False), {"returns_lse": True}), (False, changed(smooth_k=False), {"splits": 2}),
    (False, changed(part="train"), {"returns_lse": True}),
])
def test_the_quantizer_is_told_whether_scores_are_needed_as_they_were_before_smoothing(wanted, problem, how):
    assert run(problem, chosen=kernels(), **how)[0].params["wants_row_bias"] is wanted


def test_every_launch_fills_the_struct_that_its_kernel_takes():
    for launch in run(SMOOTH_Q, splits=2):
        layout = STRUCTS[launch.record.params]
        packed = Packer(layout).pack(launch.params)
        assert len(packed.data) == layout.size and WORD * len(packed.sources) == layout.size


@pytest.mark.parametrize("pv_accum", ["f32", "two_level_f32", "two_level_f16"])
@pytest.mark.parametrize("qk", ["int8", "int4"])
@pytest.mark.parametrize("smooth_q", [False, True])
def test_buffers_are_aligned_disjoint_and_large_enough(pv_accum, qk, smooth_q):
    problem = changed(qk=qk, smooth_q=smooth_q)
    layout = plan(problem, kernels(pv_accum, problem))
    q_rows, keys = 2 * 6 * 2 * 128, 2 * 3 * 4 * 64
    qk_row, v_row = 128 * int(qk[3:]) // 8, 128 * (2 if pv_accum == "f32" else 1)
    least = {"q_hat": q_rows * qk_row, "kv_hat": keys * (qk_row + v_row) + 2 * 3 * 4 * 128,
             "q_scale": q_rows // (1 if qk == "int4" else 4) * 4,
             "q_mean": 12 * 2 * 128 * 4 if smooth_q else 0, "k_mean": 6 * 128 * 4, "k_factor": 6 * 128 * 4,
             "q_unit": 6 * 4, "v_scale": 6 * 128 * 4, "v_inv_scale": 6 * 128 * 4, "v_mean": 6 * 128 * 4,
             "row_bias": q_rows * 4, "tile_counter": 4}
    if smooth_q:
        least["delta_s"] = 12 * 2 * 4 * 64 * 4
    assert set(layout.offsets) == set(least)
    starts = list(layout.offsets.values())
    assert starts == sorted(starts)
    for name, start, end in zip(layout.offsets, starts, [*starts[1:], layout.workspace_bytes]):
        assert start % ALIGNMENT == 0
        assert least[name] <= end - start < least[name] + ALIGNMENT


@pytest.mark.parametrize(("tensor", "headdim", "aligned"), [
    (argument("k", True, (1024, 512, 128)), 128, True),
    (argument("k", False, (1024, 512, 128)), 128, False),
    (argument("k", True, (1024, 512, 132)), 128, False),
    (argument("k", True, (1024, 516, 128)), 128, False),
    (argument("k", True, (1028, 512, 128)), 128, False),
    (argument("k", True, (1024, 512, 128)), 100, False),
    (argument("k", True, (1024, 512, 128)), 72, True),
])
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_vector_loads_need_aligned_rows_of_what_a_kernel_reads(name, tensor, headdim, aligned):
    assert tensor.aligned(headdim) is aligned
    others = {other: argument(other, strides=(8, 8, 8)) for other in "qkv"}
    tensors = {**others, name: tensor._replace(name=name)}
    _, quant, delta, _ = run(changed(SMOOTH_Q, headdim=headdim, dtype="f32"), **tensors)
    assert quant.entry.endswith("_any") and delta.entry.endswith("_any")
    _, quant, delta, _ = run(changed(SMOOTH_Q, headdim=headdim), **tensors)
    whole = headdim % 8 == 0
    assert quant.entry == f"{quant.record.name}_{'bf16' if aligned else 'any'}"
    assert delta.entry == f"{delta.record.name}_{'bf16' if (aligned if name == 'k' else whole) else 'any'}"


def test_a_grid_beyond_the_limit_is_refused():
    with pytest.raises(UnsupportedError, match="blocks, a launch takes 2147483647; split the batch"):
        run(changed(batch=2**30))


@pytest.mark.parametrize(("family", "sm_count", "blocks"), [
    ("mma", 5, 24), ("wgmma", 5, 10), ("wgmma", 132, 24)])
def test_blocks_of_a_persistent_family_share_the_query_tiles(family, sm_count, blocks):
    *_, attn = run(chosen=kernels(family=family, tile=TILE), sm_count=sm_count)
    assert (attn.blocks, attn.params["num_heads"]) == (blocks, 12)


def test_tiles_are_those_of_the_attention_kernel():
    layout = plan(PROBLEM, kernels(family="wgmma", tile=WGMMA_TILE))
    assert (layout.q_tiles, layout.kv_tiles) == (2, 2)


# --- what smoothing adds ---


@pytest.mark.parametrize("smooth_q", [False, True])
@pytest.mark.parametrize("smooth_k", [False, True])
@pytest.mark.parametrize("smooth_v", [False, True])
def test_structs_say_what_is_smoothed(smooth_q, smooth_k, smooth_v):
    problem = changed(smooth_q=smooth_q, smooth_k=smooth_k, smooth_v=smooth_v)
    quant = run(problem)[1]
    assert [quant.params[f"smooth_{name}"] for name in "qkv"] == [smooth_q, smooth_k, smooth_v]


@pytest.mark.parametrize(("options", "rotate"), [
    ({}, False), ({"rotate": True}, True), ({"rotate": False}, False)])
def test_structs_say_whether_rows_are_rotated(options, rotate):
    assert run(changed(**options))[0].params["rotate"] == rotate


@pytest.mark.parametrize("clip", [False, True])
def test_structs_say_whether_scales_clip(clip):
    assert run(changed(clip=clip))[0].params["clip"] == clip


def test_without_smoothing_of_q_there_is_no_delta():
    assert [launch.record.spec.kind for launch in run()] == ["quant", "quant", "attn"]
    attn = run()[-1]
    assert (attn.params["delta_s"], attn.params["first_head"]) == (NULL, 0)
    assert "delta_s" not in plan(PROBLEM, kernels()).offsets


@pytest.mark.parametrize(("pv_accum", "least", "limit"), [
    ("two_level_f32", 14.0, 448.0), ("two_level_f16", 4.5 / 32, 4.5), ("f32", 2.0**-4, 2.0**15)])
def test_v_is_scaled_to_what_the_accumulator_holds(pv_accum, least, limit):
    quant = run(chosen=kernels(pv_accum))[0]
    assert (quant.params["v_least"], quant.params["v_limit"]) == (least, limit)


def test_delta_precedes_attention_and_holds_the_problem():
    causal = changed(SMOOTH_Q, is_causal=True)
    *before, delta, attn = run(causal)
    kinds = [launch.record.spec.kind for launch in (*before, delta, attn)]
    assert kinds == ["quant", "quant", "delta", "attn"]
    assert delta.blocks == 2 * 6 * 1 * 4  # 2 query tiles, 4 * 64 keys, in blocks of 64 x 64
    fields = STRUCTS["DeltaParams"].fields
    values = {name: number(delta.params[name]) for name, (code, _) in fields.items() if code in "iD"}
    assert values == {"batch": 2, "first_head": 0, "num_heads": 12, "num_q_heads": 6, "num_kv_heads": 3,
                      "q_heads_per_kv_head": 2, "seqlen_q": 130, "seqlen_kv": 200, "headdim": 80, "q_tiles": 2,
                      "columns": 256, "key_blocks": 4, "tile_blocks": 1, "dtype": 1, "block_m": 128, "block_n": 64,
                      "window_left": 330, "window_right": 0}


@pytest.mark.parametrize(("edge", "blocks"), [(64, 12 * 1 * 4), (128, 12 * 1 * 2), (2, 12 * 1 * 128)])
def test_delta_has_blocks_for_the_edge_that_it_says(edge, blocks):
    chosen = kernels(problem=SMOOTH_Q)
    delta = dataclasses.replace(chosen["delta"], facts={**chosen["delta"].facts, "tile": float(edge)})
    assert run(SMOOTH_Q, Kernels(chosen.attn, {**chosen.companions, "delta": delta}))[2].blocks == blocks


def test_kernels_agree_on_addresses():
    """Fields of one name, such as q_hat, have the same address in the structs of all kernels."""
    problem = changed(SMOOTH_Q, smooth_v=True, optional=("key_mask",))
    offsets, met = plan(problem, kernels(problem=problem)).offsets, set()
    for launch in run(problem):
        fields = STRUCTS[launch.record.params].fields
        pointers = {name: launch.params[name] for name, (code, _) in fields.items()
                    if code == "Q" and name not in (
                        "lse", "cu_seqlens_q", "cu_seqlens_k", "tile_lists", "tile_counts", "key_bits")}
        assert pointers == {name: ("workspace", offsets[name]) for name in pointers}
        met |= set(pointers)
    assert met == set(offsets)


# One query a head, or a chunk of a prompt, on an H200; kernels of 128 rows and 128 keys a tile.
@pytest.mark.parametrize(("heads", "queries", "keys", "expected"), [
    (8, 4, 32768, 16),  # eight tiles, and 132 blocks at once
    (8, 4, 512, 1),  # too few keys to gain by it
    (32, 16, 8192, 4), (32, 128, 8192, 4), (64, 128, 8192, 2),
    (128, 128, 8192, 1),  # nearly as many tiles as blocks at once
    (132, 128, 10**6, 1), (133, 128, 10**6, 1), (1000, 1, 8192, 1),  # the tiles fill the GPU
    (1, 1, 10**6, 64),  # no more than the kernel merges
    (1, 0, 8192, 1), (1, 1, 0, 1),  # nothing to share
])
def test_keys_are_split_where_query_tiles_do_not_fill_the_gpu(heads, queries, keys, expected):
    problem = changed(batch=1, num_q_heads=heads, num_kv_heads=heads, seqlen_q=queries, seqlen_kv=keys)
    chosen = kernels(family="wgmma", tile=WGMMA_TILE)
    assert splits_of(problem, chosen, 132) == expected
    assert splits_of(changed(problem, part="kv"), chosen, 132) == 1


# Where a block is not a tile of 128 keys of 128 channels, alone on its SM and full of queries.
@pytest.mark.parametrize(("block_m", "block_n", "min_blocks", "headdim", "heads", "queries", "keys", "expected"), [
    (64, 64, 3, 128, 100, 128, 32768, 7),  # several blocks an SM: 200 tiles do not fill the GPU
    (128, 64, 2, 128, 8, 256, 2048, 11), (128, 64, 3, 128, 100, 256, 32768, 7),  # two query tiles a head, both full
    (128, 64, 3, 256, 100, 4, 8192, 7), (128, 64, 1, 256, 100, 64, 8192, 5),  # wider rows, few of them
    (128, 64, 2, 64, 100, 64, 8192, 5),  # narrow rows cost as much as those of 128 channels
    (64, 64, 3, 256, 64, 256, 2048, 1),  # merging would cost more than it saves
    (64, 64, 3, 128, 396, 1, 10**6, 1),  # the tiles fill the GPU
])
def test_the_number_of_splits_follows_from_tile_and_head_dim(block_m, block_n, min_blocks, headdim, heads, queries,
                                                             keys, expected):
    problem = changed(batch=1, num_q_heads=heads, num_kv_heads=heads, seqlen_q=queries, seqlen_kv=keys)
    chosen = kernels(tile=Tile(block_m, block_n, 16, 2, min_blocks))
    attn = dataclasses.replace(chosen.attn, spec=dataclasses.replace(chosen.attn.spec, headdim=headdim))
    assert splits_of(problem, Kernels(attn, chosen.companions), 132) == expected


@pytest.mark.parametrize(("window", "expected"), [
    ((127, 0), 1), ((4095, 0), 12), ((127, -1), 16), ((-1, 127), 16)])  # KV tiles that the window shows are shared
def test_blocks_share_the_keys_of_a_window(window, expected):
    problem = changed(batch=1, num_q_heads=8, num_kv_heads=8, seqlen_q=4, seqlen_kv=32768, window=window)
    assert splits_of(problem, kernels(family="wgmma", tile=WGMMA_TILE), 132) == expected


@pytest.mark.parametrize("splits", [-1, 0, 65])
def test_numbers_of_splits_that_the_merge_kernel_does_not_take_are_refused(splits):
    with pytest.raises(ArgumentError, match=f"splits: expected 1 to 64, got {splits}; pass as many as sage_merge_sm8"):
        plan(PROBLEM, kernels(), splits)


@pytest.mark.parametrize("tokens", [None, (260, 400)])
def test_blocks_that_share_keys_store_partial_results_which_a_last_launch_merges(tokens):
    problem = changed(SMOOTH_Q, headdim=78, tokens=tokens)
    rows = 6 * 260  # of all heads, either way
    layout = plan(problem, kernels(problem=problem), 3)
    whole = plan(problem, kernels(problem=problem))
    assert (layout.sizes["partial_out"], layout.sizes["partial_lse"]) == (3 * rows * 80 * 4, 3 * rows * 4)
    assert "merge" not in whole.kernels.companions and not {"partial_out", "partial_lse"} & set(whole.sizes)
    _, quant, delta, attn, merge = run(problem, splits=3)
    assert attn.blocks == 3 * 6 * (2 * 2 if tokens is None else 260 // 128 + 2)
    head = (130 if tokens is None else 260) * 80
    out = Tensor(("workspace", layout.offsets["partial_out"]), 6 * head if tokens is None else 0, head, 80)
    assert (attn.params["out"], attn.params["dtype"], attn.params["headdim"]) == (out, 2, 80)
    assert attn.params["lse"] == merge.params["partial_lse"] == ("workspace", layout.offsets["partial_lse"])
    assert merge.params["partial_out"] == out.data
    assert (merge.params["out"], merge.params["lse"], merge.params["dtype"]) == (argument("out").tensor, ("lse", 0), 1)
    assert (merge.params["headdim"], merge.params["partial_headdim"]) == (78, 80)
    assert (quant.params["headdim"], delta.params["headdim"]) == (78, 78)
    assert {number(launch.params["splits"]) for launch in (attn, merge)} == {3}
    assert {launch.params["split_rows"] for launch in (attn, merge)} == {rows}
    row_blocks = math.ceil(130 / 8) if tokens is None else 260 // 8 + 2
    assert number(merge.params["row_blocks"]) == row_blocks
    assert merge.blocks == row_blocks * (12 if tokens is None else 6)


def test_a_key_mask_is_packed_first_by_a_block_a_batch_entry():
    masked = changed(optional=("key_mask",))
    strides = Argument("key_mask", Strides(700, 0, 3), False)
    pack, statistics, quant, attn = run(masked, key_mask=strides)
    assert (pack.record.spec.kind, pack.blocks, pack.entry) == ("pack", 2, pack.record.name)
    assert pack.params["key_mask"] == strides.tensor
    sizes = plan(masked, kernels(problem=masked)).sizes
    assert (sizes["key_rank"], sizes["key_index"]) == (2 * 201 * 4, 2 * 200 * 4)
    for launch in (statistics, quant, attn):
        assert launch.params["key_rank"][0] == "workspace" and launch.params["key_rank"] == pack.params["key_rank"]
    for launch in run():
        assert launch.record.spec.kind != "pack" and launch.params["key_rank"] == launch.params["key_index"] == NULL


@pytest.mark.parametrize(("batch", "num_q_heads", "seqlen", "launched"), [
    (2, 6, 1000, 1),  # everything fits
    (2, 6, 32768, 2),  # 32 MiB a head: eight at once, then four
    (3, 7, 65536, 11),  # 128 MiB a head: two at once, the last one alone
    (1, 3, 100_000, 3),  # more than DELTA_BYTES a head: one at a time
])
def test_heads_are_computed_in_several_launches_and_each_is_covered_once(batch, num_q_heads, seqlen, launched):
    problem = changed(SMOOTH_Q, batch=batch, num_q_heads=num_q_heads, num_kv_heads=1, seqlen_q=seqlen,
                      seqlen_kv=seqlen)
    layout = plan(problem, kernels(problem=problem))
    head_bytes = 4 * layout.q_tiles * layout.kv_tiles * 64
    assert layout.workspace_bytes - layout.offsets["delta_s"] <= max(DELTA_BYTES, head_bytes) + ALIGNMENT
    _, _, *rest = run(problem)
    deltas, attns = rest[::2], rest[1::2]
    assert len(deltas) == len(attns) == launched
    covered = []
    for delta, attn in zip(deltas, attns):
        assert (delta.record.spec.kind, attn.record.spec.kind) == ("delta", "attn")
        first, count = delta.params["first_head"], delta.params["num_heads"]
        assert (attn.params["first_head"], attn.params["num_heads"]) == (first, count)
        assert attn.blocks == count * layout.q_tiles
        assert delta.blocks == count * math.ceil(layout.q_tiles / 64) * layout.kv_tiles
        assert 1 <= count <= layout.heads_at_once
        covered += range(first, first + count)
    assert covered == list(range(batch * num_q_heads))


def test_the_workspace_of_delta_is_bounded_whatever_the_batch():
    many = changed(SMOOTH_Q, batch=64, num_q_heads=24, num_kv_heads=24, seqlen_q=16384, seqlen_kv=16384)
    layout = plan(many, kernels(problem=many))
    assert layout.workspace_bytes - layout.offsets["delta_s"] <= DELTA_BYTES
    assert 1 < layout.heads_at_once < 64 * 24


# --- sequences in one tensor ------------------------------------------------------------------------------------------


def first_slot(begin, sequence, block):
    """First slot of a sequence, as problem/sequences.cuh has it."""
    return begin // block + sequence


@pytest.mark.parametrize("lengths", [(130,), (1, 1, 1), (0, 129, 0, 128, 127), (64, 65, 0, 0), (500, 0, 1)], ids=str)
@pytest.mark.parametrize("block", [1, 64, 128, 192])
def test_slots_of_sequences_do_not_overlap_and_are_no_more_than_planned(lengths, block):
    tokens, begin, end = sum(lengths), 0, 0
    for sequence, length in enumerate(lengths):
        first = first_slot(begin, sequence, block)
        assert first >= end
        begin, end = begin + length, first + math.ceil(length / block)
    problem = changed(batch=len(lengths), tokens=(tokens, tokens))
    tile = TILE._replace(block_m=block, block_n=block)
    layout = plan(problem, kernels(tile=tile))
    assert end <= layout.q_tiles == layout.kv_tiles == tokens // block + len(lengths)


def test_sequences_share_heads_and_have_channels_of_their_own():
    problem = changed(batch=5, seqlen_q=130, seqlen_kv=200, tokens=(400, 700))
    layout = plan(problem, kernels())
    q_tiles, kv_tiles = 400 // 128 + 5, 700 // 64 + 5
    assert (layout.q_tiles, layout.kv_tiles, layout.columns) == (q_tiles, kv_tiles, 256)
    assert layout.sizes["row_bias"] == 6 * q_tiles * 128 * 4
    assert layout.sizes["k_mean"] == layout.sizes["v_scale"] == 5 * 3 * 128 * 4
    statistics, quant, attn = run(problem)
    assert statistics.blocks == 2 * 5 * 3
    assert quant.blocks == 3 * (2 * (700 // 128 + 5) + 2 * q_tiles) and attn.blocks == 6 * q_tiles
    assert quant.params["kv_blocks"] == 700 // 128 + 5
    assert quant.params["blocks_per_kv_head"].divisor == quant.blocks / 3
    assert attn.params["cu_seqlens_q"] == ("cu_seqlens_q", 0) and run()[1].params["cu_seqlens_q"] == NULL
    assert (attn.params["q_rows"], quant.params["kv_rows"]) == (400, 700)


def test_delta_of_sequences_has_blocks_for_the_slots_of_its_rows():
    problem = changed(SMOOTH_Q, batch=5, seqlen_q=130, seqlen_kv=200, tokens=(20_000, 700))
    *_, delta, _ = run(problem)
    assert delta.params["tile_blocks"].divisor == 20_000 // (64 * 128) + 5 and delta.params["key_blocks"].divisor == 4
    assert delta.blocks == 6 * 4 * (20_000 // (64 * 128) + 5)


# --- k and v quantized by a call of their own -------------------------------------------------------------------------


MISSES = {name: Argument(name, MISSING, at_16_bytes=True) for name in ("q", "k", "v", "out")}
ALIGNED = Strides(0, 8 * 1024, 80)


@pytest.mark.parametrize("has_key_mask", [False, True])
def test_the_call_that_quantizes_k_and_v_has_no_blocks_and_no_memory_for_q(has_key_mask):
    problem = changed(SMOOTH_Q, part="kv", num_q_heads=3, seqlen_q=1, optional=("key_mask",) * has_key_mask)
    own = {name: argument(name) for name in ("k", "v", "key_mask")}
    *before, quantizer = run(problem, **{**MISSES, **own})
    assert [launch.record.spec.kind for launch in (*before, quantizer)] == ["pack"] * has_key_mask + ["quant"] * 2
    assert quantizer.blocks == 2 * 3 * 2 * quantizer.params["kv_blocks"] > 0  # batch entries, heads, K and V
    layout = plan(problem, kernels(problem=problem))
    assert [name for name in layout.offsets if layout.sizes[name]] == ["v_inv_scale", "tile_counter"]
    kept = {name for name in OF_KV if has_key_mask or not name.startswith("key_")}
    assert layout.kept_offsets.keys() == kept
    assert all(quantizer.params[name] == ("kept", layout.kept_offsets[name]) for name in kept)


def test_the_call_with_quantized_k_and_v_reads_them_where_the_other_call_wrote_them():
    written = plan(changed(part="kv", num_q_heads=3, seqlen_q=1), kernels())
    problem = changed(part="q")
    layout = plan(problem, kernels())
    assert (layout.kept_offsets, layout.kept_bytes) == (written.kept_offsets, written.kept_bytes)
    assert not layout.offsets.keys() & layout.kept_offsets.keys()
    quantizer, attention = run(problem, **{**MISSES, "q": argument("q"), "out": argument("out")})
    assert quantizer.params["kv_blocks"] == 0 and quantizer.blocks == 2 * 6 * layout.q_tiles
    assert attention.params["kv_hat"] == ("kept", layout.kept_offsets["kv_hat"])
    assert attention.params["q_hat"] == ("workspace", layout.offsets["q_hat"])


@pytest.mark.parametrize("part", ["kv", "q"])
def test_each_call_asks_for_aligned_rows_of_the_tensors_that_it_reads(part):
    problem = changed(part=part, **({"num_q_heads": 3, "seqlen_q": 1} if part == "kv" else {}))
    read = {"kv": ("k", "v"), "q": ("q",)}[part]
    aligned = MISSES | {name: argument(name, strides=ALIGNED) for name in read}
    ends = {"kv": ["_statistics", ""], "q": [""]}[part]

    def entries(**tensors):
        launched = (launch for launch in run(problem, **tensors) if launch.record.spec.kind == "quant")
        return [launch.entry.removeprefix(launch.record.name) for launch in launched]

    assert entries(**aligned) == [f"_bf16{end}" for end in ends]
    for name in read:
        assert entries(**aligned | {name: argument(name, False, ALIGNED)}) == [f"_any{end}" for end in ends]
