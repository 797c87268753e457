// How many queries and keys a batch entry has: today all entries the same.
#pragma once

#include "sage/types.cuh"

namespace sage {

// A view of the params of any kernel. Copies of the lengths would cost registers.
template <class Params>
struct Seqlen {
  const Params& params;

  __device__ __forceinline__ i32 q() const { return params.seqlen_q; }
  __device__ __forceinline__ i32 kv() const { return params.seqlen_kv; }
};

template <class Params>
__device__ __forceinline__ Seqlen<Params> seqlen_of(const Params& params, [[maybe_unused]] i32 batch) {
  return {params};
}

}  // namespace sage
