// Named barriers among some of a block's warps, by number; 0 is the barrier of __syncthreads. All lanes of a warp must
// call a function together.
// Source: PTX ISA, "barrier".
#pragma once

#include "sage/types.cuh"

namespace sage::ptx {

// Arrives, and waits until `threads` threads, in whole warps, have arrived by either function.
__device__ __forceinline__ void barrier_sync(u32 barrier, u32 threads) {
  asm volatile("barrier.sync.aligned %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// Arrives without waiting.
__device__ __forceinline__ void barrier_arrive(u32 barrier, u32 threads) {
  asm volatile("barrier.arrive.aligned %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

}  // namespace sage::ptx
