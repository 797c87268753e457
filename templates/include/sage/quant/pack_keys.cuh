// The keys that a key mask leaves, numbered in their order. Quantizers read the keys by these numbers, so that a mask
// saves the work of the keys that it takes away. Of the caller's first n keys, those that are left are the first
// key_rank[n] of the numbered keys: a causal query sees these.
#pragma once

#include "sage/problem/seqlen.cuh"
#include "sage/ptx/special.cuh"
#include "sage/ptx/warp.cuh"
#include "sage/quant/params.cuh"

namespace sage {

// Config: kThreads. A block takes a batch entry.
template <class Config>
struct PackKeys {
  static constexpr i32 kWarps = Config::kThreads / kWarpSize;
  static constexpr i32 kWords = 4;  // of 32 neighbouring keys each, which a warp takes in a round

  struct Shared {
    i32 visible[kWarps];  // keys of a warp in this round
  };

  // Figures for the host: to launch the kernel.
  static constexpr auto facts() { return sage::facts(Fact{"threads", Config::kThreads}, Fact{"shared_bytes", 0}); }

  const PackParams& params;
  Shared& shared;

  __device__ __forceinline__ void run() const {
    const i32 batch = ptx::block_index(), warp = ptx::thread_index() / kWarpSize;
    const u8* mask = static_cast<const u8*>(params.key_mask.data) + batch * params.key_mask.stride.batch;
    i32* rank = params.key_rank + key_rank_index(params, batch);
    i32* index = params.key_index + static_cast<i64>(batch) * params.seqlen_kv;
    i32 visible = 0;  // keys of all rounds so far
#pragma unroll 1
    for (i32 first = 0; first < params.seqlen_kv; first += kWords * Config::kThreads) {
      const i32 first_key = first + warp * kWords * kWarpSize;
      u32 words[kWords];
      const i32 of_warp = vote(mask, first_key, words);
      if (lane() == 0) shared.visible[warp] = of_warp;
      __syncthreads();
      i32 before = visible;  // of the warps before this one
#pragma unroll 4
      for (i32 w = 0; w < kWarps; ++w) {
        if (w < warp) before += shared.visible[w];
        visible += shared.visible[w];
      }
      store(words, first_key, before, rank, index);
      __syncthreads();  // all warps have read the counts
    }
    if (ptx::thread_index() == 0) {
      rank[params.seqlen_kv] = visible;
      if (visible == 0) index[0] = 0;
    }
  }

 private:
  __device__ __forceinline__ static i32 lane() { return ptx::thread_index() % kWarpSize; }

  // A bit for each key of this round that may be seen; returns their number.
  __device__ __forceinline__ i32 vote(const u8* mask, i32 first_key, u32 (&words)[kWords]) const {
    bool seen[kWords];
#pragma unroll
    for (i32 w = 0; w < kWords; ++w) {
      const i32 key = first_key + w * kWarpSize + lane();
      seen[w] = key < params.seqlen_kv && mask[key * params.key_mask.stride.row] != 0;
    }
    i32 visible = 0;
#pragma unroll
    for (i32 w = 0; w < kWords; ++w) {
      words[w] = ptx::ballot(seen[w]);
      visible += ptx::popcount(words[w]);
    }
    return visible;
  }

  // before: keys in front of first_key that may be seen.
  __device__ __forceinline__ void store(const u32 (&words)[kWords], i32 first_key, i32 before, i32* rank,
                                        i32* index) const {
#pragma unroll
    for (i32 w = 0; w < kWords; ++w) {
      const i32 key = first_key + w * kWarpSize + lane();
      const i32 at = before + ptx::popcount(words[w] & ((1u << lane()) - 1));
      if (key < params.seqlen_kv) rank[key] = at;
      if (words[w] >> lane() & 1) index[at] = key;
      before += ptx::popcount(words[w]);
    }
  }
};

}  // namespace sage
