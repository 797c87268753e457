// Barriers among some of a block's warps, by number; 0 is __syncthreads. All lanes of a warp come together.
// Source: PTX ISA, "barrier".
#pragma once

#include "sage/types.cuh"

namespace sage::ptx {

// Waits until `threads` threads, in whole warps, have come to the barrier, by either function.
__device__ __forceinline__ void barrier_sync(u32 barrier, u32 threads) {
  asm volatile("barrier.sync.aligned %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// Comes to the barrier without waiting.
__device__ __forceinline__ void barrier_arrive(u32 barrier, u32 threads) {
  asm volatile("barrier.arrive.aligned %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

}  // namespace sage::ptx
