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

// Two f16 to two e4m3, nearest even, saturating at 448.
__device__ __forceinline__ u16 e4m3x2_of_f16x2(u32 x) {
  u16 y;
  asm("cvt.rn.satfinite.e4m3x2.f16x2 %0, %1;" : "=h"(y) : "r"(x));
  return y;
}

__device__ __forceinline__ u32 f16x2_of_e4m3x2(u16 x) {
  u32 y;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(y) : "h"(x));
  return y;
}

}  // namespace sage::ptx
