// A thread's part of the tile of scores between its rows and the kTileRows rows of a tile of the other side, which are
// the columns. Rows are those of Q and dO, and columns those of K and V, or the other way round. Lane 4g + t of a warp
// has of its rows g, g + 8, ... the columns 8n + 2t and 8n + 2t + 1.
#pragma once

#include "sage/bwd/tile.cuh"
#include "sage/ptx/math.cuh"

namespace sage {

// P = 2^(score - log-sum-exp), at most 1: a large log-sum-exp has units of whole powers of two. NaN stays. Where
// minus_lse has the logarithm of a factor too, log2_most is that logarithm, and the result P times the factor.
__device__ __forceinline__ float probability(i32 score, float scale, float minus_lse, float log2_most = 0.0f) {
  return ptx::ex2(ptx::min_nan(fmaf(static_cast<float>(score), scale, minus_lse), log2_most));
}

constexpr i32 kColumnTiles = kTileRows / 8;

// Fragments of an accumulator, [m][n] of the columns 8n to 8n + 7: of the rows 16m + g and 16m + g + 8.
template <class T, i32 kM>
using ColumnTiles = T[kM][kColumnTiles][4];

// Zeros for columns that a row does not see: those before the column first[m][r], or from there on.
template <bool kBefore, i32 kM>
__device__ __forceinline__ void hide(ColumnTiles<float, kM>& x, const i32 (&first)[kM][2], i32 lane) {
#pragma unroll
  for (i32 m = 0; m < kM; ++m) {
#pragma unroll
    for (i32 n = 0; n < kColumnTiles; ++n) {
#pragma unroll
      for (i32 c = 0; c < 4; ++c) {
        const bool before = 8 * n + c % 2 < first[m][c / 2] - 2 * (lane % 4);
        if (before == kBefore) x[m][n][c] = 0.0f;
      }
    }
  }
}

}  // namespace sage
