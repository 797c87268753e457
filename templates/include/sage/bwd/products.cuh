// The matrix products of the backward kernels, and the rounding of P and dS between them. A warp has kM times 16 rows
// of one side, Q and dO or K and V, against the kTileRows rows of a tile of the other side, which are the columns. Lane
// 4g + t has of its rows g, g + 8, ... the columns 8n + 2t and 8n + 2t + 1.
#pragma once

#include "sage/bwd/half_rows.cuh"
#include "sage/bwd/params.cuh"
#include "sage/bwd/tile.cuh"
#include "sage/numerics/integers.cuh"
#include "sage/ptx/ldmatrix.cuh"
#include "sage/ptx/math.cuh"
#include "sage/ptx/mma.cuh"
#include "sage/ptx/shared.cuh"
#include "sage/ptx/warp.cuh"

namespace sage {

// P = 2^(score - log-sum-exp), at most 1: a large log-sum-exp has units of whole powers of two. NaN stays.
__device__ __forceinline__ float probability(i32 score, float scale, float minus_lse) {
  return ptx::ex2(ptx::min_nan(fmaf(static_cast<float>(score), scale, minus_lse), 0.0f));
}

constexpr i32 kColumnTiles = kTileRows / 8;

// Fragments of an accumulator, [m][n] of the columns 8n to 8n + 7: of the rows 16m + g and 16m + g + 8.
template <class T, i32 kM>
using ColumnTiles = T[kM][kColumnTiles][4];

// Rows as the A operand of a product, 32 bytes of every row a step: held in registers, read from global memory by
// Source::word(row, chunk, thread of a lane quad); or read from a tile in shared memory, of which `row` is the first.
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

template <class Swizzle>
struct SharedOperand {
  u32 address;

  __device__ __forceinline__ SharedOperand(u32 tile, i32 row, i32 lane)
      : address(Swizzle::moved(tile + Swizzle::offset(lane % 16, lane / 16), row, 0)) {}

  __device__ __forceinline__ void get(i32 m, i32 step, u32 (&a)[4]) const {
    ptx::ldmatrix_x4(a, Swizzle::moved(address, 16 * m, 2 * step));
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

// The instructions that add a product of 32 bytes of every row to c: s8 by s8, u8 by s8, and of 16-bit floats.
struct S8 {
  __device__ __forceinline__ void operator()(i32 (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, const i32 (&c)[4]) const {
    ptx::mma_m16n8k32_s8s8s32(d, a, b0, b1, c);
  }
};
struct U8 {
  __device__ __forceinline__ void operator()(i32 (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, const i32 (&c)[4]) const {
    ptx::mma_m16n8k32_u8s8s32(d, a, b0, b1, c);
  }
};
template <Dtype kDtype>
struct Half {
  __device__ __forceinline__ void operator()(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1,
                                             const float (&c)[4]) const {
    if constexpr (kDtype == Dtype::kBf16) ptx::mma_m16n8k16_bf16bf16f32(d, a, b0, b1, c);
    else ptx::mma_m16n8k16_f16f16f32(d, a, b0, b1, c);
  }
};

// Adds the products of rows and of a tile in shared memory to acc, of the kN column tiles from `first` on.
template <class Swizzle, class T, i32 kM, i32 kN, class Operand, class Multiply>
__device__ __forceinline__ void multiply_rows(T (&acc)[kM][kN][4], const Operand& rows, u32 tile, i32 lane,
                                              Multiply multiply, i32 first = 0) {
  // Two groups of 8 rows by two chunks, chunks first.
  const u32 columns = tile + Swizzle::offset(lane / 16 * 8 + lane % 8, lane / 8 % 2);
#pragma unroll
  for (i32 step = 0; step < Swizzle::kRowBytes / 32; ++step) {
    u32 a[kM][4];
#pragma unroll
    for (i32 m = 0; m < kM; ++m) rows.get(m, step, a[m]);
#pragma unroll
    for (i32 n = 0; n < kN; n += 2) {
      u32 b[4];
      ptx::ldmatrix_x4(b, Swizzle::moved(columns, 8 * (first + n), 2 * step));
#pragma unroll
      for (i32 m = 0; m < kM; ++m) {
        multiply(acc[m][n], a[m], b[0], b[1], acc[m][n]);
        multiply(acc[m][n + 1], a[m], b[2], b[3], acc[m][n + 1]);
      }
    }
  }
}

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

// The gradient of a warp's rows, over the channels: the sum over tiles of rounded rows times a transposed tile.
template <class Config, i32 kM>
class Gradient {
 public:
  // transposed: a tile in shared memory. Multiply: by the type of the rows' codes.
  template <class Multiply>
  __device__ __forceinline__ void add(const RoundedRows<kM>& rounded, u32 transposed, i32 lane) {
    using Swizzle = typename BwdTile<Config>::Transposed;
    const u32 channels = transposed + Swizzle::offset(lane % 8, lane / 8);
#pragma unroll
    for (i32 n = 0; n < Config::kHeadDim / 8; ++n) {
      u32 b[4];
      ptx::ldmatrix_x4(b, Swizzle::moved(channels, 8 * n, 0));
#pragma unroll
      for (i32 m = 0; m < kM; ++m) {
        const i32 zero[4] = {};
        i32 sum[4];
#pragma unroll
        for (i32 step = 0; step < kTileRows / 32; ++step) {
          Multiply{}(sum, rounded.codes[m][step], b[2 * step], b[2 * step + 1], ptx::chain(step, zero, sum));
        }
#pragma unroll
        for (i32 c = 0; c < 4; ++c) {
          sums_[m][n][c] = fmaf(static_cast<float>(sum[c]), rounded.scale[m][c / 2], sums_[m][n][c]);
        }
      }
    }
  }

  // Stores the sums times a factor as rows of a gradient, from the batch entry's `first_row` on, in the caller's dtype.
  template <Dtype kDtype>
  __device__ __forceinline__ void store(const Tensor& to, i32 batch, i32 head, const CallerRows& rows, i32 first_row,
                                        i32 headdim, i32 lane, float factor) const {
#pragma unroll
    for (i32 r = 0; r < 2 * kM; ++r) {
      const i32 row = first_row + lane / 4 + 8 * r;
      if (row >= rows.count) continue;
      u16* const channels =
          static_cast<u16*>(to.data) + batch * to.stride.batch + head * to.stride.head + rows.at(row) * to.stride.row;
#pragma unroll
      for (i32 n = 0; n < Config::kHeadDim / 8; ++n) {
        const i32 channel = 8 * n + 2 * (lane % 4);
        const float (&sums)[4] = sums_[r / 2][n];
        const float x = sums[r % 2 * 2] * factor, y = sums[r % 2 * 2 + 1] * factor;
        const u32 pair = kDtype == Dtype::kBf16 ? ptx::bf16x2(x, y) : ptx::f16x2(x, y);
        if (channel < headdim) channels[channel] = static_cast<u16>(pair);
        if (channel + 1 < headdim) channels[channel + 1] = static_cast<u16>(pair >> 16);
      }
    }
  }

 private:
  float sums_[kM][Config::kHeadDim / 8][4] = {};
};

}  // namespace sage
