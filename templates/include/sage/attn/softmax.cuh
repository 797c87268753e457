// Online softmax over the KV tiles, in the log2 domain.
//
// Scores arrive as biased integers (attn/scores.cuh) and all scores of a thread in a tile share one scale, so the row
// maximum is taken on integers, and bias, scale, maximum and the scale of P fold into one FMA before exp2.
// Source: SageAttention2, Algorithm 1; Milakov & Gimelshein, "Online normalizer calculation for softmax".
#pragma once

#include "sage/ptx/math.cuh"
#include "sage/ptx/warp.cuh"

namespace sage {

// What the scores of a row are compared with before any was seen. Finite, so that a row that sees no key of a tile does
// not subtract infinities; no score in log2 units comes near it.
constexpr float kNoMaximum = -1e30f;

// Added to every integer score: 1.5 * 2^23, whose bits read as an integer are 0x4b400000. An f32 of this size has units
// of one, so the bits of `score + bias` as an integer and as a float are the same word for |score| < 2^22.
constexpr float kScoreBias = 12582912.0f;
constexpr i32 kScoreBiasBits = 0x4b400000;

// A masked score: -inf as a float, below every biased score as an integer.
constexpr i32 kMaskedScore = static_cast<i32>(0xff800000);

// Product: how P enters the second product (attn/pv_mma.cuh).
template <class Config, class Product>
struct OnlineSoftmax {
  static constexpr i32 kRows = Config::kWarpM / 8;  // rows of a thread: g, g + 8, ... with g = lane / 4
  static constexpr i32 kMTiles = Config::kWarpM / 16, kNTiles = Config::kBlockN / 8;

  float row_max[kRows];  // log2 units; what P is relative to
  float row_sum[kRows];  // of this thread's columns of P, times 2^kPScaleLog2

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (i32 r = 0; r < kRows; ++r) row_max[r] = kNoMaximum, row_sum[r] = 0.0f;
  }

  // Scores of one tile to P. `alpha`: what everything summed so far must be multiplied by; the return value says
  // whether any alpha of the warp differs from one.
  __device__ __forceinline__ bool update(const i32 (&acc_s)[kMTiles][kNTiles][4], float scale, float (&alpha)[kRows],
                                         typename Product::Operand& p) {
    bool moved = false;
#pragma unroll
    for (i32 r = 0; r < kRows; ++r) moved |= raise_maximum(largest(acc_s[r / 2], r % 2), scale, r, alpha[r]);
#pragma unroll
    for (i32 r = 0; r < kRows; ++r) exponentiate(acc_s[r / 2], scale, r, alpha[r], p);
    return ptx::any(moved);
  }

  // Sums of whole rows; every lane of a row gets them.
  __device__ __forceinline__ void finish() {
#pragma unroll
    for (i32 r = 0; r < kRows; ++r) row_sum[r] = ptx::sum_over_lanes<4>(row_sum[r]);
  }

 private:
  __device__ __forceinline__ static i32 largest(const i32 (&acc_s)[kNTiles][4], i32 half) {
    i32 x = max(acc_s[0][2 * half], acc_s[0][2 * half + 1]);
#pragma unroll
    for (i32 j = 1; j < kNTiles; ++j) x = max(max(x, acc_s[j][2 * half]), acc_s[j][2 * half + 1]);
    return x;
  }

  // A rise of up to kLazyRise is left for later: P then exceeds its usual largest value by that many bits, for which
  // the product leaves room, and nothing needs rescaling.
  __device__ __forceinline__ bool raise_maximum(i32 largest_score, float scale, i32 r, float& alpha) {
    const float own = scale * (__int_as_float(largest_score) - kScoreBias);
    const float tile_max = ptx::max_over_lanes<4>(own);
    const bool moved = tile_max > row_max[r] + Product::kLazyRise;
    const float new_max = moved ? tile_max : row_max[r];
    alpha = ptx::ex2(row_max[r] - new_max);
    row_max[r] = new_max;
    return moved;
  }

  // P = 2^(score - row_max + kPScaleLog2), packed as the A operand of the second product.
  __device__ __forceinline__ void exponentiate(const i32 (&acc_s)[kNTiles][4], float scale, i32 r, float alpha,
                                               typename Product::Operand& p) {
    const float offset = fmaf(-scale, kScoreBias, Product::kPScaleLog2 - row_max[r]);
    float sum = row_sum[r] * alpha;
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
