// How many queries and keys a batch entry has. A key mask leaves some of the caller's keys. Quantizers and attention
// see these alone, packed: in their order, without gaps.
#pragma once

#include "sage/ptx/global.cuh"
#include "sage/types.cuh"

namespace sage {

// Of a batch entry's first value in key_rank. 32 bits: the host refuses masks of 2^31 values.
template <class Params>
__device__ __forceinline__ i32 key_rank_index(const Params& params, i32 batch) {
  return batch * (params.seqlen_kv + 1);
}

// A view of the params of any kernel. Copies of the lengths would cost registers.
template <class Params>
struct Seqlen {
  const Params& params;
  const i32 batch;

  __device__ __forceinline__ i32 q() const { return params.seqlen_q; }

  // Packed keys. kBranch: as packed() has it.
  template <bool kBranch = false>
  __device__ __forceinline__ i32 kv() const {
    return packed<kBranch>(params.seqlen_kv);
  }

  // The caller's keys. Causal masks count in these.
  __device__ __forceinline__ i32 kv_of_caller() const { return params.seqlen_kv; }

  // How many of the caller's first `keys` keys the key mask leaves. kBranch: where there is no key mask, branch around
  // the load in place of predicating it, which costs registers.
  template <bool kBranch = false>
  __device__ __forceinline__ i32 packed(i32 keys) const {
    if constexpr (kBranch) {
      if (params.key_rank == nullptr) return keys;
      return params.key_rank[key_rank_index(params, batch) + keys];
    } else {
      const i32* rank = params.key_rank + (key_rank_index(params, batch) + keys);
      return ptx::load_global_i32(rank, params.key_rank != nullptr, keys);
    }
  }
};

template <class Params>
__device__ __forceinline__ Seqlen<Params> seqlen_of(const Params& params, i32 batch) {
  return {params, batch};
}

// The caller's keys by packed key, of one batch entry; null: no key mask.
template <class Params>
__device__ __forceinline__ const i32* key_index_of(const Params& params, i32 batch) {
  return params.key_index == nullptr ? nullptr : params.key_index + static_cast<i64>(batch) * params.seqlen_kv;
}

}  // namespace sage
