// A copy that the compiler knows nothing of.
// Source: "Inline PTX Assembly in CUDA", "Incorrect Optimization".
#pragma once

#include "sage/types.cuh"

namespace sage::ptx {

// x, but what is computed from it is computed anew at every call, and not kept in registers from one use to the next.
__device__ __forceinline__ u32 opaque(u32 x) {
  asm volatile("" : "+r"(x));
  return x;
}

}  // namespace sage::ptx
