// Flags in global memory by which blocks of a grid wait for each other.
// Source: PTX ISA, "ld", "st", "membar / fence", "Memory Consistency Model".
#pragma once

#include "sage/types.cuh"

namespace sage::ptx {

// fence_gpu() must stand between these and accesses that the flag is for.
__device__ __forceinline__ u32 load_flag(const u32* address) {
  u32 x;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(address) : "memory");
  return x;
}
__device__ __forceinline__ void store_flag(u32* address, u32 x) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(address), "r"(x) : "memory");
}
__device__ __forceinline__ void fence_gpu() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

}  // namespace sage::ptx
