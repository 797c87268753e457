// The tiles that a block of the quantizer takes, and the shared memory of its threads.
#pragma once

#include "sage/params.cuh"
#include "sage/quant/sample.cuh"
#include "sage/quant/source.cuh"
#include "sage/tile/address.cuh"

namespace sage {

// Config: kHeadDim, kQkBits, kPv, kBlockM, kBlockN, kWarpM, kThreads.
template <class Config>
struct QuantBlock {
  using Layout = TileLayout<Config>;
  static constexpr i32 kVectors = Config::kHeadDim / kVector;  // lanes side by side on a row
  static constexpr i32 kWarps = Config::kThreads / kWarpSize;

  // Tiles of K or V that a block takes at once: at most kInFlight loads a thread, all issued before the first is used,
  // since only loads in flight hide the memory's latency; and at least one warp for each scale group of K.
  static constexpr i32 kInFlight = 8;
  static constexpr i32 kMostTiles = kWarps / kKeyGroups;
  static constexpr i32 kTilesInFlight = kInFlight * Config::kThreads / (Config::kBlockN * kVectors);
  static constexpr i32 kTiles = kTilesInFlight < kMostTiles ? kTilesInFlight : kMostTiles;
  static constexpr i32 kWarpsPerGroup = kMostTiles / kTiles;  // of keys that share a scale
  static_assert(kTiles >= 1 && kWarpsPerGroup * kTiles * kKeyGroups == kWarps, "a block takes whole KV tiles");

  // Shared memory; of channels four are read at once.
  struct alignas(16) Shared {
    float mean[Config::kHeadDim];         // of K in blocks of Q and K, of V in blocks of V
    float q_mean[Config::kHeadDim];       // blocks of Q
    float magnitude[Config::kHeadDim];    // blocks of V
    float inv_v_scale[Config::kHeadDim];  // blocks of V
    float v_shift[Config::kHeadDim];      // blocks of V
    typename Sample<Config>::Parts parts;
    float amax[kTiles][kWarps];  // blocks of K and V: what a warp found in a tile
    i32 finite[kTiles]
              [Config::kHeadDim];  // keys of a tile before the first that is not finite, or kBlockN; of K one a tile
  };

  __device__ __forceinline__ static u8* kv_tile(const QuantParams& params, i32 head, i32 tile) {
    return kv_tile_address<Config>(params.kv_hat, head, params.kv_tiles, tile);
  }

  template <Rows kSource>
  __device__ __forceinline__ static Source<kSource> kv_source(const QuantParams& params, const Tensor& tensor,
                                                              i32 head) {
    return Source<kSource>(tensor, head / params.num_kv_heads, head % params.num_kv_heads, params.seqlen_kv,
                           params.headdim, params.dtype);
  }
};

}  // namespace sage
