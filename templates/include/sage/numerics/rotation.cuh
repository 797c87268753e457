// Rows of Q and K times the Hadamard matrix. Every channel of the result is a sum of all channels, with signs, so that
// no channel with larger values than the others sets the scale of its row. The dot product of two rotated rows is the
// dot product of the rows as they came, times a constant.
#pragma once

#include "sage/ptx/special.cuh"
#include "sage/ptx/warp.cuh"

namespace sage {

// Rotates one row per kLanes neighbouring lanes, each of which holds kChannels channels. Every lane of the warp must
// call this. Divides by the number of channels first, so that no sum overflows.
template <i32 kLanes, i32 kChannels>
__device__ __forceinline__ void rotate(float (&x)[kChannels]) {
  static_assert((kLanes & (kLanes - 1)) == 0 && (kChannels & (kChannels - 1)) == 0, "a Hadamard matrix of 2^n");
#pragma unroll
  for (i32 i = 0; i < kChannels; ++i) x[i] *= 1.0f / (kLanes * kChannels);
#pragma unroll
  for (i32 stride = 1; stride < kChannels; stride *= 2) {
#pragma unroll
    for (i32 i = 0; i < kChannels; ++i) {
      if (i & stride) continue;
      const float a = x[i], b = x[i + stride];
      x[i] = a + b;
      x[i + stride] = a - b;
    }
  }
#pragma unroll
  for (i32 mask = 1; mask < kLanes; mask *= 2) {
    const float sign = ptx::thread_index() & mask ? -1.0f : 1.0f;
#pragma unroll
    for (i32 i = 0; i < kChannels; ++i) x[i] = fmaf(x[i], sign, ptx::shuffle_xor(x[i], mask));
  }
}

}  // namespace sage
