// The layout of a block's shared memory.
#pragma once

#include "sage/attn/epilogue.cuh"
#include "sage/attn/kv_scales.cuh"
#include "sage/problem/sparse_mask.cuh"
#include "sage/problem/work_tile.cuh"
#include "sage/ptx/shared.cuh"
#include "sage/tile/layout.cuh"

namespace sage {

// Shared memory of a block; every matrix starts at a multiple of 1024 bytes.
//   [2] query buffers: sQ [kBlockM] rows of s8; v_scale and v_mean of its KV head, f32, [kHeadDim] each; then q_scale
//     [kBlockM / kWarpM][8] and row_bias [kBlockM] f32; the WorkTile
//   [kStages] stages: K̂ and V̂ of a KV tile (tile/layout.cuh), [8][kBlockN] sum units, the KvLine, where Q is smoothed
//     delta_s of the query tile for these keys, and of a sparse mask its bits for these keys and the tile's TileEntry
//   for every warp its rows of O, on their way to global memory
//   mbarriers, 8 bytes each: query_tile_full, query_full and query_empty of every query buffer; then full and empty of
//     every stage
//   where Q is smoothed a one, f32: the scale of finished scores, for consumers that ping-pong
//   of a sparse mask, for the producer's warp that makes bits, the keys in the window of each row, begin and end, and a
//     table of FragmentBits::before()
template <class Config>
struct SharedStorage {
  using Layout = TileLayout<Config>;
  static constexpr i32 kChannelConstants = Layout::kQBytes;  // in a query buffer
  static constexpr i32 kChannelBytes = Config::kHeadDim * 4;
  static constexpr i32 kQScales = kChannelConstants + 2 * kChannelBytes;
  static constexpr i32 kQScalesBytes = Config::kBlockM / Config::kWarpM * kRowGroups<Config> * 4;
  static constexpr i32 kRowBias = kQScales + kQScalesBytes, kRowBiasBytes = Config::kBlockM * 4;
  static constexpr i32 kQueryTile = kRowBias + kRowBiasBytes;
  static constexpr i32 kKNorm = kQueryTile + sizeof(WorkTile), kVotes = kKNorm + 4;
  static constexpr i32 kQueryBytes = ceil_div<i32>(kVotes + 4 * 3, 1024) * 1024;
  static constexpr i32 kUnits = Layout::kV + Layout::kVBytes;  // in a stage: as eight more rows of V
  static constexpr i32 kUnitBytes = 8 * Config::kBlockN;
  static constexpr i32 kLine = kUnits + kUnitBytes;
  static constexpr i32 kDelta = kLine + KvLine::kBytes, kDeltaBytes = Config::kSmoothQ ? Config::kBlockN * 4 : 0;
  static constexpr bool kListed = Config::kMask == Mask::kSparse;
  static constexpr i32 kBits = kDelta + kDeltaBytes;
  static constexpr i32 kBitsBytes = kListed ? Config::kBlockM * FragmentBits<Config::kBlockN>::kRowBytes : 0;
  static constexpr i32 kEntry = kBits + kBitsBytes, kEntryBytes = kListed ? 16 : 0;
  static constexpr i32 kStageBytes = ceil_div(kEntry + kEntryBytes, 1024) * 1024;
  static constexpr i32 kKvStages = 2 * kQueryBytes, kOutputRows = kKvStages + Config::kStages * kStageBytes;
  static constexpr i32 kBarriers = kOutputRows + Config::kBlockM / Config::kWarpM * StoreWholeRows<Config>::kBytes;
  static constexpr i32 kOne = kBarriers + 8 * (2 * 3 + Config::kStages * 2);
  static constexpr i32 kWindows = kOne + (Config::kSmoothQ ? 16 : 0);
  static constexpr i32 kBefore = kWindows + (kListed ? Config::kBlockM * sizeof(KeyInterval) : 0);
  static constexpr i32 kBytes = kBefore + (kListed ? (Config::kBlockN + 1) * 4 * sizeof(u32) : 0);
  static_assert(Layout::kQBytes % 1024 == 0 && Layout::kV % 1024 == 0 && kUnits % 1024 == 0);

