// Copies of consecutive bytes from global to shared memory by all threads of a block.
#pragma once

#include "sage/ptx/cp_async.cuh"

namespace sage {

// All threads of the block copy kBytes consecutive bytes, 16 at a time; `global` is this thread's first.
template <i32 kBytes, i32 kThreads>
__device__ __forceinline__ void copy_async(u32 shared, const u8* global) {
  constexpr i32 kAtOnce = 16 * kThreads, kRest = kBytes % kAtOnce, kWhole = kBytes - kRest;
  static_assert(kRest % 16 == 0);
#pragma unroll
  for (i32 i = 0; i < kWhole; i += kAtOnce) ptx::cp_async_16(shared + threadIdx.x * 16 + i, global + i);
  if constexpr (kRest != 0) {
    if (threadIdx.x < kRest / 16) ptx::cp_async_16(shared + threadIdx.x * 16 + kWhole, global + kWhole);
  }
}

}  // namespace sage
