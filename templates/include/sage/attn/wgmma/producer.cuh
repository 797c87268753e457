// The producer's two working threads, of a warp each. One takes work tiles from the tile scheduler and loads their Q;
// the other loads their KV tiles. Computing a work tile thus delays no KV tile.
#pragma once

#include "sage/attn/wgmma/pipeline.cuh"
#include "sage/attn/wgmma/shared_storage.cuh"
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
#pragma unroll 1
      for (i32 tile = work.kv.begin; tile < work.kv.end; ++tile, stage.advance()) {
        ptx::mbarrier_wait(shared.empty(stage.index), stage.phase ^ 1);  // at once in the first round
        load_tile(work, tile, stage.index);
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
      for (i32 tile = work.kv.begin + lane; tile < work.kv.end; tile += kWarpSize) {
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

 private:
  using Layout = TileLayout<Config>;
  using Shared = SharedStorage<Config>;

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

  __device__ __forceinline__ void load_tile(const WorkTile& work, i32 tile, i32 stage) const {
    const u8* from = work.template kv_tile<Config>(params, tile);
    const u32 to = shared.kv_stage(stage), full = shared.full(stage);
    ptx::mbarrier_arrive_expect_tx(full, Layout::kLine + KvLine::kLoaded + Shared::kDeltaBytes);
    ptx::bulk_copy(to, from, Layout::kLine, full);
    ptx::bulk_copy(to + Shared::kLine, from + Layout::kLine, KvLine::kLoaded, full);
    if constexpr (Config::kSmoothQ) {
      const i64 row = delta_s_index(work.q_head - params.first_head, params.q_tiles, work.q_tile, params.columns);
      ptx::bulk_copy(to + Shared::kDelta, params.delta_s + row + work.first_key + tile * Config::kBlockN,
                     Shared::kDeltaBytes, full);
    }
  }
};

}  // namespace sage