  u8* bytes;
  u32 first;

  __device__ __forceinline__ explicit SharedStorage(u8* bytes_) : bytes(bytes_), first(ptx::shared_address(bytes_)) {}

  __device__ __forceinline__ WorkTile& query_tile(i32 buffer) const {
    return *reinterpret_cast<WorkTile*>(bytes + buffer * kQueryBytes + kQueryTile);
  }
  // The largest norm of the keys that a query tile sees, and a vote of each warp of a consumer, a byte each: whether
  // P is linear.
  __device__ __forceinline__ float& k_norm(i32 buffer) const {
    return *reinterpret_cast<float*>(bytes + buffer * kQueryBytes + kKNorm);
  }
  __device__ __forceinline__ u32 votes(i32 buffer, i32 consumer) const { return query(buffer) + kVotes + 4 * consumer; }
  __device__ __forceinline__ float& one() const { return *reinterpret_cast<float*>(bytes + kOne); }
  __device__ __forceinline__ StoreWholeRows<Config> rows(i32 warp) const {
    return {bytes + kOutputRows + warp * StoreWholeRows<Config>::kBytes};
  }
  __device__ __forceinline__ KeyInterval& window(i32 row) const {
    return reinterpret_cast<KeyInterval*>(bytes + kWindows)[row];
  }
  __device__ __forceinline__ u32& before(i32 end, i32 t) const {
    return reinterpret_cast<u32*>(bytes + kBefore)[4 * end + t];
  }
  // Of a row the word of FragmentBits of the lanes with lane % 4 = t.
  __device__ __forceinline__ u32 bits(i32 stage, i32 row, i32 t) const {
    constexpr i32 kRowBytes = FragmentBits<Config::kBlockN>::kRowBytes;
    return kv_stage(stage) + kBits + row * kRowBytes + t * (kRowBytes / 4);
  }
  __device__ __forceinline__ u32 query(i32 buffer) const { return first + buffer * kQueryBytes; }
  __device__ __forceinline__ u32 kv_stage(i32 stage) const { return first + kKvStages + stage * kStageBytes; }
  // The producer's thread for Q arrives; its thread for KV tiles and its warps that find norms and make bits wait.
  __device__ __forceinline__ u32 query_tile_full(i32 buffer) const { return first + kBarriers + buffer * 24; }
  // The producer arrives, with the buffer's bytes; consumers wait.
  __device__ __forceinline__ u32 query_full(i32 buffer) const { return query_tile_full(buffer) + 8; }
  // Every consumer thread arrives when it has read the buffer, the producer's thread for KV tiles when it has issued
  // all their loads, and of a sparse mask its warp that makes bits when it has made them. The producer's thread for Q
  // waits.
  __device__ __forceinline__ u32 query_empty(i32 buffer) const { return query_full(buffer) + 8; }
  // The producer arrives, with the stage's bytes, and of a sparse mask its warp that makes bits; consumers wait.
  __device__ __forceinline__ u32 full(i32 stage) const { return query_tile_full(2) + stage * 16; }
  // Every consumer thread arrives when it and its products have read the stage; the producer waits.
  __device__ __forceinline__ u32 empty(i32 stage) const { return full(stage) + 8; }
};

// The constants that store_output() needs of a query tile, read from a query buffer.
template <class Shared>
struct ConstantsInShared {
  u32 query;

  __device__ __forceinline__ float row_bias(i32 row) const {
    return ptx::load_shared_f32(query + Shared::kRowBias + row * 4);
  }
  __device__ __forceinline__ ptx::F32x2 v_scale(i32 channel) const {
    return ptx::load_shared_f32x2(query + Shared::kChannelConstants + channel * 4);
  }
  __device__ __forceinline__ ptx::F32x2 v_mean(i32 channel) const {
    return ptx::load_shared_f32x2(query + Shared::kChannelConstants + Shared::kChannelBytes + channel * 4);
  }
};

}  // namespace sage
