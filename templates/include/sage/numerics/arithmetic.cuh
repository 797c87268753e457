// Arithmetic that quantizers and attention share.
#pragma once

#include "sage/ptx/math.cuh"

namespace sage {

// x, or zero where x is not finite: such a value must not spoil a mean or a scale that other rows share.
__device__ __forceinline__ float finite_or_zero(float x) { return fabsf(x) < ptx::infinity() ? x : 0.0f; }

constexpr float kLargestF32 = 3.4028234663852886e38f;

// x clamped to the finite numbers; NaN stays.
__device__ __forceinline__ float within_f32(float x) {
  return ptx::min_nan(ptx::max_nan(x, -kLargestF32), kLargestF32);
}

// A term of a score that a mean makes, within bounds that leave sums of such terms finite; NaN, of terms that overflow
// in both directions, becomes a number.
constexpr float kLargestTerm = 0x1p100f;

__device__ __forceinline__ float clamped_term(float x) { return fminf(fmaxf(x, -kLargestTerm), kLargestTerm); }

// a / b to the nearest, for b and 1 / b well inside the normal range. The compiler's own division has the same fast
// path, and a call for all other operands, which would cost registers.
__device__ __forceinline__ float divide(float a, float b) {
  float r = ptx::rcp(b);
  r = fmaf(fmaf(-b, r, 1.0f), r, r);
  float q = a * r;
  q = fmaf(fmaf(-b, q, a), r, q);
  return fmaf(fmaf(-b, q, a), r, q);
}

}  // namespace sage
