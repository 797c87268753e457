"""Bugs drawn by chance, one for each function of the kernels' headers, in addition to those that mutations.py names.

What is drawn for a function depends on its own code alone. A bug that nothing shows is either a gap of the suite, to be
closed by a case, or does no harm, which HARMLESS then says; the function's next bug, where it has one, takes its place.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Container, Iterable, Iterator
from functools import cache

from headers import Place, by_words, code_of, places_in
from mutations import MUTATIONS
from operations import Always, Drop, First, Indices, OffByOne, Operation, Phase, Second, Sign
from schemata import Bug, can_be_switched
from simbuild import PROJECT
from tree_sitter import Node

OPERATIONS: tuple[type[Operation], ...] = (Drop, Always, OffByOne, Sign, First, Second, Indices, Phase)
"""Operations whose results compile wherever they apply."""

_INT8 = "sm80_d64_qkint8_pvf16_accf32_full_vraw_qraw"
_INT8_CAUSAL = "sm80_d64_qkint8_pvf16_accf32_causal_vraw_qraw"
_WIDE_CAUSAL = "sm86_d128_qkint8_pvf16_accf32_causal_vraw_qraw"
_INT4 = "sm80_d64_qkint4_pvf16_accf32_full_vraw_qraw"
_K_INF = "sm80_d64_qkint4_pvf16_accf32_causal_vraw_qraw"
_V_NAN = "sm80_d64_qkint8_pvf16_accf32_causal_vsmooth_qraw"
_V_INF = "sm89_d128_qkint8_pve4m3_acc2f16_causal_vraw_qraw"
_SMOOTH = "sm86_d64_qkint8_pvf16_accf32_causal_vsmooth_qsmooth"
_E4M3 = "sm89_d64_qkint8_pve4m3_acc2f32_full_vraw_qraw"
_E4M3_INT4 = "sm89_d64_qkint4_pve4m3_acc2f16_causal_vraw_qsmooth"
_E4M3_INT4_RAW = "sm89_d64_qkint4_pve4m3_acc2f16_full_vraw_qraw"
_HOPPER = "sm90_d64_qkint8_pve4m3_acc2f32_full_vraw_qraw"
_HOPPER_CAUSAL = "sm90_d64_qkint8_pve4m3_acc2f32_causal_vraw_qraw"
_HOPPER_WIDE = "sm90_d128_qkint8_pve4m3_acc2f32_full_vraw_qraw"
_HOPPER_WIDE_CAUSAL = "sm90_d128_qkint8_pve4m3_acc2f32_causal_vraw_qraw"
_HOPPER_SMOOTH = "sm90_d128_qkint8_pve4m3_acc2f32_causal_vsmooth_qsmooth"
_MANY_SPLITS = "sm80_d128_qkint8_pvf16_accf32_full_vsmooth_qraw"
_MXFP8 = "sm120_d64_qkint8_pve4m3_accf32_full_vraw_qraw"
_NVFP4 = "sm120_d64_qknvfp4_pvnvfp4_accf32_full_vraw_qsmooth"
_NVFP4_WIDE = "sm120_d128_qknvfp4_pvnvfp4_accf32_full_vraw_qsmooth"
_NVFP4_CAUSAL = "sm120_d128_qknvfp4_pvnvfp4_accf32_causal_vsmooth_qsmooth"
_INT8_256 = "sm80_d256_qkint8_pvf16_accf32_full_vraw_qraw"
_HOPPER_256 = "sm90_d256_qkint8_pve4m3_acc2f32_full_vraw_qraw"
_E4M3_F16 = "sm89_d128_qkint8_pve4m3_acc2f16_full_vsmooth_qraw"
_SPARSE = "sm80_d64_qkint8_pvf16_accf32_sparse_vraw_qraw"
_SPARSE_HOPPER = "sm90_d128_qkint8_pve4m3_acc2f32_plinear_sparse_vsmooth_qsmooth"
_SPARSE_LINEAR = "sm90_d64_qkint8_pve4m3_acc2f32_plinear_sparse_vraw_qraw"
_SPARSE_NARROW = "sm90_d64_qkint8_pve4m3_acc2f32_plinear_sparse_vsmooth_qsmooth"
_SPARSE_SHORT = "sm80_d256_qkint8_pvf16_accf32_sparse_vraw_qraw"
_SPARSE_256 = "sm90_d256_qkint8_pve4m3_acc2f32_sparse_vraw_qraw"
_LINEAR = "sm90_d128_qkint8_pve4m3_acc2f32_plinear_full_vraw_qraw"
_LINEAR_NARROW = "sm90_d64_qkint8_pve4m3_acc2f32_plinear_full_vraw_qraw"
_LINEAR_SMOOTH = "sm90_d64_qkint8_pve4m3_acc2f32_plinear_causal_vsmooth_qsmooth"

_LINE = "sm89_d64_qkint8_pve4m3_acc2f32_plinear_full_vraw_qraw"
_LINE_LARGE = "sm89_d128_qkint8_pve4m3_acc2f32_plinear_full_vraw_qraw"

SHOWN_BY = {
    "attn/wgmma/": (_HOPPER, _HOPPER_WIDE, _HOPPER_SMOOTH, _HOPPER_256, _LINEAR, _LINEAR_SMOOTH, _SPARSE_LINEAR,
                    _SPARSE_HOPPER, _SPARSE_NARROW),
    "problem/tile_scheduler.cuh": (_HOPPER_WIDE, _HOPPER_SMOOTH),
    "tile/": (_HOPPER_WIDE, _INT8, _HOPPER_256, _LINEAR),
    "attn/epilogue.cuh": (_HOPPER_WIDE, _INT8, _HOPPER_SMOOTH, _K_INF, _V_NAN, _INT8_256, _SPARSE, _SPARSE_HOPPER),
    "attn/apply_mask.cuh": (_INT8, _SMOOTH, _K_INF, _SPARSE),
    "attn/spoilt.cuh": (_INT8, _E4M3_INT4, _SMOOTH, _K_INF, _V_NAN, _SPARSE),
    "attn/row_references.cuh": (_E4M3, _INT8, _HOPPER, _INT4, _E4M3_INT4, _E4M3_INT4_RAW, _NVFP4, _NVFP4_CAUSAL),
    "attn/linear_p.cuh": (_LINEAR, _LINEAR_SMOOTH),
    "attn/mma/softmax.cuh": (_E4M3, _INT8, _INT4, _E4M3_INT4, _E4M3_INT4_RAW, _NVFP4, _NVFP4_CAUSAL, _LINE,
                             _LINE_LARGE),
    "attn/merge.cuh": (_INT8, _HOPPER_WIDE, _MANY_SPLITS),
    "attn/mma/nvfp4.cuh": (_NVFP4, _NVFP4_WIDE, _NVFP4_CAUSAL),
    "attn/mma/pv.cuh": (_INT8, _E4M3_INT4, _SMOOTH, _MXFP8, _LINE),
    "attn/mma/kv_stream.cuh": (_INT8, _E4M3_INT4, _SMOOTH, _NVFP4, _SPARSE, _WIDE_CAUSAL),
    "attn/mma/mainloop.cuh": (_INT8, _E4M3_INT4, _SMOOTH, _K_INF, _V_NAN, _SPARSE, _LINE, _WIDE_CAUSAL),
    "attn/": (_INT8, _E4M3_INT4, _SMOOTH, _K_INF, _V_NAN, _SPARSE),
    "problem/work_tile.cuh": (_INT8, _SMOOTH, _HOPPER, _HOPPER_WIDE, _K_INF, _V_NAN, _SPARSE),
    "problem/mask.cuh": (_INT8, _SMOOTH, _HOPPER_WIDE, _K_INF, _V_NAN, _INT8_CAUSAL, _SPARSE),
    "problem/sparse_mask.cuh": (_SPARSE, _SPARSE_HOPPER, _SPARSE_256, _SPARSE_NARROW),
    "problem/kv_range.cuh": (_INT8, _SMOOTH, _HOPPER_WIDE, _K_INF, _V_NAN, _SPARSE, _SPARSE_HOPPER),
    "problem/": (_INT8, _SMOOTH, _HOPPER_WIDE, _K_INF, _V_NAN),
    "quant/statistics.cuh": (_E4M3_INT4, _INT8, _SMOOTH, _K_INF, _INT8_256, _E4M3_F16),
    "quant/tile_lists.cuh": (_SPARSE, _SPARSE_HOPPER, _SPARSE_LINEAR, _SPARSE_SHORT),
    "quant/delta_s.cuh": (_SMOOTH, _E4M3_INT4, _HOPPER_SMOOTH),
    "quant/quantize_k.cuh": (_E4M3_INT4, _INT8, _SMOOTH, _K_INF, _INT8_256, _LINEAR, _LINEAR_NARROW),
    "quant/quantize_v.cuh": (_E4M3_INT4, _INT8, _SMOOTH, _V_NAN, _V_INF, _INT8_256, _NVFP4),
    "quant/v_pieces.cuh": (_E4M3_INT4, _INT8, _SMOOTH, _V_NAN, _V_INF, _INT8_256, _NVFP4),
    "numerics/nvfp4.cuh": (_NVFP4, _NVFP4_CAUSAL),
    "numerics/scale.cuh": (_E4M3_INT4, _INT8, _SMOOTH, _NVFP4),
    "quant/rows.cuh": (_E4M3_INT4, _INT8, _SMOOTH, _K_INF, _INT8_256, _NVFP4),
    "bwd/wgmma/": (_HOPPER, _HOPPER_CAUSAL, _HOPPER_WIDE, _HOPPER_WIDE_CAUSAL),
    "bwd/prepare.cuh": (_INT8, _INT8_CAUSAL, _HOPPER_WIDE, _WIDE_CAUSAL, _HOPPER, _HOPPER_CAUSAL),
    "bwd/": (_INT8, _INT8_CAUSAL, _HOPPER_WIDE, _WIDE_CAUSAL, _HOPPER),
    "": (_E4M3_INT4, _INT8, _SMOOTH, _K_INF, _INT8_256),
}
"""Kernels that show a header's bugs, tried in this order, by the beginning of its path; the first that fits counts."""

