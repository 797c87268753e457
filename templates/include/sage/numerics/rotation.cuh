// Rows of Q and K times the Hadamard matrix, or blocks of their channels times a smaller one. Every channel of the
// result is a sum of all channels of the row or block, with signs, so that a channel with larger values than the others
// does not set the scale of its row alone. The dot product of two rotated rows is the dot product of the rows as they
// came, times a constant.
#pragma once

#include "sage/ptx/special.cuh"
#include "sage/ptx/warp.cuh"
#include "sage/types.cuh"

namespace sage {

// Lanes that hold a block of channels.
constexpr i32 kBlockLanes = 1;

// Rotates one row, or one block, per kLanes neighbouring lanes, each of which holds kChannels channels. Every lane of
// the warp must call this. Divides by the number of channels first, so that no sum overflows.
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

// Rotates one row per kLanes lanes as `rotation` says. kBlocks, kOthers: whether that may be kBlocks, or another.
template <bool kBlocks, bool kOthers, i32 kLanes, i32 kChannels>
__device__ __forceinline__ void rotate_as(Rotation rotation, float (&x)[kChannels]) {
  if (kBlocks && (!kOthers || rotation == Rotation::kBlocks)) rotate<kBlockLanes>(x);
  else if (kOthers && rotation == Rotation::kRows) rotate<kLanes>(x);
}

// The channels that are rotated together, which is the factor that this takes off the dot products of rows.
template <bool kBlocks, bool kOthers, i32 kLanes, i32 kChannels>
__device__ __forceinline__ float rotated_channels(Rotation rotation) {
  if (kBlocks && (!kOthers || rotation == Rotation::kBlocks)) return kBlockLanes * kChannels;
  return kOthers && rotation == Rotation::kRows ? kLanes * kChannels : 1.0f;
}

}  // namespace sage
