// A sparse mask: a window, and where the call has a boolean mask or a mask of blocks what these leave of it. The kernel
// of quant/lists.cuh made lists of their KV tiles: first, in their order, those that every row of a query tile sees
// whole, and from the end on, backwards, those of which some row sees a part.
#pragma once

#include "sage/problem/work_tile.cuh"

namespace sage {

constexpr i32 kMaskBlock = 64;  // queries and keys of an element of a mask of blocks

// The KV tile at a place, counted as WorkTile::kv is.
template <class Config>
__device__ __forceinline__ i32 tile_at(const AttnParams& params, const WorkTile& work, i32 place) {
  if constexpr (Config::kMask != Mask::kSparse) return place;
  if (params.tile_lists == nullptr) return work.kv.rotated(place);
  const i32 at = place < work.kv.full_end ? place : params.kv_tiles - 1 - (place - work.kv.full_end);
  return params.tile_lists[list_index(params, work) * params.kv_tiles + at];
}

// A bit for each of 32 keys of a KV tile, from key 32w of it on: whether the row sees the key. Of tiles alone that not
// every row sees whole. window: of the row, counted from work.first_key on.
template <class Config, class Keys>
__device__ __forceinline__ u32 visible_word(const AttnParams& params, const WorkTile& work, i32 row, const Keys& window,
                                            i32 tile, i32 w) {
  const i32 first = tile * Config::kBlockN + 32 * w;
  const u32 word = window.from(first).word();
  if (word == 0 || params.tile_lists == nullptr) return word;
  const i32 own = min(row, work.lengths.q - 1);  // rows behind the last see what it sees
  if (params.block_mask.data != nullptr) {
    const Strides& stride = params.block_mask.stride;
    const u8* blocks = static_cast<const u8*>(params.block_mask.data) + work.batch * stride.batch +
                       work.head * stride.head + own / kMaskBlock * stride.row;
    if (blocks[first / kMaskBlock] == 0) return 0;
  }
  if (params.key_bits == nullptr) return word;
  const i64 mask = work.batch * params.mask_of_batch + work.head * params.mask_of_head;
  return word & params.key_bits[(mask * params.seqlen_q + own) * ceil_div(params.seqlen_kv, 32) + first / 32];
}

// The keys of a KV tile that a row sees, a bit each.
template <class Config>
struct TileKeys {
  static constexpr i32 kWords = Config::kBlockN / 32;

  u32 word[kWords];

  template <class Keys>
  __device__ __forceinline__ TileKeys(const AttnParams& params, const WorkTile& work, i32 row, const Keys& window,
                                      i32 tile) {
#pragma unroll
    for (i32 w = 0; w < kWords; ++w) word[w] = visible_word<Config>(params, work, row, window, tile, w);
  }
  __device__ __forceinline__ bool none() const {
    u32 all = 0;
#pragma unroll
    for (i32 w = 0; w < kWords; ++w) all |= word[w];
    return all == 0;
  }
};

}  // namespace sage
