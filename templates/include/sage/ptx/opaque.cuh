// A copy that the compiler knows nothing of.
// Source: "Inline PTX Assembly in CUDA", "Incorrect Optimization".
#pragma once

#include "sage/types.cuh"

namespace sage::ptx {

// Returns x. The compiler computes anew what follows from the result of each call, and keeps nothing of it in registers
// between calls.
__device__ __forceinline__ u32 opaque(u32 x) {
  asm volatile("" : "+r"(x));
  return x;
}

}  // namespace sage::ptx
