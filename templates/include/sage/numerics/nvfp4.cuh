// NVFP4: e2m1 in groups of 16 elements that share a scale of type ue4m3, which is e4m3 without the sign.
// Source: "SageAttention3" (arXiv:2505.11594), section 3.1; "Four Over Six" (arXiv:2512.02010); PTX ISA, "Alternate
// Floating-Point Data Formats".
#pragma once

#include "sage/numerics/arithmetic.cuh"
#include "sage/numerics/scale.cuh"
#include "sage/ptx/math.cuh"
#include "sage/ptx/warp.cuh"

namespace sage {

constexpr i32 kNvfp4Group = 16;
constexpr float kLargestE2m1 = 6.0f, kLargestE4m3 = 448.0f;

// The largest magnitude that nvfp4_scale() takes.
constexpr float kLargestScaled = 4.0f * kLargestE4m3;

// The value of a ue4m3.
__device__ __forceinline__ float f32_from_ue4m3(u32 code) {
  return __uint_as_float(code << 20) * 0x1p120f;  // same mantissa, another bias of the exponent; subnormals too
}

// The factor of a group's elements: the reciprocal of the scale as it was rounded. Zero for a scale of zero.
__device__ __forceinline__ float inv_nvfp4_scale(u32 scale) {
  return scale == 0 ? 0.0f : divide(1.0f, f32_from_ue4m3(scale));
}

// The number of e2m1 that is nearest to |y|, ties to even; magnitudes above 6 become 6.
__device__ __forceinline__ float nearest_e2m1(float y) {
  constexpr float kHalves = 0x1.8p22f;             // added to a number below one, it leaves units of 1/2
  constexpr u32 kCut = 1u << (kMantissaBits - 1);  // in units of the last bit that stays, from one on
  y = fminf(fabsf(y), kLargestE2m1);
  const u32 bits = __float_as_uint(y), odd = bits / kCut % 2;
  const u32 from_one = (bits + kCut / 2 - 1 + odd) / kCut * kCut;
  return y < 1.0f ? (y + kHalves) - kHalves : __uint_as_float(from_one);
}

// x · inv_scale as e2m1, rounded as ptx::e2m1x8() does, of which only chips with FP4 tensor cores have the instruction.
// Minus zero for minus zero alone: other x that round to zero become plus zero.
__device__ __forceinline__ u32 e2m1(float x, float inv_scale) {
  const float y = nearest_e2m1(x * inv_scale);
  const u32 from_one = (__float_as_uint(y) >> (kMantissaBits - 1)) - (2 * kExponentBias - 2);
  const u32 code = y < 1.0f ? static_cast<u32>(2.0f * y) : from_one;
  const u32 sign = __float_as_uint(x) >> 28 & 8;
  return code != 0 || x == 0.0f ? code | sign : 0;
}

// Elements side by side, the first in the lowest bits.
template <i32 kCount>
__device__ __forceinline__ u32 e2m1_word(const float (&x)[kCount], float inv_scale) {
  static_assert(kCount <= 8);
  u32 word = 0;
#pragma unroll
  for (i32 i = 0; i < kCount; ++i) word |= e2m1(x[i], inv_scale) << 4 * i;
  return word;
}

// The squared error of a group with a scale. kLanes neighbouring lanes hold kCount elements each.
template <i32 kLanes, i32 kCount>
__device__ __forceinline__ float nvfp4_error(const float (&x)[kCount], u32 scale) {
  const float inv_scale = inv_nvfp4_scale(scale), value = f32_from_ue4m3(scale);
  float error = 0.0f;
#pragma unroll
  for (i32 i = 0; i < kCount; ++i) {
    const float lost = fmaf(nearest_e2m1(x[i] * inv_scale), value, -fabsf(x[i]));
    error = fmaf(lost, lost, error);
  }
  return ptx::sum_over_lanes<kLanes>(error);
}

// The scale of a group: of the two that take its largest magnitude to 6 and to 4, that with the lesser squared error.
// To 4, since e2m1 has nothing between 4 and 6. Call with all lanes of a warp.
template <i32 kLanes, i32 kCount>
__device__ __forceinline__ u32 nvfp4_scale(const float (&x)[kCount]) {
  static_assert(kLanes * kCount == kNvfp4Group);
  float amax = 0.0f;
#pragma unroll
  for (i32 i = 0; i < kCount; ++i) amax = fmaxf(amax, fabsf(x[i]));
  amax = ptx::max_over_lanes<kLanes>(amax);
  const u32 both = ptx::e4m3x2(amax * (1.0f / kLargestE2m1), amax * 0.25f), six = both & 0xff, four = both >> 8;
  return nvfp4_error<kLanes>(x, four) < nvfp4_error<kLanes>(x, six) ? four : six;
}

}  // namespace sage
