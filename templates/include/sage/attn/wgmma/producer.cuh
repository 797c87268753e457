// The producer's two working threads, of a warp each. One takes work tiles from the tile scheduler and loads their Q;
// the other loads their KV tiles. Computing a work tile thus delays no KV tile. A third warp finds the norms that a
// linear P asks for; a fourth makes the bits of tiles that a window cuts.
#pragma once

#include "sage/tile/pipeline.cuh"
#include "sage/attn/wgmma/shared_storage.cuh"
#include "sage/problem/sparse_mask.cuh"
#include "sage/problem/tile_scheduler.cuh"
#include "sage/ptx/bulk_copy.cuh"
#include "sage/ptx/mbarrier.cuh"

namespace sage {

// Sentinel in WorkTile::kv.end: the tile scheduler is exhausted, and the rest of the query buffer is undefined.
constexpr i32 kNoMoreTiles = -1;

template <class Config>
struct Producer {
  using KvStage = PipelineState<Config::kStages>;

  const AttnParams& params;
  const SharedStorage<Config>& shared;

  // Call with one thread. Draws a work tile when a query buffer is free for it, and no sooner: a block that drew ahead
  // would hold back work tiles from blocks that are free earlier.
  __device__ __forceinline__ void load_queries() const {
    PipelineState<2> query;
    TileScheduler<Config> scheduler{params};
#pragma unroll 1
    for (; !scheduler.ended(); scheduler.advance()) {
      const WorkTile work = work_tile<Config>(params, scheduler.index());
      if (!work.has_queries()) continue;
      shared.query_tile(query.index) = work;
      ptx::mbarrier_arrive(shared.query_tile_full(query.index));
      load_query(work, query.index);
      query.advance();
      ptx::mbarrier_wait(shared.query_empty(query.index), query.phase ^ 1);  // at once in the first round
    }
    scheduler.close();
    shared.query_tile(query.index).kv.end = kNoMoreTiles;
    ptx::mbarrier_arrive(shared.query_tile_full(query.index));
    ptx::mbarrier_arrive(shared.query_full(query.index));
  }

  // Call with one thread.
  __device__ __forceinline__ void load_tiles() const {
    PipelineState<2> query;
    KvStage stage;
#pragma unroll 1
    while (true) {
      ptx::mbarrier_wait(shared.query_tile_full(query.index), query.phase);
      if (shared.query_tile(query.index).kv.end == kNoMoreTiles) break;
      const WorkTile work = shared.query_tile(query.index);  // a copy: reading it for every KV tile is slower
      TileEntry next = {};                                   // of a sparse mask, read a tile ahead: a list is far away
      if constexpr (Config::kMask == Mask::kSparse) {
        if (work.kv.begin < work.kv.end) next = entry_at<Config>(params, work, work.kv.begin);
      }
#pragma unroll 1
      for (i32 place = work.kv.begin; place < work.kv.end; ++place, stage.advance()) {
        TileEntry entry = {static_cast<u32>(place)};
        if constexpr (Config::kMask == Mask::kSparse) {
          entry = next;
          if (place + 1 < work.kv.end) next = entry_at<Config>(params, work, place + 1);
        }
        ptx::mbarrier_wait(shared.empty(stage.index), stage.phase ^ 1);  // at once in the first round
        load_tile(work, entry, stage.index);
      }
      ptx::mbarrier_arrive(shared.query_empty(query.index));
      query.advance();
    }
  }

  // Call with one warp. Finds the largest norm of the keys that a query tile sees.
  __device__ __forceinline__ void find_norms() const {
    PipelineState<2> query;
    const i32 lane = ptx::thread_index() % kWarpSize;
#pragma unroll 1
    while (true) {
      ptx::mbarrier_wait(shared.query_tile_full(query.index), query.phase);
      const WorkTile& work = shared.query_tile(query.index);
      if (work.kv.end == kNoMoreTiles) break;
      float largest = 0.0f;
#pragma unroll 1
      for (i32 place = work.kv.begin + lane; place < work.kv.end; place += kWarpSize) {
        const i32 tile = tile_at<Config>(params, work, place);
        const u8* line = work.template kv_tile<Config>(params, tile) + Layout::kLine;
        largest = fmaxf(largest, reinterpret_cast<const KvLine*>(line)->largest_norm());
      }
      largest = ptx::max_over_lanes<kWarpSize>(largest);
      __syncwarp();  // all lanes have read the work tile, which the arrival gives back
      if (lane == 0) {
        shared.k_norm(query.index) = largest;
        ptx::mbarrier_arrive(shared.query_full(query.index));
      }
      query.advance();
    }
    if (lane == 0) ptx::mbarrier_arrive(shared.query_full(query.index));
  }

