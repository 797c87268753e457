// How many queries and keys a batch entry has. A key mask leaves some of the caller's keys. Quantizers and attention
// see these alone, packed: in their order, without gaps.
#pragma once

#include "sage/problem/sequences.cuh"
#include "sage/ptx/global.cuh"
#include "sage/types.cuh"

namespace sage {

// The index of a batch entry's first value in key_rank. 32 bits: the host refuses masks of 2^31 values.
template <class Params>
__device__ __forceinline__ i32 key_rank_index(const Params& params, i32 batch) {
  return batch * (params.seqlen_kv + 1);
}

// The lengths of a batch entry, looked up.
struct Lengths {
  i32 q, kv_of_caller;
};

// A view of the params of any kernel. kStored: of looked-up lengths, too. Copies of them would cost registers.
template <class Params, bool kStored = false>
struct Seqlen {
  const Params& params;
  const i32 batch;
  const Lengths* const stored = nullptr;

  __device__ __forceinline__ i32 q() const {
    if constexpr (kStored) return stored->q;
    else return rows(params.cu_seqlens_q, params.seqlen_q);
  }

  __device__ __forceinline__ Lengths lengths() const { return {q(), kv_of_caller()}; }

  // The first query's row in the caller's tensor.
  __device__ __forceinline__ i32 q_begin() const { return begin(params.cu_seqlens_q); }
  __device__ __forceinline__ i32 kv_begin() const { return begin(params.cu_seqlens_k); }

  // Packed keys. kBranch: as packed() has it.
  template <bool kBranch = false>
  __device__ __forceinline__ i32 kv() const {
    return packed<kBranch>(kv_of_caller());
  }

  // The caller's keys. Causal masks count in these.
  __device__ __forceinline__ i32 kv_of_caller() const {
    if constexpr (kStored) return stored->kv_of_caller;
    else return rows(params.cu_seqlens_k, params.seqlen_kv);
  }

  // The number of the caller's first `keys` keys that the key mask leaves. kBranch: where there is no key mask, branch
  // around the load instead of a predicate on it, which costs registers.
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

 private:
  __device__ __forceinline__ i32 rows(const i32* cu_seqlens, i32 most) const {
    const bool exists = cu_seqlens != nullptr;
    const i32 end = ptx::load_global_i32(cu_seqlens + batch + 1, exists, most);
    return min(most, end - begin(cu_seqlens));
  }
  __device__ __forceinline__ i32 begin(const i32* cu_seqlens) const {
    return ptx::load_global_i32(cu_seqlens + batch, cu_seqlens != nullptr, 0);
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
