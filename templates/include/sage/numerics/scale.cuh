// Scales of quantized values, and their reciprocals.
#pragma once

#include "sage/numerics/arithmetic.cuh"

namespace sage {

// A scale and its reciprocal; the reciprocal of a group of zeros is zero.
struct Scale {
  float scale, inv_scale;
};

// Below this a group counts as zeros: its reciprocal would overflow.
constexpr float kSmallestAbsMax = 1e-35f;

constexpr u32 kMantissaBits = 23, kExponentBias = 127;

// Exact, of a power of two whose reciprocal is a normal number.
__device__ __forceinline__ float reciprocal_of_power_of_two(float x) {
  return __uint_as_float((2 * kExponentBias << kMantissaBits) - __float_as_uint(x));
}

// Scale that takes a magnitude to `target`.
__device__ __forceinline__ Scale scale_to(float target, float magnitude) {
  if (magnitude < kSmallestAbsMax) return {1.0f, 0.0f};
  // target / magnitude by way of a magnitude in [1, 2): the power of two between them only moves the exponent.
  const u32 exponent = (__float_as_uint(magnitude) >> kMantissaBits) - kExponentBias;
  const float mantissa = __uint_as_float(__float_as_uint(magnitude) - (exponent << kMantissaBits));
  const u32 inv_scale = __float_as_uint(divide(target, mantissa)) - (exponent << kMantissaBits);
  return {divide(magnitude, target), __uint_as_float(inv_scale)};
}

// Power of two that takes a magnitude into [2^4, 2^5): f16 holds the upper eight bits of values from 2^-11 to 2^11 times that.
__device__ __forceinline__ Scale power_of_two_scale(float magnitude) {
  if (magnitude < kSmallestAbsMax) return {1.0f, 0.0f};
  constexpr u32 kTarget = 4;
  const u32 exponent = __float_as_uint(magnitude) >> kMantissaBits;  // biased; a magnitude is positive
  const u32 scale_exponent = max(exponent, kTarget + 1) - kTarget;   // at least the least normal
  const float scale = __uint_as_float(scale_exponent << kMantissaBits);
  return {scale, reciprocal_of_power_of_two(scale)};
}

// Least tile_factor(), 2^-30, by its biased exponent: what is smaller still rounds more coarsely.
constexpr u32 kLeastFactor = kExponentBias - 30;

// The power of two by which a tile is divided so that its largest magnitude lies within [limit / 2, limit), or below where
// that takes less than 2^-30; one where it lies within [least, limit] already, or is zero.
__device__ __forceinline__ Scale tile_factor(float largest, float least, float limit) {
  if (largest == 0.0f || (largest >= least && largest <= limit)) return {1.0f, 1.0f};
  const u32 exponent = (__float_as_uint(divide(largest, limit)) >> kMantissaBits) + 1;  // biased
  const u32 factor = max(exponent, kLeastFactor);
  const float power = __uint_as_float(factor << kMantissaBits);
  return {power, reciprocal_of_power_of_two(power)};
}

}  // namespace sage
