// Warp-wide matrix products D = A·B + C. With lane = 4g + t, the fragments of one m16n8 product are
//   C, D  c[0], c[1]: row g, columns 2t, 2t + 1;  c[2], c[3]: row g + 8, the same columns
//   A     8-bit k32: a[0] row g, a[1] row g + 8, elements 4t..4t+3 of k;  a[2], a[3] the same, k + 16
//         16-bit k16: a[0] row g, a[1] row g + 8, elements 2t, 2t+1 of k; a[2], a[3] the same, k + 8
//   B     8-bit k32: b0 elements 4t..4t+3 of k, b1 the same, k + 16, both of column g
//         16-bit k16: b0 elements 2t, 2t+1 of k, b1 the same, k + 8, both of column g
// 4-bit k64, of s4 or e2m1, is 8-bit k32 with two elements in each byte, the first in the lower half.
// Source: PTX ISA, "Matrix Fragments for mma.m16n8k64", "... mma.m16n8k32" and "... mma.m16n8k16".
#pragma once

#include "sage/types.cuh"

namespace sage::ptx {

template <class T, i32 kSize>
using Array = T[kSize];

// The C operand of the step-th product of a chain: `start` for the first product, the chain's result for all others.
template <class T, i32 kSize>
__device__ __forceinline__ const Array<T, kSize>& chain(i32 step, const T (&start)[kSize], const T (&result)[kSize]) {
  return step == 0 ? start : result;
}

__device__ __forceinline__ void mma_m16n8k32_s8s8s32(i32 (&d)[4], const u32 (&a)[4], u32 b0, u32 b1,
                                                     const i32 (&c)[4]) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%10, %11, %12, %13};"
      : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3]));
}

__device__ __forceinline__ void mma_m16n8k32_u8s8s32(i32 (&d)[4], const u32 (&a)[4], u32 b0, u32 b1,
                                                     const i32 (&c)[4]) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%10, %11, %12, %13};"
      : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3]));
}

__device__ __forceinline__ void mma_m16n8k64_s4s4s32(i32 (&d)[4], const u32 (&a)[4], u32 b0, u32 b1,
                                                     const i32 (&c)[4]) {
  asm("mma.sync.aligned.m16n8k64.row.col.s32.s4.s4.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%10, %11, %12, %13};"
      : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3]));
}

__device__ __forceinline__ void mma_m16n8k16_f16f16f32(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1,
                                                       const float (&c)[4]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%10, %11, %12, %13};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
}

__device__ __forceinline__ void mma_m16n8k16_bf16bf16f32(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1,
                                                         const float (&c)[4]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%10, %11, %12, %13};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
}

// sm89 and later, where the accumulator keeps 13 mantissa bits.
__device__ __forceinline__ void mma_m16n8k32_e4m3e4m3f32(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1,
                                                         const float (&c)[4]) {
  asm("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%10, %11, %12, %13};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
}

// As above, with accumulators in f16: c[0] here holds c[0] and c[1] of the f32 fragment, c[0] in the lower half; c[1]
// here holds c[2] and c[3].
__device__ __forceinline__ void mma_m16n8k32_e4m3e4m3f16(u32 (&d)[2], const u32 (&a)[4], u32 b0, u32 b1,
                                                         const u32 (&c)[2]) {
  asm("mma.sync.aligned.m16n8k32.row.col.f16.e4m3.e4m3.f16 {%0, %1}, {%2, %3, %4, %5}, {%6, %7}, {%8, %9};"
      : "=r"(d[0]), "=r"(d[1])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(c[0]), "r"(c[1]));
}

// Block-scaled, on sm120 and its family. Rows of A and columns of B have scales, which some lanes hand in; the words of
// all other lanes are ignored. The accumulator keeps 23 mantissa bits.
//   A     row g: lane t = 0 of the quad g;  row g + 8: lane t = 1
//   B     column g: lane t = b_lane of the quad g
// Source: PTX ISA, "Block Scaling for mma.sync"; tests/sim/engine/chip.h for the bits.

// A scale a row and column, of type ue8m0, 2^(code - 127), in the lowest byte. b_lane: 0.
__device__ __forceinline__ void mma_m16n8k32_mxf8_e4m3e4m3f32(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1,
                                                              const float (&c)[4], u32 a_scale, u32 b_scale) {
  asm("mma.sync.aligned.m16n8k32.row.col.kind::mxf8f6f4.block_scale.scale_vec::1X.f32.e4m3.e4m3.f32.ue8m0 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13}, {%14}, {0, 0}, {%15}, {0, 0};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]),
        "r"(a_scale), "r"(b_scale));
}

// NVFP4: four scales a row and column, of type ue4m3, for 16 elements of k each, the first in the lowest byte. b_lane:
// a constant once loops are unrolled.
__device__ __forceinline__ void mma_m16n8k64_nvfp4_e2m1e2m1f32(
    float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, const float (&c)[4], u32 a_scale, u32 b_scale, u16 b_lane) {
  asm("mma.sync.aligned.m16n8k64.row.col.kind::mxf4nvf4.block_scale.scale_vec::4X.f32.e2m1.e2m1.f32.ue4m3 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13}, {%14}, {0, 0}, {%15}, {0, %16};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]),
        "r"(a_scale), "r"(b_scale), "h"(b_lane));
}

}  // namespace sage::ptx
