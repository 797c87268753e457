// Arithmetic on two f16 in a word, and their conversions to and from e4m3; sm89 and later.
// Source: PTX ISA, "Half Precision Floating Point Instructions" and "cvt".
#pragma once

#include "sage/types.cuh"

namespace sage::ptx {

__device__ __forceinline__ u32 add_f16x2(u32 a, u32 b) {
  u32 y;
  asm("add.rn.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  return y;
}

__device__ __forceinline__ u32 sub_f16x2(u32 a, u32 b) {
  u32 y;
  asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  return y;
}

__device__ __forceinline__ u32 mul_f16x2(u32 a, u32 b) {
  u32 y;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  return y;
}

__device__ __forceinline__ u32 max_f16x2(u32 a, u32 b) {
  u32 y;
  asm("max.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  return y;
}

__device__ __forceinline__ u32 min_f16x2(u32 a, u32 b) {
  u32 y;
  asm("min.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  return y;
}

// Two f16 to two e4m3, nearest even, saturating at 448, in the lower half of a word. Not a u16: where words took such
// results as their halves, ptxas 12.9 made code that mixed them up.
__device__ __forceinline__ u32 e4m3x2_of_f16x2(u32 x) {
  u32 y;
  asm("{.reg .b16 t; cvt.rn.satfinite.e4m3x2.f16x2 t, %1; mov.b32 %0, {t, 0};}" : "=r"(y) : "r"(x));
  return y;
}

// The two e4m3 in the lower half of a word.
__device__ __forceinline__ u32 f16x2_of_e4m3x2(u32 x) {
  u32 y;
  asm("{.reg .b16 t, u; mov.b32 {t, u}, %1; cvt.rn.f16x2.e4m3x2 %0, t;}" : "=r"(y) : "r"(x));
  return y;
}

}  // namespace sage::ptx
