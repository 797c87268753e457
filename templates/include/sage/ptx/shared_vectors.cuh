// Stores of 16 bytes to shared memory. In a header of its own: a change of shared.cuh recompiles nearly all kernels.
// Source: PTX ISA, "st".
#pragma once

#include "sage/ptx/shared.cuh"

namespace sage::ptx {

// `shared`: a multiple of 16.
__device__ __forceinline__ void store_shared_u32x4(u32 shared, const U32x4& x) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
               : "memory");
}

}  // namespace sage::ptx
