// The loads of one head's KV tiles into shared memory by cp.async, in order: a pipeline of kStages stages. Where
// kVStages is less, the stages have no V: that of one KV tile arrives while its scores and its P are computed. Shared
// memory:
//   [kStages] KV tiles, laid out as tile/layout.cuh says, or K̂ and the line of each
//   V̂ of one KV tile, where the stages have none
//   sDelta [kStages][kBlockN] f32, delta_s of the query tile, where Q is smoothed
//   [warps] u32, whether the warp met a spoilt KV tile, which holds keys or values that are not finite
#pragma once

#include "sage/problem/sparse_mask.cuh"
#include "sage/ptx/cp_async.cuh"
#include "sage/ptx/shared.cuh"
#include "sage/ptx/special.cuh"
#include "sage/tile/copy.cuh"
#include "sage/tile/layout.cuh"

namespace sage {

template <class Config, i32 kThreads>
class KvStream {
 public:
  using Layout = TileLayout<Config>;
  static constexpr i32 kDeltaBytes = Config::kSmoothQ ? Config::kBlockN * 4 : 0;
  static constexpr bool kOneV = Config::kVStages < Config::kStages;
  static constexpr i32 kStageBytes = kOneV ? Layout::kKBytes + KvLine::kBytes : Layout::kKvBytes;
  static constexpr i32 kDelta = Config::kStages * kStageBytes + (kOneV ? Layout::kVBytes : 0);
  static constexpr i32 kSpoilt = kDelta + Config::kStages * kDeltaBytes;
  static constexpr i32 kBytes = kSpoilt + ceil_div(kThreads / kWarpSize, 4) * 16;  // of shared memory

  __device__ __forceinline__ KvStream(const AttnParams& params, const WorkTile& work, u32 shared) : first_(shared) {
    next_ = work.template kv_tile<Config>(params, 0) + ptx::thread_index() * 16;
    if constexpr (Config::kSmoothQ) {
      const i64 row = delta_s_index(work.q_head - params.first_head, params.q_tiles, work.q_tile, params.columns);
      delta_ = params.delta_s + row + work.first_key + ptx::thread_index() * 4;
    }
    if (ptx::thread_index() % kWarpSize == 0) ptx::store_shared_u32(own_spoilt(), 0);
  }

  // Issues the loads of the tile at the next place and closes their group, which is empty where no such tile exists.
  // With kOneV, load_v() loads V.
  __device__ __forceinline__ void load(const AttnParams& params, const WorkTile& work, i32 place, bool exists) {
    if (exists) {
      const u32 stage = stage_of(place);
      const i32 tile = tile_at<Config>(params, work, place);
      const u8* from = next_;
      if constexpr (Config::kMask == Mask::kSparse) from += static_cast<i64>(tile) * Layout::kKvBytes;
      else next_ += Layout::kKvBytes;
      copy_async<Layout::kKBytes, kThreads>(k(stage), from);
      if (threadIdx.x < KvLine::kLoaded / 16) ptx::cp_async_16(line(stage) + threadIdx.x * 16, from + Layout::kLine);
      if constexpr (!kOneV) copy_async<Layout::kVBytes, kThreads>(v(stage), from + Layout::kV);
      if constexpr (Config::kSmoothQ) {
        const float* delta_from = delta_ + static_cast<i64>(tile) * Config::kBlockN;
        if (threadIdx.x < Config::kBlockN / 4) ptx::cp_async_16(delta(stage) + threadIdx.x * 16, delta_from);
      }
    }
    ptx::cp_async_commit();
  }

  // Issues the loads of V of the tile at a place, the last whose K was loaded, and closes their group.
  __device__ __forceinline__ void load_v(const AttnParams& params, const WorkTile& work, i32 place) {
    const u8* from = next_;
    if constexpr (Config::kMask == Mask::kSparse) from += tile_at<Config>(params, work, place) * i64{Layout::kKvBytes};
    else from -= Layout::kKvBytes;
    copy_async<Layout::kVBytes, kThreads>(v(0), from + Layout::kV);
    ptx::cp_async_commit();
  }

  // Waits for the V of load_v(), behind which load() was called once. Call with all threads of the block.
  __device__ __forceinline__ static void wait_for_v() {
    ptx::cp_async_wait<1>();
    __syncthreads();
  }

  // Stores in shared memory that the warp met a spoilt KV tile, which saves a register. Call with all lanes of a warp.
  __device__ __forceinline__ void note_spoilt() const {
    if (ptx::thread_index() % kWarpSize == 0) ptx::store_shared_u32(own_spoilt(), 1);
  }
  __device__ __forceinline__ bool met_spoilt() const {
    __syncwarp();
    return ptx::load_shared_u32(own_spoilt()) != 0;
  }

  __device__ __forceinline__ static u32 stage_of(i32 place) { return static_cast<u32>(place) % Config::kStages; }

  __device__ __forceinline__ u32 k(u32 stage) const { return first_ + stage * kStageBytes; }
  __device__ __forceinline__ u32 line(u32 stage) const { return k(stage) + (kOneV ? Layout::kKBytes : Layout::kLine); }
  __device__ __forceinline__ u32 v(u32 stage) const {
    return kOneV ? first_ + Config::kStages * kStageBytes : k(stage) + Layout::kV;
  }
  __device__ __forceinline__ u32 delta(u32 stage) const { return first_ + kDelta + stage * kDeltaBytes; }

 private:
  __device__ __forceinline__ u32 own_spoilt() const { return first_ + kSpoilt + ptx::thread_index() / kWarpSize * 4; }

  u32 first_;
  const u8* next_;      // this thread's bytes of the tile to load next; with a sparse mask of the block's first
  const float* delta_;  // and of the first tile of delta_s
};

}  // namespace sage
