// Which query rows a block computes, and which KV tiles those rows see.
// Causal is aligned bottom-right: query i sees the keys j <= i + seqlen_kv - seqlen_q.
#pragma once

#include "sage/params.cuh"
#include "sage/ptx/special.cuh"

namespace sage {

struct Work {
  i32 q_head;    // index into [batch * num_q_heads]
  i32 kv_head;   // index into [batch * num_kv_heads]
  i32 batch, head;  // of the output
  i32 q_tile;
  i32 first_row;   // of the query tile
  i32 full_tiles;  // leading KV tiles that every row sees whole
  i32 tiles;       // KV tiles that any row sees

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

// The query tiles of a block, where a grid has fewer blocks than there are query tiles. Blocks that start together stay
// together, and so read the same K and V from L2, if all that they do is as long: a block that takes a causal tile takes
// the tile as far from the other end of the same head after it.
template <class Config>
struct Share {
  static constexpr u32 kVisits = Config::kCausal ? 2 : 1;  // tiles that are taken one after the other
  u32 visits = 0;

  // The index of the next query tile, for locate(); false where there is none.
  __device__ __forceinline__ bool next(const AttnParams& params, u32& index) {
    const u32 per_head = ceil_div(static_cast<u32>(params.q_tiles), kVisits);
    while (true) {
      const u32 visit = visits % kVisits, unit = visits / kVisits * ptx::grid_blocks() + ptx::block_index();
      if (unit >= params.num_heads * per_head) return false;
      ++visits;
      const u32 head = unit / per_head, near = unit % per_head, far = params.q_tiles - 1 - near;
      if (visit == 1 && near == far) continue;  // the one in the middle
      index = head * params.q_tiles + (visit ? far : near);
      return true;
    }
  }
};

}  // namespace sage