BACKWARD_ALONE = ("copy_async", "rounded_bytes", "first_causal_query")
"""Functions outside of bwd/ that the backward kernels alone call, or of which they alone reach the drawn bug."""

HARMLESS: dict[tuple[str, Operation], str] = {
    ("BwdPrepare::prepare_q", Sign("rows.count - first_row")):
            "a copy of the last row behind it counts as a row with codes, and a row of zeros next to it keeps a scale",
    ("KvStream::KvStream", Always(
        "if constexpr (Config::kSmoothQ) { const i64 row = delta_s_index(work.q_head - params.first_head, "
        "params.q_tiles, work.q_tile, params.columns); delta_ = params.delta_s + row + work.first_key + "
        "ptx::thread_index() * 4; }")):
            "an address that nothing reads",
    ("AttentionWgmma::fill_units", OffByOne("i < Shared::kUnitBytes")): "what stands behind the units is loaded later",
    ("Mainloop::scales_of", OffByOne("kSlices == 1")): "the index of the thread for that of the lane",
    ("Mainloop::scales_of", First("kSlices == 1 ? lane : static_cast<i32>(ptx::thread_index())")):
        "the index of the lane for that of the thread",
    ("Mainloop::scales_of", Second("kSlices == 1 ? lane : static_cast<i32>(ptx::thread_index())")):
        "the index of the thread for that of the lane",
    ("Source::element_bytes", First("kSource == SourceRows::kAny ? bytes_of(dtype) : static_cast<i32>(sizeof(u16))")):
        "the same of f16 and bf16",
    ("HeldRows::load", Always("if constexpr (kHeld) { for (i32 i = 0; i < kUnroll; ++i) held[i] = load_row(i); }")):
        "loads a row that get() loads again",
    ("Sample::opaque", Drop("word = ptx::opaque(word);")): "a fence for the compiler",
    ("Mainloop::rescale_r", OffByOne("v_factor != r_factor")): "R is multiplied by one where it could stay",
    ("Mainloop::rescale_r", Always(
        "if (ptx::any(moved)) { const float ratio = r_factor * reciprocal_of_power_of_two(v_factor); for (i32 i = 0; "
        "i < kOutputs + 4; ++i) { const float factor = i < kOutputs ? alpha[i % 4 / 2] * ratio : alpha[i % 4 / 2]; "
        "acc_r[i] = __float_as_uint(__uint_as_float(acc_r[i]) * factor); } change_factor(); }")):
            "R is multiplied by one where it could stay",
    ("Statistics::store_largest_of_q", OffByOne("i < kSamples")): "a row of Q more",
    ("Statistics::is_known", OffByOne(
        "shared.magnitude[channel] >= fmaxf(kRoundingOfMean * fabsf(shared.mean[channel]), kSmallestAbsMax)")):
            "of one value alone, for which either magnitude is right",
    ("Mainloop::keep_in_front", Drop("ptx::mbarrier_wait(shared.full(here.index), here.phase);")):
        "a fence for the compiler",
    ("PingPong::arrive", Sign("barrier(1 - consumer) + never")): "`never` is zero",
    ("SharedStorage::query_empty", Sign("query_full(buffer) + 8")):
        "in front of the barriers stands the padding of a staged row",
    ("KvTileScales::spoilt", OffByOne("static_cast<i32>(signs()) < 0")): "v_factor is never zero, so signs() is not",
    ("OnlineSoftmax::fits", OffByOne("top <= kMost<kOwnP>")): "a P at the end of its range moves its reference",
    ("AttentionMma::WarpState::step", Always(
        "if (!softmax.template fits<kOwnP, true>(acc_s, scale, offset)) softmax.finish_line(acc_s, scale, offset);")):
            "the same bytes, but for the rounding of an offset",
    ("RowReferences::follow_tile", OffByOne("fall < 0.0f")): "moves a reference to where it is",
    ("OnlineSoftmax::move_references",
     Second("Product::kSumsRounded ? this->row_sum[r] : ptx::max_over_lanes<4>(lse_sum[r])")):
        "a quarter of the sums in another unit, whose bound is as far from what is finite",
    ("OnlineSoftmax::foldable", OffByOne("of_row < Product::kLargestFolded")):
        "of one value alone, for which either way is right",
    ("kv_range", Sign("min(first_row + kRows, seqlen.q()) - 1")): "one KV tile more, masked as a whole",
    ("warp_sees", OffByOne("keys.begin < Config::kBlockN")): "a warp goes over a KV tile that its rows do not see",
    ("warp_sees", OffByOne("keys.end > 0")): "a warp goes over a KV tile that its rows do not see",
    ("AttentionMma::warp_sees", Always(
        "if constexpr (Config::kMask == Mask::kSparse) { const TileEntry entry = entry_at<Config>(params, work, "
        "place); const i32 row_block = ptx::thread_index() / kWarpSize * Config::kWarpM / kMaskBlock; if "
        "(!entry.template sees<kKeyBlocks<Config>>(row_block)) return false; if (entry.has_elements()) return true; "
        "tile = entry.tile(); }")): "without a list an entry shows every block of the KV tile at the place",
    ("SpoilRows::Place::tile", First(
        "Config::kMask == Mask::kSparse ? entry.tile() : static_cast<i32>(entry.word)")):
            "the word of an entry without marks is the KV tile",
    ("AttentionMma::warp_sees", Always("if (entry.has_elements()) return true;")):
        "a warp goes over a KV tile that its rows do not see",
    ("AttentionWgmma::init_barriers", Drop("ptx::fence_mbarrier_init();")):
        "the simulator's copies see what a thread stored before",
    ("Mainloop::kv_whole", First(
        "kTogether ? work.kv.template whole<Config::kMask>() : own_kv.template whole<Config::kMask>()")):
            "masks KV tiles too of which the consumer's rows see every key",
    ("Mainloop::finish_scores", Always(
        "if constexpr (kMasked) { apply_mask<Config>(acc_s, own_row(), lane, place); }")):
            "masks KV tiles too of which rows see every key",
    ("Producer::load_tile", Always(
        "if constexpr (Config::kMask == Mask::kSparse) { if (entry.has_elements()) { ptx::bulk_copy(to + "
        "Shared::kBits, tile_bits<Config>(params, work, tile), Shared::kBitsBytes, full); } }")):
            "without a list an entry has no elements",
    ("Mainloop::Mainloop", Always(
        "if constexpr (!kTogether) { own_kv = work.template kv_of_rows<Config, kWarpgroupRows>(params, consumer * "
        "kWarpgroupRows); }")): "a range that nothing reads where consumers ping-pong",
    ("rows_see", OffByOne("visible_keys<Mask::kSparse>(seqlen, first_row).begin < end_key")):
        "delta_s that nothing reads",
    ("rows_see", OffByOne("first_key < visible_keys<Mask::kSparse>(seqlen, last_row).end")):
        "delta_s that nothing reads",
    ("KvRange::of_split", OffByOne("full_begin <= begin")): "fewer masked tiles than none are none",
    ("KvRange::of_split", Second("full_begin <= begin ? 0 : min(full_begin - first, tiles)")):
        "fewer masked tiles than none are none",
    ("KvRange::tiles_of_split", Sign("end - begin + splits.divisor - 1")): "another partition of the KV tiles",
    ("MergeSplits::store", OffByOne("c < kChannels")): "a lane has no more channels",
    ("KeyPrefix::word", OffByOne("end <= 0")): "of no key the word is zero either way",
    ("TileScheduler::index", Always("if constexpr (Config::kMask == Mask::kFull) return work_index;")):
        "another order of the query tiles",
    ("QuantBlock::has_keys", OffByOne("first_tile * Config::kBlockN < rows")): "quantizes tiles that nothing reads",
    ("QuantizeV::bounded_or_mark", OffByOne("fabsf(x) <= kVanishes")): "of one value alone, which rounds to zero too",
    ("DeltaS::run", Sign("first_of_launch + first_tile")):
        "first_tile is zero where a head has at most 64 query tiles; GPU tests have more",
    ("Quantize::run", OffByOne("threadIdx.x == 0")): "other threads store the same zero",
    ("DeltaS::visible", Sign("min((first_tile + kTile) * params.block_m, seqlen.q()) - 1")):
        "delta_s that nothing reads",
    ("TileLists::in_window", OffByOne("rows.of_last.end > keys.first")):
        "looks at a tile of which the window shows nothing",
    **{("TileLists::in_window", OffByOne(f"rows.{edge}")): "a whole tile that is cut"
       for edge in ("of_first.end >= keys.end", "of_last.begin <= keys.first")},
    ("TileLists::Rows::Rows", Sign("end - 1")): "the window of a later row: whole tiles that are cut, none is lost",
    ("TileLists::entry_of", Drop("seen &= overlapped(rows, keys, 1 << shift);")):
        "a block of which the window shows nothing: it is cut there",
    ("TileLists::list_by_blocks", OffByOne("round < ceil_div(params.kv_tiles, kWarpSize)")):
        "a round without a KV tile",
    ("TileLists::list_by_blocks", First("tile < params.kv_tiles ? entry_of(rows, tile) : 0")):
        "a KV tile that does not exist shows nothing",
    ("TileLists::overlapped", Always(
        "if (first.begin < min(key + kMaskBlock, keys.end) && last.end > key) found |= bit;")):
            "a block of which the window shows nothing: it is cut there",
    ("TileLists::overlapped", Sign("min(row + kMaskBlock, rows.end) - 1")):
        "looks two rows further; what the window hides is cut",
    ("TileLists::Words::Words", OffByOne("i < kChunk")): "a bit that no chunk has, behind the words",
    ("TileLists::store_bits_of_all", OffByOne("i < params.block_m / rows_at_once")): "no row is left to store",
    ("TileLists::overlapped", OffByOne("last.end > key")): "a block of which the window shows nothing: it is cut there",
    ("divide", Drop("r = fmaf(fmaf(-b, r, 1.0f), r, r);")): "the simulator's rcp is the nearest; a chip's is not",
    ("divide", Drop("q = fmaf(fmaf(-b, q, a), r, q);")): "the simulator's rcp is the nearest; a chip's is not",
    ("scale_to", Sign("(__float_as_uint(magnitude) >> kMantissaBits) - kExponentBias")):
        "the exponent is added and subtracted again, modulo 2^9",
    ("scale_to", OffByOne("magnitude < kSmallestAbsMax")): "of one value alone, for which either scale is right",
    ("tile_factor", OffByOne("largest <= limit")): "of one value alone, for which either scale is right",
    ("QuantizeK::quantize", Always(
        "if constexpr (kClips<Config> > 1) { if (params.clip) scale = clipped(scale, keys, tile * Config::kBlockN, "
        "source.rows, prepare); }")): "of one candidate, which 8 bits have, the best is that one",
    ("BwdQ::run", OffByOne("tiles > 0")): "copies a tile that nothing reads",
    ("BwdQ::run", Sign("row + kWarpRows - 1")): "a tile more, hidden as a whole",
    ("BwdPrepare::prepare_q", Sign("first_row + own", 2)): "O of a query that does not exist, times a dO of zeros",
    ("EqualColumns::of_last_key", Sign("seen_from + kKeysOfWarp - 1")): "tiles are masked that all queries see",
    ("QueryTilesBackwards::first_tile", Second(
        "has_diagonal(params) ? max(0, first_seeing(own.entry, key)) / kTileRows : 0")):
            "goes over tiles of which no query sees a key",
    ("QProducts::leave", OffByOne("ptx::opaque(phase_) < 2")): "is true of both phases, as before",
    ("QueryTilesBackwards::whole_from", First(
        "has_diagonal(params) ? ceil_div(max(0, first_seeing(own.entry, key)), kTileRows) : 0")):
            "tiles are masked that all queries see",
    ("BwdKv::ColumnsAhead::minus_lse", OffByOne("n + kAhead < kColumnTiles")): "a load that nothing uses",
    ("BwdKv::ColumnsAhead::minus_lse", Sign("n + kAhead", 1)): "loads that nothing uses",
    ("BwdKv::ColumnsAhead::q_scale", Always(
        "if (n + kAhead < kColumnTiles) scale_[n % kAhead / 2] = from_.q_scale(n + kAhead);")):
            "loads that nothing uses",
    ("BwdQ::Consumer::issue_scores", Sign("keys + Tile::kCodes")): "codes lie first in a tile",
    ("OwnRows::codes", Sign("tile_ + Tile::kCodes")): "codes lie first in a tile",
    ("BwdQ::tiles_of", First(
        "first <= last ? max(0, ceil_div(visible_end(params, own.entry, last), kTileRows)) : 0")):
            "rows that do not exist go over tiles, and are not stored",
    ("TilePipeline::empty", Sign("full(stage) + 8")): "other eight bytes, which each stage has for itself",
    ("wait_for", Drop("d[n][c] = static_cast<i32>(ptx::opaque(static_cast<u32>(d[n][c])));")):
        "a fence for the compiler",
    ("TileStream::finish", Sign("index + 1")): "with one stage every tile lies in the same place",
    ("subtractable", OffByOne("fabsf(mean) < kLargestMean")): "of one value alone, for which either answer is right",
}
"""Bugs that change nothing anybody could see in a simulated call, and why."""


