// Which query rows a block computes, and which KV tiles those rows see.
// Causal is aligned bottom-right: query i sees the keys j <= i + seqlen_kv - seqlen_q.
#pragma once

#include "sage/params.cuh"
#include "sage/ptx/special.cuh"
#include "sage/tile/layout.cuh"

namespace sage {

struct Work {
  i32 q_head;       // index into [batch * num_q_heads]
  i32 kv_head;      // index into [batch * num_kv_heads]
  i32 batch, head;  // of the output
  i32 q_tile;
  i32 first_row;   // of the query tile
  i32 full_tiles;  // leading KV tiles that every row sees whole
  i32 tiles;       // KV tiles that any row sees

  __device__ __forceinline__ u16* output_row(const AttnParams& params, i32 row) const {
    const Strides& stride = params.out.stride;
    return static_cast<u16*>(params.out.data) + batch * stride.batch + head * stride.head + row * stride.row;
  }

  // A KV tile as the quantizer left it.
  template <class Config>
  __device__ __forceinline__ const u8* kv_tile(const AttnParams& params, i32 tile) const {
    return params.kv_hat + (static_cast<i64>(kv_head) * params.kv_tiles + tile) * TileLayout<Config>::kKvBytes;
  }
  template <class Config>
  __device__ __forceinline__ const KvLine& line(const AttnParams& params, i32 tile) const {
    return *reinterpret_cast<const KvLine*>(kv_tile<Config>(params, tile) + TileLayout<Config>::kLine);
  }
  template <class Config>
  __device__ __forceinline__ const u16* v_finite(const AttnParams& params, i32 tile) const {
    return reinterpret_cast<const u16*>(kv_tile<Config>(params, tile) + TileLayout<Config>::kVFinite);
  }

  // Keys that a query row sees: those below the limit. Full attention is a diagonal that lies beyond the last key.
  template <bool kCausal>
  __device__ static i32 key_limit(const AttnParams& params, i32 row) {
    const i32 diagonal = params.seqlen_kv - (kCausal ? params.seqlen_q : 0);
    return min(params.seqlen_kv, max(0, row + 1 + diagonal));
  }
};

// index: the query tiles of a head are neighbours, so that blocks which run together read the same K and V from L2.
// Causal takes the tiles of a head from the last, which has the most keys, so that a grid of a block a tile ends with short
// blocks.
// Cheap enough to be computed again at the end of a tile, where the registers to keep it over the main loop are not.
template <class Config>
__device__ __forceinline__ Work locate(const AttnParams& params, u32 index) {
  Work work;
  const i32 tile = index % params.q_tiles;
  work.q_tile = Config::kCausal ? params.q_tiles - 1 - tile : tile;
  work.q_head = params.first_head + index / params.q_tiles;
  work.batch = work.q_head / params.num_q_heads;
  work.head = work.q_head % params.num_q_heads;
  work.kv_head = work.batch * params.num_kv_heads + work.head / (params.num_q_heads / params.num_kv_heads);
  work.first_row = work.q_tile * Config::kBlockM;
  const i32 last_row = min(work.first_row + Config::kBlockM, params.seqlen_q) - 1;
  work.full_tiles = Work::key_limit<Config::kCausal>(params, work.first_row) / Config::kBlockN;
  work.tiles = ceil_div(Work::key_limit<Config::kCausal>(params, last_row), Config::kBlockN);
  return work;
}

// The query tiles of a launch, for blocks that take several: a block starts with that of its own number, and then takes
// the next that no block has, so that all end together however they were held up.
template <class Config>
struct TileQueue {
  const AttnParams& params;
  u32 place = ptx::block_index();  // of the block's query tile in the queue

  __device__ __forceinline__ bool ended() const { return place >= places(); }

  // Index of the query tile, for locate(). Full attention: the order of the indices. Causal: tiles of many heads in turns,
  // those with the most keys first, so that the queue ends with short ones; of as many heads as have K and V in kCachedBytes.
  __device__ __forceinline__ u32 index() const {
    if constexpr (!Config::kCausal) return place;
    const u32 q_tiles = params.q_tiles, cached = kCachedTiles / max(params.kv_tiles, 1);
    const u32 heads =
        min(max(cached, 1u) * (params.num_q_heads / params.num_kv_heads), static_cast<u32>(params.num_heads));
    const u32 first_head = place / (heads * q_tiles) * heads, within = place % (heads * q_tiles);
    const u32 taking_turns = min(heads, params.num_heads - first_head);
    return (first_head + within % taking_turns) * q_tiles + within / taking_turns;
  }

  // Takes the next query tile. The answer takes as long as a load: nothing should need it at once.
  __device__ __forceinline__ void advance() { place = ptx::grid_blocks() + atomicAdd(params.taken, 1u); }

  // At the end: the block that was told the highest place, the last to ask, leaves the count as it was found.
  __device__ __forceinline__ void close() const {
    if (place == ptx::grid_blocks() + places() - 1) *params.taken = 0;
  }

 private:
  // Of L2, which has 50 MB; 8 MB measured slower below 32K keys, 32 MB always.
  static constexpr u32 kCachedBytes = 16 << 20;
  static constexpr u32 kCachedTiles = kCachedBytes / (2 * Config::kBlockN * Config::kHeadDim);

  __device__ __forceinline__ u32 places() const { return params.num_heads * params.q_tiles; }
};

}  // namespace sage
