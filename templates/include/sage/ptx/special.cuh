// Special registers.
// Source: PTX ISA, "Special Registers".
#pragma once

#include "sage/types.cuh"

namespace sage::ptx {

// blockIdx.x, read again at every call: values computed from it need no registers between calls.
__device__ __forceinline__ u32 block_index() {
  u32 x;
  asm volatile("mov.u32 %0, %ctaid.x;" : "=r"(x));
  return x;
}

// gridDim.x, likewise.
__device__ __forceinline__ u32 grid_blocks() {
  u32 x;
  asm volatile("mov.u32 %0, %nctaid.x;" : "=r"(x));
  return x;
}

// threadIdx.x, likewise.
__device__ __forceinline__ u32 thread_index() {
  u32 x;
  asm volatile("mov.u32 %0, %tid.x;" : "=r"(x));
  return x;
}

}  // namespace sage::ptx
