// Scalar instructions: conversions, exp2, log2, reciprocal, maximum and minimum, and byte permutation.
// Source: PTX ISA, "Floating Point Instructions" (ex2) and "Data Movement and Conversion Instructions" (cvt).
#pragma once

#include "sage/types.cuh"

namespace sage::ptx {

__device__ __forceinline__ float infinity() { return __int_as_float(0x7f800000); }
__device__ __forceinline__ float quiet_nan() { return __int_as_float(0x7fc00000); }

// 2^x; results below the smallest normal number are zero, 2^-inf is zero.
__device__ __forceinline__ float ex2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// log2(x); log2(0) is -inf.
__device__ __forceinline__ float lg2(float x) {
  float y;
  asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 1 / x to about 23 bits.
__device__ __forceinline__ float rcp(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float f32_from_f16(u16 x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
  return y;
}

// A bf16 is the upper half of the f32 of the same value.
__device__ __forceinline__ float f32_from_bf16(u16 x) { return __uint_as_float(static_cast<u32>(x) << 16); }

// Two f32 to two f16, nearest even; `lo` lands in the lower half of the word.
__device__ __forceinline__ u32 f16x2(float lo, float hi) {
  u32 y;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(hi), "f"(lo));
  return y;
}

__device__ __forceinline__ u32 bf16x2(float lo, float hi) {
  u32 y;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(hi), "f"(lo));
  return y;
}

// The same, saturating at the largest finite f16 or bf16; NaN stays.
__device__ __forceinline__ u32 finite_f16x2(float lo, float hi) {
  u32 y;
  asm("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(hi), "f"(lo));
  return y;
}

__device__ __forceinline__ u32 finite_bf16x2(float lo, float hi) {
  u32 y;
  asm("cvt.rn.satfinite.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(hi), "f"(lo));
  return y;
}

// Two f32 to two e4m3, nearest even, saturating at 448; sm89 and later.
__device__ __forceinline__ u16 e4m3x2(float lo, float hi) {
  u16 y;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(y) : "f"(hi), "f"(lo));
  return y;
}

// Four f32 to four e4m3, `a` in the lowest byte.
__device__ __forceinline__ u32 e4m3x4(float a, float b, float c, float d) {
  return static_cast<u32>(e4m3x2(a, b)) | static_cast<u32>(e4m3x2(c, d)) << 16;
}

// Four f32 to four u8, nearest even, saturating, `a` in the lowest byte; zero for NaN.
__device__ __forceinline__ u32 u8x4(float a, float b, float c, float d) {
  u32 y;
  asm("{.reg .s32 i, j, k, l;\n"
      " cvt.rni.s32.f32 i, %1;\n"
      " cvt.rni.s32.f32 j, %2;\n"
      " cvt.rni.s32.f32 k, %3;\n"
      " cvt.rni.s32.f32 l, %4;\n"
      " .reg .b32 upper;\n"
      " cvt.pack.sat.u8.s32.b32 upper, l, k, 0;\n"
      " cvt.pack.sat.u8.s32.b32 %0, j, i, upper;}"
      : "=r"(y)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return y;
}

// The square root to about 23 bits.
__device__ __forceinline__ float sqrt(float x) {
  float y;
  asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// The sum of the products of four s8 each, plus c.
__device__ __forceinline__ i32 dot_s8x4(u32 a, u32 b, i32 c) {
  i32 y;
  asm("dp4a.s32.s32 %0, %1, %2, %3;" : "=r"(y) : "r"(a), "r"(b), "r"(c));
  return y;
}

// Eight f32 to eight e2m1, nearest even, saturating at 6, the first in the lowest bits; sm120's family alone.
__device__ __forceinline__ u32 e2m1x8(const float (&x)[8]) {
  u32 y;
  asm("{.reg .b8 a, b, c, d;\n"
      " cvt.rn.satfinite.e2m1x2.f32 a, %2, %1;\n"
      " cvt.rn.satfinite.e2m1x2.f32 b, %4, %3;\n"
      " cvt.rn.satfinite.e2m1x2.f32 c, %6, %5;\n"
      " cvt.rn.satfinite.e2m1x2.f32 d, %8, %7;\n"
      " mov.b32 %0, {a, b, c, d};}"
      : "=r"(y)
      : "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]), "f"(x[4]), "f"(x[5]), "f"(x[6]), "f"(x[7]));
  return y;
}

// The larger of a and b; NaN where a or b is NaN.
__device__ __forceinline__ float max_nan(float a, float b) {
  float y;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}

// The smaller of a and b; NaN where a or b is NaN.
__device__ __forceinline__ float min_nan(float a, float b) {
  float y;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}

// The larger, or the smaller, of a and b in each half of the word; NaN where either is NaN.
__device__ __forceinline__ u32 max_nan_bf16x2(u32 a, u32 b) {
  u32 y;
  asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  return y;
}

__device__ __forceinline__ u32 max_nan_f16x2(u32 a, u32 b) {
  u32 y;
  asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  return y;
}

__device__ __forceinline__ u32 min_nan_bf16x2(u32 a, u32 b) {
  u32 y;
  asm("min.NaN.bf16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  return y;
}

__device__ __forceinline__ u32 min_nan_f16x2(u32 a, u32 b) {
  u32 y;
  asm("min.NaN.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  return y;
}

// Permutes the bytes of two words. Hexadecimal digit i of the selector names byte i of the result: 0-3 of a, 4-7 of b.
__device__ __forceinline__ u32 prmt(u32 a, u32 b, u32 selector) {
  u32 y;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(y) : "r"(a), "r"(b), "r"(selector));
  return y;
}

}  // namespace sage::ptx