def variants_of(bug: Bug) -> tuple[str, ...]:
    """The kernels that may show it, less "sage_attn_"."""
    return next(variants for prefix, variants in SHOWN_BY.items() if bug.header.startswith(prefix))


def candidates(folder: str = "") -> Iterator[Bug]:
    """All that the operations make of all functions, function by function; of those below a folder, or of all that run
    in a call of attn."""
    root = PROJECT.include / "sage"
    for path in sorted((root / folder).rglob("*.cuh")):
        if path.parent.name in ("ptx", *(() if folder else ("select",))):
            continue  # the simulator has its own instructions; test_selection.py draws selections' bugs
        functions = [place for place in places_in(path) if not place.is_constant]
        for name in dict.fromkeys(place.name for place in functions):
            yield from _of_function(path.relative_to(root).as_posix(), name,
                                    [place for place in functions if place.name == name])


def _of_function(header: str, name: str, places: list[Place]) -> Iterator[Bug]:
    for found in by_words(places).values():
        for which, (place, node) in enumerate(found, 1):
            for operation in OPERATIONS:
                bug = Bug(header, name, operation(code_of(node), which if len(found) > 1 else 0))
                if bug.operation.code_for(node) and _is_of_interest(operation, node) and can_be_switched(place, node):
                    yield bug


def _is_of_interest(operation: type[Operation], node: Node) -> bool:
    """True but for drops of loops and returns, which tell little, and of `u32 (&pair)[4] = ...`, a declaration."""
    return operation is not Drop or (node.type == "expression_statement" and "(&" not in code_of(node).split("=")[0])


@cache
def drawn() -> tuple[Bug, ...]:
    """Draw for each function one bug that has no name and may do harm."""
    return one_a_function(candidates(), {mutation.bug for mutation in MUTATIONS}, HARMLESS)


def one_a_function(found: Iterable[Bug], named: Container[Bug],
                   harmless: Container[tuple[str, Operation]]) -> tuple[Bug, ...]:
    """Draw one of these bugs for each function."""
    result: list[Bug] = []
    for _, bugs in itertools.groupby(found, key=lambda bug: (bug.header, bug.place)):
        new = [bug for bug in bugs if bug not in named and (bug.place, bug.operation) not in harmless]
        result += sorted(new, key=lambda bug: hashlib.sha256(str(bug).encode()).digest())[:1]
    return tuple(result)