  // Call with one warp. Makes the bits of KV tiles that a window cuts; those of elements come from memory with the
  // tile. Arrives for every tile, so that it never lags behind a stage by more than a phase.
  __device__ __forceinline__ void make_bits() const {
    PipelineState<2> query;
    KvStage stage;
    const i32 lane = ptx::thread_index() % kWarpSize;
#pragma unroll 1
    for (i32 i = lane; i < (Config::kBlockN + 1) * 4; i += kWarpSize)
      shared.before(i / 4, i % 4) = Bits::before(i / 4, i % 4);
#pragma unroll 1
    while (true) {
      ptx::mbarrier_wait(shared.query_tile_full(query.index), query.phase);
      const WorkTile& work = shared.query_tile(query.index);
      if (work.kv.end == kNoMoreTiles) break;
      const i32 tiles = work.kv.end, whole = work.kv.template whole<Config::kMask>();
#pragma unroll 1
      for (i32 row = lane; row < Config::kBlockM; row += kWarpSize) {
        shared.window(row) =
            visible_keys<Mask::kSparse>(work.seqlen(params), work.first_row + row).from(work.first_key);
      }
      __syncwarp();
#pragma unroll 1
      for (i32 place = 0; place < tiles; ++place, stage.advance()) {
        TileEntry entry = {};
        if (place >= whole) entry = entry_at<Config>(params, work, place);
        ptx::mbarrier_wait(shared.empty(stage.index), stage.phase ^ 1);
        if (entry.is_cut()) store_bits(entry, stage.index, lane);
        __syncwarp();  // the arrival publishes the stores of all lanes
        if (lane == 0) ptx::mbarrier_arrive(shared.full(stage.index));
      }
      __syncwarp();  // all lanes have read the work tile and the windows
      if (lane == 0) ptx::mbarrier_arrive(shared.query_empty(query.index));
      query.advance();
    }
  }

 private:
  using Layout = TileLayout<Config>;
  using Shared = SharedStorage<Config>;
  using Bits = FragmentBits<Config::kBlockN>;

  __device__ __forceinline__ void store_bits(const TileEntry& entry, i32 stage, i32 lane) const {
    const i32 t = lane % 4;
    const i32 first = entry.tile() * Config::kBlockN;
#pragma unroll 4
    for (i32 row = lane / 4; row < Config::kBlockM; row += kWarpSize / 4) {
      const KeyInterval keys = shared.window(row).from(first);
      const i32 begin = min(max(keys.begin, 0), Config::kBlockN), end = min(max(keys.end, 0), Config::kBlockN);
      const u32 word = shared.before(end, t) & ~shared.before(begin, t);
      Bits::store_shared(shared.bits(stage, row, t), word & bits_of_blocks<Config>(entry, row / kMaskBlock));
    }
  }

  __device__ __forceinline__ void load_query(const WorkTile& work, i32 buffer) const {
    const i64 q_tile = q_tile_index(work.q_head, params.q_tiles, work.q_tile);
    const i64 channel = channel_index<Config>(work.kv_head);
    const u32 full = shared.query_full(buffer), to = shared.query(buffer), constants = to + Shared::kChannelConstants;
    ptx::mbarrier_arrive_expect_tx(full, Layout::kQBytes + (Config::kSmoothV ? 2 : 1) * Shared::kChannelBytes +
                                             Shared::kQScalesBytes + Shared::kRowBiasBytes);
    ptx::bulk_copy(to, params.q_hat + q_tile * Layout::kQBytes, Layout::kQBytes, full);
    ptx::bulk_copy(constants, params.v_scale + channel, Shared::kChannelBytes, full);
    if constexpr (Config::kSmoothV) {
      ptx::bulk_copy(constants + Shared::kChannelBytes, params.v_mean + channel, Shared::kChannelBytes, full);
    }
    ptx::bulk_copy(to + Shared::kQScales, params.q_scale + q_tile * (Shared::kQScalesBytes / 4), Shared::kQScalesBytes,
                   full);
    ptx::bulk_copy(to + Shared::kRowBias, params.row_bias + q_tile * Config::kBlockM, Shared::kRowBiasBytes, full);
  }

  __device__ __forceinline__ void load_tile(const WorkTile& work, const TileEntry& entry, i32 stage) const {
    i32 tile = static_cast<i32>(entry.word), bytes = Layout::kLine + KvLine::kLoaded + Shared::kDeltaBytes;
    const u32 to = shared.kv_stage(stage), full = shared.full(stage);
    if constexpr (Config::kMask == Mask::kSparse) {
      tile = entry.tile();
      ptx::store_shared_u32(to + Shared::kEntry, entry.word);
      if (entry.has_elements()) bytes += Shared::kBitsBytes;
    }
    const u8* from = work.template kv_tile<Config>(params, tile);
    ptx::mbarrier_arrive_expect_tx(full, bytes);
    ptx::bulk_copy(to, from, Layout::kLine, full);
    ptx::bulk_copy(to + Shared::kLine, from + Layout::kLine, KvLine::kLoaded, full);
    if constexpr (Config::kMask == Mask::kSparse) {
      if (entry.has_elements()) {
        ptx::bulk_copy(to + Shared::kBits, tile_bits<Config>(params, work, tile), Shared::kBitsBytes, full);
      }
    }
    if constexpr (Config::kSmoothQ) {
      const i64 row = delta_s_index(work.q_head - params.first_head, params.q_tiles, work.q_tile, params.columns);
      ptx::bulk_copy(to + Shared::kDelta, params.delta_s + row + work.first_key + tile * Config::kBlockN,
                     Shared::kDeltaBytes, full);
    }
  }
};

}  // namespace sage
