// Functions that the quantizers of Q and K share: the largest magnitude of a row, rounding of rows.
#pragma once

#include "sage/numerics/integers.cuh"
#include "sage/numerics/nvfp4.cuh"
#include "sage/ptx/math.cuh"
#include "sage/ptx/warp.cuh"
#include "sage/quant/block.cuh"

namespace sage {

// Whether all rows take the path of smoothed, balanced or rotated rows, even rows that are none of these: in the entry
// point for all other rows (SourceRows::kAny), and at 4 bits, where nearly all rows are smoothed or rotated. A second
// path would double the compile time.
template <class Config, SourceRows kSource>
constexpr bool kAlwaysChanged = kSource == SourceRows::kAny || bits_of(Config::kQk) == 4;

// Largest magnitude; NaN or infinity where an element is not finite.
template <i32 kRows>
__device__ __forceinline__ float abs_max(const float (&x)[kRows][kVector]) {
  float amax = 0.0f;
#pragma unroll
  for (i32 r = 0; r < kRows; ++r) {
#pragma unroll
    for (i32 i = 0; i < kVector; ++i) amax = ptx::max_nan(amax, fabsf(x[r][i]));
  }
  return amax;
}

// Zeros for what is not finite; returns the largest magnitude left.
template <i32 kRows>
__device__ __forceinline__ float make_finite(float (&x)[kRows][kVector]) {
#pragma unroll
  for (i32 r = 0; r < kRows; ++r) {
#pragma unroll
    for (i32 i = 0; i < kVector; ++i) x[r][i] = finite_or_zero(x[r][i]);
  }
  return abs_max(x);
}

// The counterpart of Integers for NVFP4: the scale of a row, above the scales of its groups. It is a power of two, and
// brings the scales of the groups to the range of ue4m3.
struct Nvfp4Rows {
  static constexpr float kLimit = kLargestScaled;
  __device__ __forceinline__ static Scale scale(float amax) { return power_of_two_scale_below(kLimit, amax); }
};

template <class Config, bool kInteger = Config::kQk != Qk::kNvfp4>
struct SelectRows {
  using Type = Integers<bits_of(Config::kQk)>;
};
template <class Config>
struct SelectRows<Config, false> {
  using Type = Nvfp4Rows;
};

// Quantized rows of Q and K, and where they lie in a tile.
template <class Config>
struct QuantizedRows : SelectRows<Config>::Type {
  // Stores eight channels of a row. to: where they lie in a tile; group_scale: the place of the scale of their group,
  // which two neighbouring lanes share, if groups have scales. All lanes of a warp must call this. Returns the sum of
  // the squares of integers.
  __device__ __forceinline__ static i32 store(u8* to, u8* group_scale, const float (&x)[kVector], float inv_scale) {
    if constexpr (Config::kQk != Qk::kNvfp4) {
      return Integers<bits_of(Config::kQk)>::store(to, x, inv_scale);
    } else {
      float scaled[kVector];
#pragma unroll
      for (i32 i = 0; i < kVector; ++i) scaled[i] = x[i] * inv_scale;
      const u32 scale = nvfp4_scale<kNvfp4Group / kVector>(scaled);
      *reinterpret_cast<u32*>(to) = e2m1_word(scaled, inv_nvfp4_scale(scale));
      if (ptx::thread_index() % (kNvfp4Group / kVector) == 0) *group_scale = static_cast<u8>(scale);
      return 0;
    }
  }

  // The address of the scale of a row's group, for this thread's channels. `scales`: those of the tile. Null where
  // groups have none.
  __device__ __forceinline__ static u8* group_scale(u8* scales, i32 row) {
    if constexpr (Config::kQk != Qk::kNvfp4) {
      return nullptr;
    } else {
      const i32 group = ptx::thread_index() % QuantBlock<Config>::kVectors * kVector / kNvfp4Group;
      return scales + row * QuantBlock<Config>::Layout::kQkRowScales + group;
    }
  }

  // The offset of eight channels of a row in a tile, as part of a chunk. Eight rows further, it is eight rows' bytes
  // more.
  template <class Swizzle>
  __device__ __forceinline__ static i32 offset(i32 row, i32 first_channel) {
    const i32 byte = first_channel * bits_of(Config::kQk) / 8;
    return Swizzle::offset(row, byte / 16) + byte % 16;
  }
};

}  // namespace sage
