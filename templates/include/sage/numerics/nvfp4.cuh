// NVFP4: e2m1 in groups of 16 elements that share a scale of type ue4m3, which is e4m3 without the sign.
// Source: "SageAttention3" (arXiv:2505.11594), section 3.1; PTX ISA, "Alternate Floating-Point Data Formats".
#pragma once

#include "sage/numerics/arithmetic.cuh"
#include "sage/numerics/scale.cuh"
#include "sage/ptx/math.cuh"

namespace sage {

constexpr i32 kNvfp4Group = 16;
constexpr float kLargestE2m1 = 6.0f, kLargestE4m3 = 448.0f;

// The largest magnitude of NVFP4.
constexpr float kLargestNvfp4 = kLargestE2m1 * kLargestE4m3;

// The value of a ue4m3.
__device__ __forceinline__ float f32_from_ue4m3(u32 code) {
  return __uint_as_float(code << 20) * 0x1p120f;  // same mantissa, another bias of the exponent; subnormals too
}

// The scale of a group whose largest magnitude is amax.
__device__ __forceinline__ u32 nvfp4_scale(float amax) { return ptx::e4m3x2(amax * (1.0f / kLargestE2m1), 0.0f); }

// By which the elements of a group are multiplied: the reciprocal of the scale as it was rounded. Zero for a scale of
// zero.
__device__ __forceinline__ float inv_nvfp4_scale(u32 scale) {
  return scale == 0 ? 0.0f : divide(1.0f, f32_from_ue4m3(scale));
}

// x · inv_scale as e2m1: nearest, ties to even, magnitudes above 6 become 6. Minus zero for minus zero alone: other x
// that round to zero become plus zero. As ptx::e2m1x8() rounds, of which only chips with FP4 tensor cores have the
// instruction.
__device__ __forceinline__ u32 e2m1(float x, float inv_scale) {
  const float y = fminf(fabsf(x * inv_scale), kLargestE2m1);
  constexpr u32 kMantissa = kMantissaBits - 1;                             // mantissa bits of f32 that are rounded off
  const u32 below_one = __float_as_uint(y + 0x1.8p22f) & 3;                // units of 1/2
  const u32 bits = __float_as_uint(y), odd = bits >> kMantissa & 1;
  const u32 from_one = ((bits + (1u << (kMantissa - 1)) - 1 + odd) >> kMantissa) - (2 * kExponentBias - 2);
  const u32 code = y < 1.0f ? below_one : from_one, sign = __float_as_uint(x) >> 28 & 8;
  return code != 0 || x == 0.0f ? code | sign : 0;
}

// A group's elements in words of eight: the first in the lowest bits.
template <i32 kCount>
__device__ __forceinline__ u32 e2m1_word(const float (&x)[kCount], float inv_scale) {
  static_assert(kCount <= 8);
  u32 word = 0;
#pragma unroll
  for (i32 i = 0; i < kCount; ++i) word |= e2m1(x[i], inv_scale) << 4 * i;
  return word;
}

}  // namespace sage
