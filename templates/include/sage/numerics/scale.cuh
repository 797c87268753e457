// Scales of quantized values, and their reciprocals.
#pragma once

#include "sage/numerics/arithmetic.cuh"

namespace sage {

// A scale and its reciprocal; the reciprocal of a group of zeros is zero.
struct Scale {
  float scale, inv_scale;
};

// A group whose largest magnitude is below this counts as zeros: the reciprocal of its scale would overflow.
constexpr float kSmallestAbsMax = 1e-35f;

// The largest scale of scores, which then stay finite: integers are below 2^22.
constexpr float kLargestScale = 0x1p100f;

constexpr u32 kMantissaBits = 23, kExponentBias = 127;

// 1 / x, exactly. x must be a power of two whose reciprocal is a normal number.
__device__ __forceinline__ float reciprocal_of_power_of_two(float x) {
  return __uint_as_float((2 * kExponentBias << kMantissaBits) - __float_as_uint(x));
}

// The scale by which a magnitude is stored as `target`.
__device__ __forceinline__ Scale scale_to(float target, float magnitude) {
  if (magnitude < kSmallestAbsMax) return {1.0f, 0.0f};
  // Divide target by the magnitude's mantissa, in [1, 2). The magnitude's exponent then only moves the result's.
  const u32 exponent = (__float_as_uint(magnitude) >> kMantissaBits) - kExponentBias;
  const float mantissa = __uint_as_float(__float_as_uint(magnitude) - (exponent << kMantissaBits));
  const u32 inv_scale = __float_as_uint(divide(target, mantissa)) - (exponent << kMantissaBits);
  return {divide(magnitude, target), __uint_as_float(inv_scale)};
}

// The power of two by which a magnitude is stored in [2^4, 2^5). f16 then holds the upper eight bits of values from
// 2^-11 to 2^11 times that magnitude.
__device__ __forceinline__ Scale power_of_two_scale(float magnitude) {
  if (magnitude < kSmallestAbsMax) return {1.0f, 0.0f};
  constexpr u32 kTarget = 4;
  const u32 exponent = __float_as_uint(magnitude) >> kMantissaBits;  // biased; a magnitude is positive
  const u32 scale_exponent = max(exponent, kTarget + 1) - kTarget;   // of a normal number
  const float scale = __uint_as_float(scale_exponent << kMantissaBits);
  return {scale, reciprocal_of_power_of_two(scale)};
}

// The power of two by which a magnitude is stored in [limit / 2, limit). limit: itself no power of two, at most 2^24.
__device__ __forceinline__ Scale power_of_two_scale_below(float limit, float magnitude) {
  if (magnitude < kSmallestAbsMax) return {1.0f, 0.0f};
  const u32 exponent = (__float_as_uint(divide(magnitude, limit)) >> kMantissaBits) + 1;  // biased
  const float scale = __uint_as_float(exponent << kMantissaBits);
  return {scale, reciprocal_of_power_of_two(scale)};
}

// Biased exponent of the least tile_factor(), 2^-30. Tiles that need a smaller factor keep fewer bits.
constexpr u32 kLeastFactor = kExponentBias - 30;

// The power of two by which a tile is divided so that its largest magnitude lies within [limit / 2, limit), but at
// least 2^-30. One where the largest magnitude lies within [least, limit] already, or is zero.
__device__ __forceinline__ Scale tile_factor(float largest, float least, float limit) {
  if (largest == 0.0f || (largest >= least && largest <= limit)) return {1.0f, 1.0f};
  const u32 exponent = (__float_as_uint(divide(largest, limit)) >> kMantissaBits) + 1;  // biased
  const u32 factor = max(exponent, kLeastFactor);
  const float power = __uint_as_float(factor << kMantissaBits);
  return {power, reciprocal_of_power_of_two(power)};
}

}  // namespace sage
