// A copy of a value, of which the compiler cannot tell that it equals the value.
// Source: "Inline PTX Assembly in CUDA", "Incorrect Optimization".
#pragma once

#include "sage/types.cuh"

namespace sage::ptx {

// Returns x. The compiler takes each call's result for a new value: it computes anew what follows from the result, and
// keeps nothing computed from an earlier call in registers.
__device__ __forceinline__ u32 opaque(u32 x) {
  asm volatile("" : "+r"(x));
  return x;
}
__device__ __forceinline__ i64 opaque(i64 x) {
  asm volatile("" : "+l"(x));
  return x;
}

}  // namespace sage::ptx
