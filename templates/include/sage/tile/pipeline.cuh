// Warpgroups, and the stages of a pipeline between the producer and the consumers.
#pragma once

#include "sage/types.cuh"

namespace sage {

constexpr i32 kWarpgroup = 4 * kWarpSize;

// A stage of a pipeline of kSize buffers, and the parity of the phase of its mbarriers.
template <i32 kSize>
struct PipelineState {
  i32 index = 0;
  u32 phase = 0;

  __device__ __forceinline__ void advance() {
    if (++index == kSize) index = 0, phase ^= 1;
  }
};

}  // namespace sage
