// Online softmax over the KV tiles, in the log2 domain.
//
// Scores arrive as biased integers (attn/scores.cuh), all of a thread's in a tile with one scale c: the row maximum is
// taken on integers, and bias, scale and reference fold into one FMA, P = 2^(c·x - (c·kScoreBias + row_ref)).
// For f16 P that constant is exact where c < 1: c keeps 22 bits, so that c·kScoreBias = 3·2^22·c fits into the 24 of an f32,
// in units no coarser than one, and row_ref is a whole number: anything near the maximum will do, as long as a row has one.
// For e4m3 P the reference must make the largest P 448, which e4m3 holds exactly: it dominates many rows. The constant then
// rounds, by at most 2^-7 in log2 where c < 2^-6, a sixth of the rounding of P.
// Larger scales, which f16 meets only with logits in the tens of thousands, take an addition more a score.
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

// Product: how P enters the second product (attn/pv_mma.cuh).
template <class Config, class Product>
struct OnlineSoftmax {
  static constexpr i32 kRows = Config::kWarpM / 8;  // rows of a thread: g, g + 8, ... with g = lane / 4
  static constexpr i32 kMTiles = Config::kWarpM / 16, kNTiles = Config::kBlockN / 8;
  static constexpr float kBias = Config::kSmoothQ ? 0.0f : kScoreBias;  // of the scores as they arrive

  float row_ref[kRows];  // log2 units: P is 2^(score - row_ref)
  float row_sum[kRows];  // of this thread's columns of P

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (i32 r = 0; r < kRows; ++r) row_ref[r] = kNoReference, row_sum[r] = 0.0f;
  }

  // Scores of one tile to P; scale is one where they arrive finished. `alpha`: what everything summed so far must be
  // multiplied by; the return value says whether any alpha of the warp differs from one.
  __device__ __forceinline__ bool update(const i32 (&acc_s)[kMTiles][kNTiles][4], float scale, float (&alpha)[kRows],
                                         typename Product::Operand& p) {
    bool moved = false;
#pragma unroll
    for (i32 r = 0; r < kRows; ++r) moved |= raise_reference(largest(acc_s[r / 2], r % 2), scale, r, alpha[r]);
    if (!Config::kSmoothQ && ptx::any(scale >= Product::kLargestFolded)) exponentiate<true>(acc_s, scale, alpha, p);
    else exponentiate<false>(acc_s, scale, alpha, p);
    return ptx::any(moved);
  }

  // Sums of whole rows; every lane of a row gets them.
  __device__ __forceinline__ void finish() {
#pragma unroll
    for (i32 r = 0; r < kRows; ++r) row_sum[r] = ptx::sum_over_lanes<4>(row_sum[r]);
  }

 private:
  __device__ __forceinline__ static i32 largest(const i32 (&acc_s)[kNTiles][4], i32 half) {
    i32 x = larger(acc_s[0][2 * half], acc_s[0][2 * half + 1]);
#pragma unroll
    for (i32 j = 1; j < kNTiles; ++j) x = larger(larger(x, acc_s[j][2 * half]), acc_s[j][2 * half + 1]);
    return x;
  }

  // Biased integers are positive but for masked ones: their bits compare like the floats they are.
  __device__ __forceinline__ static i32 larger(i32 a, i32 b) {
    if constexpr (Config::kSmoothQ) return __float_as_int(fmaxf(__int_as_float(a), __int_as_float(b)));
    else return max(a, b);
  }

  // Moves the reference so that the largest P of the row is at most 2^kTop, if it would exceed 2^(kTop + kLazyRise): a rise
  // within kLazyRise, for which the product leaves room, needs no rescaling.
  __device__ __forceinline__ bool raise_reference(i32 largest_score, float scale, i32 r, float& alpha) {
    const float own = scale * (__int_as_float(largest_score) - kBias);
    const float exact = ptx::max_over_lanes<4>(own) - Product::kTop;
    const float needed = Product::kWholeReference ? ceilf(exact) : exact;
    const bool moved = needed > row_ref[r] + Product::kLazyRise;
    const float reference = moved ? needed : row_ref[r];
    alpha = ptx::ex2(row_ref[r] - reference);
    row_ref[r] = reference;
    return moved;
  }

  // P = 2^(score - row_ref), packed as the A operand of the second product.
  template <bool kLargeScale>
  __device__ __forceinline__ void exponentiate(const i32 (&acc_s)[kMTiles][kNTiles][4], float scale,
                                               const float (&alpha)[kRows], typename Product::Operand& p) {
#pragma unroll
    for (i32 r = 0; r < kRows; ++r) {
      const float bias = kLargeScale ? kBias : 0.0f;
      const float offset = fmaf(-scale, kLargeScale ? 0.0f : kBias, -row_ref[r]);
      float sum = row_sum[r] * alpha[r];
#pragma unroll
      for (i32 j = 0; j < kNTiles; j += 2) {
        float x[4];
#pragma unroll
        for (i32 e = 0; e < 4; ++e) {
          const float score = __int_as_float(acc_s[r / 2][j + e / 2][2 * (r % 2) + e % 2]) - bias;
          x[e] = ptx::ex2(fmaf(score, scale, offset));
          sum += x[e];
        }
        Product::pack(p, r, j, x);
      }
      row_sum[r] = sum;
    }
  }
};

}  // namespace sage
