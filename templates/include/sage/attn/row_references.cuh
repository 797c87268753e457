// Row references and row sums of the online softmax over the KV tiles, in the log2 domain: shared by the softmaxes of
// attn/mma/softmax.cuh and attn/wgmma/softmax.cuh.
//
// Scores of any size: a reference is an f32, whose units outgrow P's range where scores do. References are rounded
// down, so that the largest P of a row is never too small, and conversions clamp P to its type's range: keys whose
// scores lie within two such units of the largest, 2^-22 of it, count alike. Sums of the rounded P, by which O is
// divided, clamp with it. Scores end at 2^122: scales are at most kLargestScoreScale.
// Source: SageAttention2, Algorithm 1; Milakov & Gimelshein, "Online normalizer calculation for softmax".
#pragma once

#include "sage/numerics/scale.cuh"
#include "sage/ptx/math.cuh"
#include "sage/ptx/warp.cuh"
#include "sage/types.cuh"

namespace sage {

// The reference of a row that saw no key yet. Finite, so that a row that sees no key of a tile does not subtract
// infinities; far below any score in log2 units.
constexpr float kNoReference = -0x1p127f;

// A masked score must stay -inf when scaled: scales may not underflow to zero. NVFP4 also divides delta_s by a scale;
// scores of NVFP4 with a smaller scale vanish.
template <Qk kQk>
constexpr float kSmallestScale = kQk == Qk::kNvfp4 ? 0x1p-60f : 1e-37f;

// The largest scale of scores in an attention kernel. Sums of NVFP4's products are below 2^30.
template <Qk kQk>
constexpr float kLargestScoreScale = kQk == Qk::kNvfp4 ? 0x1p90f : kLargestScale;

// Bounds on the fall of a reference. A fall makes O and the sum of P larger, and they must stay finite: O is at most
// kVLimit (1792 or less) times the sum of P, times v_factor, and is finite where the factors of V differ by less than
// 2^50. kMostFall, in log2 units, bounds the fall below the highest reference of a row, where a register keeps that.
// kLargestSum bounds the sum of P elsewhere. Keys that lie further below weigh less than rounding, even 2^17 of them.
constexpr float kMostFall = 40.0f;
constexpr float kLargestSum = 0x1p66f;

// The reference that makes P of a score 2^top, rounded down. scale: takes the score to log2 units.
__device__ __forceinline__ float reference_of(float score, float scale, float top) {
  return __fmaf_rd(score, scale, -top);
}

// The references of a thread's rows, and their sums of P. Product: how P enters the second product (attn/mma/pv.cuh).
// Every function that moves a reference takes what reference_of() makes of the thread's largest score of a tile, and
// returns the factor for all that was summed relative to the old reference.
template <class Product, i32 kRows>
struct RowReferences {
  static constexpr float kSumUnit = Product::kSumUnit;

  float row_ref[kRows];  // log2 units: P is 2^(score - row_ref)
  float highest[kRows];  // reference so far; of restart_reference() alone
  float row_sum[kRows];  // of P, where Product::kSumsRounded as it was rounded, times Product::kSumUnit

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (i32 r = 0; r < kRows; ++r) row_ref[r] = highest[r] = kNoReference, row_sum[r] = 0.0f;
  }

  // Raises the reference to make the largest P of the row 2^kTop, if that P would exceed 2^(kTop + kLazyRise). A rise
  // within kLazyRise, for which P's type has room, needs no rescaling. own_needed: for kTop.
  __device__ __forceinline__ float raise_reference(float own_needed, i32 r) {
    const float exact = ptx::max_over_lanes<4>(own_needed);
    const float needed = Product::kWholeReference ? ceilf(exact) : exact;
    return set_reference(needed > row_ref[r] + Product::kLazyRise ? needed : row_ref[r], r);
  }

  // Moves the reference up or down to the one that is needed. Uses no exponential for the bound on a fall: all
  // exponentials of the tile wait for the reference.
  __device__ __forceinline__ float restart_reference(float own_needed, i32 r) {
    return set_reference(fmaxf(ptx::max_over_lanes<4>(own_needed), highest[r] - kMostFall), r);
  }

  // Raises the reference as raise_reference() does, and restarts it where the largest P of the tile would be below
  // 2^(kTop - kLazyFall). own_needed: for kTop. sum: of P, or the largest of its parts.
  __device__ __forceinline__ float follow_tile(float own_needed, float sum, i32 r) {
    const float needed = ptx::max_over_lanes<4>(own_needed), fall = row_ref[r] - needed;
    const bool falls = fall > Product::kLazyFall && fall < kMostFall && sum * ptx::ex2(fall) < kLargestSum;
    return set_reference(fall < 0.0f || falls ? needed : row_ref[r], r);
  }

 private:
  __device__ __forceinline__ float set_reference(float reference, i32 r) {
    const float alpha = ptx::ex2(row_ref[r] - reference);
    row_ref[r] = reference;
    highest[r] = fmaxf(highest[r], reference);
    return alpha;
  }
};

}  // namespace sage
