// Online softmax over the KV tiles, in the log2 domain.
//
// Scores arrive as biased integers (attn/scores.cuh), all of a thread's in a tile with one scale c: the row maximum is
// taken on integers, and bias, scale and reference fold into one FMA, P = 2^(c·x - (c·kScoreBias + row_ref)).
// That subtraction is exact. c keeps 22 bits, so that c·kScoreBias = 3·2^22·c fits into the 24 of an f32, as a multiple of
// 2^(e + 1) for c in [2^e, 2^(e + 1)); and the reference is kept a multiple of `grid`, which is no less. It may be anything
// near the maximum, as long as a row has one.
// Where Q is smoothed the scores arrive finished, as f32.
// Source: SageAttention2, Algorithm 1; Milakov & Gimelshein, "Online normalizer calculation for softmax".
#pragma once

#include "sage/ptx/math.cuh"
#include "sage/ptx/warp.cuh"

namespace sage {

// The reference of a row that saw no key yet. Finite, so that a row that sees no key of a tile does not subtract
// infinities; far below any score in log2 units.
constexpr float kNoReference = -1e30f;

// Added to every integer score: 1.5 * 2^23, whose bits read as an integer are 0x4b400000. An f32 of this size has units
// of one, so the bits of `score + bias` as an integer and as a float are the same word for |score| < 2^22.
constexpr float kScoreBias = 12582912.0f;
constexpr i32 kScoreBiasBits = 0x4b400000;

// A masked score: -inf as a float, below every biased score as an integer.
constexpr i32 kMaskedScore = static_cast<i32>(0xff800000);

// A masked score must stay -inf when scaled: scales may not underflow to zero.
constexpr float kSmallestScale = 1e-37f;

// The scale of a thread's scores in a tile: the product of two, cut to 22 bits of mantissa. A NaN stays one.
__device__ __forceinline__ float score_scale(float q_scale, float k_scale) {
  const float scale = q_scale * k_scale;
  if (scale < kSmallestScale) return kSmallestScale;
  return __int_as_float(__float_as_int(scale) & ~3);
}

// What a warp sums over the tiles, before it is divided by the row sums.
template <class Config>
using OutputAccumulator = float[Config::kWarpM / 16][Config::kHeadDim / 8][4];

// Product: how P enters the second product (attn/pv_mma.cuh).
template <class Config, class Product>
struct OnlineSoftmax {
  static constexpr i32 kRows = Config::kWarpM / 8;  // rows of a thread: g, g + 8, ... with g = lane / 4
  static constexpr i32 kMTiles = Config::kWarpM / 16, kNTiles = Config::kBlockN / 8;
  static constexpr float kBias = Config::kSmoothQ ? 0.0f : kScoreBias;  // of the scores as they arrive

  float row_ref[kRows];  // log2 units: P is 2^(score - row_ref)
  float row_sum[kRows];  // of this thread's columns of P
  float grid;            // a power of two: every row_ref is a multiple of it

  __device__ __forceinline__ void clear() {
    grid = 1.0f;
#pragma unroll
    for (i32 r = 0; r < kRows; ++r) row_ref[r] = kNoReference, row_sum[r] = 0.0f;
  }

  // Scores of one tile to P, and acc_o to the references that P is relative to; scale is one where scores arrive finished.
  __device__ __forceinline__ void update(const i32 (&acc_s)[kMTiles][kNTiles][4], float scale,
                                         OutputAccumulator<Config>& acc_o, typename Product::Operand& p) {
    float needed[kRows];
    bool move = !Config::kSmoothQ && scale >= grid;
#pragma unroll
    for (i32 r = 0; r < kRows; ++r) {
      needed[r] = largest(acc_s[r / 2], r % 2, scale) - Product::kTop;
      move |= needed[r] > row_ref[r] + Product::kLazyRise;
    }
    if (ptx::any(move)) move_references(needed, scale, acc_o);
#pragma unroll
    for (i32 r = 0; r < kRows; ++r) exponentiate(acc_s[r / 2], scale, r, p);
  }

