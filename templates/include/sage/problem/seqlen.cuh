// How many queries and keys there are: of every batch entry the same.
#pragma once

#include "sage/types.cuh"

namespace sage {

struct Seqlen {
  i32 q, kv;
};

// Params: AttnParams or DeltaParams.
template <class Params>
__device__ __forceinline__ Seqlen seqlen_of(const Params& params) {
  return {params.seqlen_q, params.seqlen_kv};
}

}  // namespace sage
