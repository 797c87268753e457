// P and dS as integers of 8 bits, with a scale a row.
#pragma once

#include "sage/bwd/columns.cuh"
#include "sage/numerics/integers.cuh"
#include "sage/ptx/math.cuh"
#include "sage/ptx/warp.cuh"

namespace sage {

// P or dS of a warp's rows, rounded: the A operand of products over the columns, which stand in the order of
// key_of_column(). Values are `codes` times the scale of their row.
template <i32 kM>
struct RoundedRows {
  u32 codes[kM][kTileRows / 32][4];
  float scale[kM][2];
};

// A row whose largest magnitude is below this is rounded as one with this magnitude: 255 / kSmallestRow, times the
// largest scale of dÔ in f16, must stay within f32. The scale of a row of zeros is zero.
constexpr float kSmallestRow = 1e-33f;

// The largest magnitude of x · factor in this thread's columns of row r of m; NaN where one is NaN.
template <i32 kM>
__device__ __forceinline__ float abs_max(const ColumnTiles<float, kM>& x, i32 m, i32 r, const float (&factor)[2]) {
  float amax[2] = {};
#pragma unroll
  for (i32 n = 0; n < kColumnTiles; ++n) {
#pragma unroll
    for (i32 c = 0; c < 2; ++c) amax[c] = ptx::max_nan(amax[c], fabsf(x[m][n][2 * r + c]));
  }
  return ptx::max_nan(amax[0] * factor[0], amax[1] * factor[1]);
}

// Rounds x · factor; factor: of this thread's columns 8n + 2t and 8n + 2t + 1. kLimit: 127, or of x that are not
// negative 255. The scale is NaN where an x of the row is NaN, which integers cannot hold. Call with all lanes of a
// warp.
template <i32 kLimit, i32 kM>
__device__ __forceinline__ void round_rows(RoundedRows<kM>& rounded, const float (&x)[kM][kColumnTiles][4],
                                           const float (&factor)[2]) {
#pragma unroll
  for (i32 m = 0; m < kM; ++m) {
#pragma unroll
    for (i32 r = 0; r < 2; ++r) {
      float amax = abs_max<kM>(x, m, r, factor);
      amax = ptx::max_nan(amax, ptx::shuffle_xor(amax, 1));
      amax = ptx::max_nan(amax, ptx::shuffle_xor(amax, 2));
      const float inv_scale = ptx::rcp(ptx::max_nan(amax, kSmallestRow)) * static_cast<float>(kLimit);
      const float of_column[2] = {inv_scale * factor[0], inv_scale * factor[1]};
      rounded.scale[m][r] = amax * (1.0f / kLimit);
#pragma unroll
      for (i32 n = 0; n < kColumnTiles; n += 2) {
        const float (&low)[4] = x[m][n], (&high)[4] = x[m][n + 1];
        const float four[4] = {low[2 * r], low[2 * r + 1], high[2 * r], high[2 * r + 1]};
        rounded.codes[m][n / 4][n % 4 / 2 * 2 + r] = rounded_bytes(four, of_column);
      }
    }
  }
}

}  // namespace sage