  // Sums of whole rows; every lane of a row gets them.
  __device__ __forceinline__ void finish() {
#pragma unroll
    for (i32 r = 0; r < kRows; ++r) row_sum[r] = ptx::sum_over_lanes<4>(row_sum[r]);
  }

 private:
  // Largest score of a row, in log2 units; equal in all lanes of the row.
  __device__ __forceinline__ static float largest(const i32 (&acc_s)[kNTiles][4], i32 half, float scale) {
    i32 x = larger(acc_s[0][2 * half], acc_s[0][2 * half + 1]);
#pragma unroll
    for (i32 j = 1; j < kNTiles; ++j) x = larger(larger(x, acc_s[j][2 * half]), acc_s[j][2 * half + 1]);
    return ptx::max_over_lanes<4>(scale * (__int_as_float(x) - kBias));
  }

  // Biased integers are positive but for masked ones: their bits compare like the floats they are.
  __device__ __forceinline__ static i32 larger(i32 a, i32 b) {
    if constexpr (Config::kSmoothQ) return __float_as_int(fmaxf(__int_as_float(a), __int_as_float(b)));
    else return max(a, b);
  }

  // Brings the rows that need it to a reference that makes their largest P at most 2^kTop. Rarely called: a rise within
  // kLazyRise, for which the product leaves room, can wait, and once a row has seen a few tiles its maximum hardly moves.
  __device__ __forceinline__ void move_references(const float (&needed)[kRows], float scale,
                                                  OutputAccumulator<Config>& acc_o) {
    const bool coarser = !Config::kSmoothQ && widen_grid(scale);
    const float inv_grid = __int_as_float(2 * 0x3f800000 - __float_as_int(grid));  // the exponent changes its sign
#pragma unroll
    for (i32 r = 0; r < kRows; ++r) {
      const bool moved = coarser || needed[r] > row_ref[r] + Product::kLazyRise;
      const float reference = moved ? ceilf(fmaxf(needed[r], row_ref[r]) * inv_grid) * grid : row_ref[r];
      const float alpha = ptx::ex2(row_ref[r] - reference);
      row_ref[r] = reference;
      row_sum[r] *= alpha;
#pragma unroll
      for (i32 n = 0; n < Config::kHeadDim / 8; ++n) {
        acc_o[r / 2][n][2 * (r % 2)] *= alpha;
        acc_o[r / 2][n][2 * (r % 2) + 1] *= alpha;
      }
    }
  }

  // Makes the grid no finer than what c·kScoreBias is a multiple of, for the largest scale c among the lanes of a row.
  __device__ __forceinline__ bool widen_grid(float scale) {
    constexpr i32 kExponentMask = 0x7f800000;
    const float largest_scale = ptx::max_over_lanes<4>(scale);
    const bool coarser = largest_scale >= grid;
    if (coarser) grid = 2.0f * __int_as_float(__float_as_int(largest_scale) & kExponentMask);
    return coarser;
  }

  // P = 2^(score - row_ref), packed as the A operand of the second product.
  __device__ __forceinline__ void exponentiate(const i32 (&acc_s)[kNTiles][4], float scale, i32 r,
                                               typename Product::Operand& p) {
    const float offset = fmaf(-scale, kBias, -row_ref[r]);
    float sum = row_sum[r];
#pragma unroll
    for (i32 j = 0; j < kNTiles; j += 2) {
      float x[4];
#pragma unroll
      for (i32 e = 0; e < 4; ++e) {
        x[e] = ptx::ex2(fmaf(__int_as_float(acc_s[j + e / 2][2 * (r % 2) + e % 2]), scale, offset));
        sum += x[e];
      }
      Product::pack(p, r, j, x);
    }
    row_sum[r] = sum;
  }
};

}  // namespace sage
