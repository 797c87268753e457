// Global memory, 16 bytes at once: the compiler splits what it stores under a predicate.
// Source: PTX ISA, "st".
#pragma once

#include "sage/ptx/shared.cuh"

namespace sage::ptx {

// `address`: a multiple of 16.
__device__ __forceinline__ void store_global_u32x4(void* address, const U32x4& x) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
               : "memory");
}

}  // namespace sage::ptx
