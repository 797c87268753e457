// Where the tiles of a head lie in the workspace.
#pragma once

#include "sage/tile/layout.cuh"

namespace sage {

// The index of a query tile among those of all heads: in q_hat, q_scale, row_bias and q_mean, in tiles.
__device__ __forceinline__ i64 q_tile_index(i32 q_head, i32 q_tiles, i32 tile) {
  return static_cast<i64>(q_head) * q_tiles + tile;
}

// The index of a query tile's first key in delta_s, which holds the heads of one launch, and `columns` keys a query
// tile.
__device__ __forceinline__ i64 delta_s_index(i32 head_of_launch, i32 q_tiles, i32 tile, i32 columns) {
  return q_tile_index(head_of_launch, q_tiles, tile) * columns;
}

// The index of a KV head's first channel in v_scale, v_mean and k_mean.
template <class Config>
__device__ __forceinline__ i64 channel_index(i32 kv_head) {
  return static_cast<i64>(kv_head) * Config::kHeadDim;
}

// K̂, V̂ and the KvLine of a KV tile. Byte: u8, const for readers.
template <class Config, class Byte>
__device__ __forceinline__ Byte* kv_tile_address(Byte* kv_hat, i32 index) {
  return kv_hat + static_cast<i64>(index) * TileLayout<Config>::kKvBytes;
}

}  // namespace sage
