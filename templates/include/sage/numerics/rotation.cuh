// Rows of Q and K times the Hadamard matrix: every channel of the result is a sum of all, with signs, so that no channel that
// is larger than the others sets the scale of its row. A product of two such rows is that of the rows before, times a constant.
#pragma once

#include "sage/ptx/special.cuh"
#include "sage/ptx/warp.cuh"

namespace sage {

// A row of kLanes · kChannels values, kChannels of which a lane holds, kLanes neighbours side by side; a warp rotates as many rows at
// once as it has such lanes, by all of them. Divided by the length of the row: no value overflows. Both are powers of two.
template <i32 kLanes, i32 kChannels>
__device__ __forceinline__ void rotate(float (&x)[kChannels]) {
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
