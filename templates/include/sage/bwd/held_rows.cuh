// Rows as the A operand of products, held in registers.
#pragma once

#include "sage/tile/layout.cuh"

namespace sage {

// 32 bytes of every row a step, read from global memory by Source::word(row, chunk, thread of a lane quad). Lanes hold
// what those of mma.m16n8 hold of A, which the warps of a wgmma hold likewise.
template <i32 kRowBytes, i32 kM>
struct HeldOperand {
  static constexpr i32 kSteps = kRowBytes / 32;
  u32 of[kM][kSteps][4];

  template <class Source>
  __device__ __forceinline__ HeldOperand(const Source& source, i32 lane) {
#pragma unroll
    for (i32 m = 0; m < kM; ++m) {
#pragma unroll
      for (i32 step = 0; step < kSteps; ++step) {
#pragma unroll
        for (i32 i = 0; i < 4; ++i) {
          of[m][step][i] = source.word(16 * m + lane / 4 + i % 2 * 8, 2 * step + i / 2, lane % 4);
        }
      }
    }
  }
  __device__ __forceinline__ void get(i32 m, i32 step, u32 (&a)[4]) const {
#pragma unroll
    for (i32 i = 0; i < 4; ++i) a[i] = of[m][step][i];
  }
};

// Rows of codes in global memory, from the row `first` of a tile on.
template <class Swizzle>
struct CodeRows {
  const u8* tile;
  i32 first;

  __device__ __forceinline__ u32 word(i32 row, i32 chunk, i32 thread) const {
    return *reinterpret_cast<const u32*>(tile + Swizzle::offset(first + row, chunk) + thread * sizeof(u32));
  }
};

}  // namespace sage
