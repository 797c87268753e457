// The tiles that a block of the quantizer takes, and the shared memory of its threads.
#pragma once

#include "sage/problem/heads.cuh"
#include "sage/problem/seqlen.cuh"
#include "sage/quant/params.cuh"
#include "sage/quant/sample.cuh"
#include "sage/quant/source.cuh"
#include "sage/tile/address.cuh"

namespace sage {

// Config: kHeadDim, kQk, kPv, kBlockM, kBlockN, kWarpM, kThreads.
template <class Config>
struct QuantBlock {
  using Layout = TileLayout<Config>;
  static constexpr i32 kVectors = Config::kHeadDim / kVector;  // lanes side by side on a row
  static constexpr i32 kWarps = Config::kThreads / kWarpSize;

  // KV tiles that a block takes at once. A thread issues the loads of all of its rows before it uses the first, since
  // only loads in flight hide the memory's latency: kInFlight loads, thus kTilesInFlight tiles. A scale group of K has
  // at least one warp, thus at most kMostTiles tiles; at 4 bits it has exactly one, within which ClipSearch sums.
  static constexpr i32 kInFlight = 8;
  static constexpr i32 kMostTiles = kWarps / kKeyGroups;
  static constexpr i32 kTilesInFlight = kInFlight * Config::kThreads / (Config::kBlockN * kVectors);
  static constexpr bool kOneWarpAGroup = Config::kQk == Qk::kInt4 || kTilesInFlight > kMostTiles;
  static constexpr i32 kTiles = kOneWarpAGroup ? kMostTiles : kTilesInFlight;
  static constexpr i32 kTilesOfV = kTiles < kTilesInFlight ? kTiles : kTilesInFlight;  // V's at once
  static constexpr i32 kWarpsPerGroup = kMostTiles / kTiles;                           // of keys that share a scale
  static constexpr i32 kMostWarpsOfTile = Config::kPv == Pv::kE4m3 ? 2 : 1;
  static_assert(kTiles >= 1 && kWarpsPerGroup * kTiles * kKeyGroups == kWarps, "a block takes whole KV tiles");
  static_assert(kTilesOfV >= 1 && kTiles % kTilesOfV == 0, "a block takes as many tiles of V as of K");

  // Shared memory; of channels four are read at once.
  struct alignas(16) Shared {
    float factor[Config::kHeadDim];  // of the block's rows: a channel x becomes x * factor + shift
    float shift[Config::kHeadDim];
    float k_mean[Config::kHeadDim];            // blocks of Q
    typename SampleLayout<Config>::Sums sums;  // blocks of Q
    // Blocks of V in e4m3: errors of sums that the warps of a tile found, two channels a word.
    alignas(16) u32 v_error[kTilesOfV][kMostWarpsOfTile][Config::kHeadDim / 2];
    u32 spoilt[kTiles][KvLine::kMost / 32];  // blocks of K and V: k_spoilt or v_spoilt of the tiles
    float amax[kTiles][kWarps];              // blocks of K and V: what a warp found in a tile
  };

  // Call with all threads, and put a barrier behind it.
  __device__ __forceinline__ static void clear_spoilt(Shared& shared) {
    constexpr i32 kWords = KvLine::kMost / 32;
    if (ptx::thread_index() < kTiles * kWords)
      shared.spoilt[ptx::thread_index() / kWords][ptx::thread_index() % kWords] = 0;
  }

  // Marks a key of a tile, or a vector of channels.
  __device__ __forceinline__ static void mark_spoilt(Shared& shared, i32 tile, i32 which) {
    atomicOr(&shared.spoilt[tile][which / 32], 1u << which % 32);
  }

  // Returns whether the tile has marks, and then stores them to its line. thread: of those that share the tile.
  template <i32 kWords>
  __device__ __forceinline__ static bool store_spoilt(const Shared& shared, i32 tile, i32 thread,
                                                      u32 (&of_line)[kWords]) {
    u32 any = 0;
#pragma unroll
    for (i32 w = 0; w < kWords; ++w) any |= shared.spoilt[tile][w];
    if (any != 0 && thread < kWords) of_line[thread] = shared.spoilt[tile][thread];
    return any != 0;
  }

  template <SourceRows kSource>
  __device__ __forceinline__ static Source<kSource> kv_source(const QuantParams& params, const Tensor& tensor,
                                                              i32 batch, i32 head) {
    const auto seqlen = seqlen_of(params, batch);
    // Without keys, one row that no query sees: the batch entry's own, or of an empty sequence at the end another's.
    const i32 rows = max(seqlen.kv(), 1), first_row = min(seqlen.kv_begin(), params.kv_rows - 1);
    return Source<kSource>(tensor, batch, head, first_row, rows, params.headdim, params.dtype,
                           key_index_of(params, batch));
  }

  // Whether there are keys from a tile on.
  __device__ __forceinline__ static bool has_keys(i32 rows, i32 first_tile) {
    return first_tile * Config::kBlockN < rows;
  }
};

}  // namespace sage
