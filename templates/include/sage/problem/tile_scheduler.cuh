// Which work tiles a block draws, and in which order: a dynamic persistent tile scheduler.
#pragma once

#include "sage/problem/work_tile.cuh"
#include "sage/ptx/special.cuh"

namespace sage {

// A block starts with the work tile of its own index, and then draws the next work tile that no block has drawn. All
// blocks thus end at about the same time.
template <class Config>
struct TileScheduler {
  const AttnParams& params;
  u32 work_index = ptx::block_index();  // in the order in which work tiles are drawn

  __device__ __forceinline__ bool ended() const { return work_index >= work_tiles(); }

  // Index for work_tile(). Full attention draws work tiles in the order of their indices. Causal attention interleaves
  // the query tiles of several heads, as many as have K and V in kCachedBytes. Tiles with the most keys come first, so
  // that short tiles come last.
  __device__ __forceinline__ u32 index() const {
    if constexpr (Config::kMask == Mask::kFull) return work_index;
    const u32 q_tiles = params.q_tiles.divisor;
    const u32 cached = kCachedTiles / max(ceil_div(params.seqlen_kv, Config::kBlockN), 1);  // heads' K and V
    const u32 heads = min(max(cached, 1u) * params.q_heads_per_kv_head, static_cast<u32>(params.num_heads));
    const u32 splits = params.splits.divisor, query_tile = work_index / splits;
    const u32 first_head = query_tile / (heads * q_tiles) * heads, within = query_tile % (heads * q_tiles);
    const u32 interleaved = min(heads, params.num_heads - first_head);
    const u32 index = (first_head + within % interleaved) * q_tiles + within / interleaved;
    return index * splits + work_index % splits;
  }

  // Draws the next work tile. The second query buffer hides the latency of the global atomic.
  __device__ __forceinline__ void advance() { work_index = ptx::grid_blocks() + atomicAdd(params.tile_counter, 1u); }

  // At the end: the block that drew the highest index, the last to draw, resets the counter for the next launch.
  __device__ __forceinline__ void close() const {
    if (work_index == ptx::grid_blocks() + work_tiles() - 1) *params.tile_counter = 0;
  }

 private:
  // The part of L2, of 50 MB, for K and V: 8 MB measured slower below 32K keys, 32 MB always.
  static constexpr u32 kCachedBytes = 16 << 20;
  static constexpr u32 kCachedTiles = kCachedBytes / (2 * Config::kBlockN * Config::kHeadDim);

  __device__ __forceinline__ u32 work_tiles() const { return params.num_heads * params.q_tiles * params.splits; }
};

}  // namespace sage
