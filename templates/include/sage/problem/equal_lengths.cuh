// The mask of a backward pass, whose batch entries all have the same lengths and no key mask.
#pragma once

#include "sage/params.cuh"
#include "sage/problem/mask.cuh"

namespace sage {

// Lengths as visible_keys() asks for them.
struct EqualLengths {
  i32 queries, keys;

  __device__ __forceinline__ explicit EqualLengths(const BwdParams& params)
      : queries(params.seqlen_q), keys(params.seqlen_kv) {}

  __device__ __forceinline__ i32 q() const { return queries; }
  __device__ __forceinline__ i32 kv_of_caller() const { return keys; }
  template <bool kBranch = false>
  __device__ __forceinline__ i32 kv() const {
    return keys;
  }
  template <bool kBranch = false>
  __device__ __forceinline__ i32 packed(i32 first_keys) const {
    return first_keys;
  }
};

// The end of the keys that a query sees.
__device__ __forceinline__ i32 visible_end(const BwdParams& params, i32 query) {
  const EqualLengths lengths(params);
  return params.is_causal ? visible_keys<Mask::kCausal>(lengths, query).end
                          : visible_keys<Mask::kFull>(lengths, query).end;
}

}  // namespace sage
