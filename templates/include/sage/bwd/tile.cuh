// A stage of shared memory of the backward kernels: kTileRows rows of Q and dO, or of K and V.
//   codes        [kTileRows][kHeadDim] s8, Q̂ or K̂ where the forward pass saved them
//   halves       [kTileRows][kHeadDim] f16 or bf16, V where the caller has it, and dO, but for bwdkv and bwdqkv
//                with kHalves
//   side         what bwd/prepare.cuh writes, in global memory tile by tile:
//     transposed   [kHeadDim][kTileRows] s8, codes by channels, rows in the order of key_of_column()
//     grad         of Q and dO: dÔ, dO quantized by rows, transposed likewise
//     or, where P and dS are multiplied in 16 bits, instead of both:
//     half codes   [kTileRows][kHeadDim] bf16, the codes, which that type holds exactly
//     scales and what else a row has, f32
//   Where P and dS are multiplied in 16 bits, the side of Q begins with dO, so that bulk copies bring all of a tile,
//   and ends with the half codes, which have stages of their own.
// Codes and sides are swizzled already, so that loading them is a plain copy.
#pragma once

#include "sage/bwd/params.cuh"
#include "sage/tile/layout.cuh"

namespace sage {

constexpr i32 kTileRows = 64;

// Scale groups of the rows of a tile of dO: group g holds the rows m with m % kGradGroups == g, so that a thread's
// columns of an accumulator have two scales.
constexpr i32 kGradGroups = 8;

// Config: kHeadDim; kHalves, whether P and dS are multiplied in 16 bits: else as integers of 8.
template <class Config>
struct BwdTile {
  using Codes = SwizzledRows<kTileRows, Config::kHeadDim>;
  using Halves = SwizzledRows<kTileRows, 2 * Config::kHeadDim>;
  using Transposed = SwizzledRows<Config::kHeadDim, kTileRows>;

  // Offsets in a stage.
  static constexpr i32 kCodes = 0, kCodeBytes = kTileRows * Config::kHeadDim;
  static constexpr i32 kHalves = kCodeBytes, kHalfBytes = 2 * kCodeBytes;
  static constexpr i32 kSide = kHalves + kHalfBytes;
  static constexpr i32 kTransposed = kSide, kHalfCodes = kSide;

  // The side of K and V: the scale of every key.
  static constexpr i32 kKeyScales = kSide + (Config::kHalves ? kHalfBytes : kCodeBytes);
  static constexpr i32 kKvBytes = kKeyScales + kTileRows * sizeof(float);
  static constexpr i32 kKvSideBytes = kKvBytes - kSide;

  // The side of Q and dO, f32 of every query: the scale of Q̂, times softmax_scale · log2 e; the log-sum-exp, negated,
  // in log2 units, -inf where the query sees no key, or does not exist; -D, D = sum of dO · O; and that times the scale
  // of Q̂. Then, without kHalves, the scales of dÔ.
  static constexpr i32 kQSide = Config::kHalves ? kHalves : kSide;  // where the side of Q begins
  static constexpr i32 kGrad = kTransposed + kCodeBytes;
  static constexpr i32 kQueryScales = kSide + (Config::kHalves ? 0 : 2 * kCodeBytes);
  static constexpr i32 kMinusLse = kQueryScales + kTileRows * sizeof(float);
  static constexpr i32 kMinusDelta = kMinusLse + kTileRows * sizeof(float);
  static constexpr i32 kMinusScaledDelta = kMinusDelta + kTileRows * sizeof(float);
  static constexpr i32 kGradScales = kMinusScaledDelta + kTileRows * sizeof(float);
  static constexpr i32 kQWritten = kGradScales + (Config::kHalves ? 0 : kGradGroups * sizeof(float));
  static constexpr i32 kQBytes = ceil_div(kQWritten, 128) * 128;
  static constexpr i32 kQHalfCodes = kQBytes;  // with kHalves
  static constexpr i32 kQSideBytes = kQBytes - kQSide + (Config::kHalves ? kHalfBytes : 0);
  static_assert(kSide % 128 == 0 && kKvBytes % 128 == 0, "tiles stay aligned to whole lines");

  // Addresses of codes and sides. q_tile, kv_tile: of all heads, kTileRows rows each.
  __device__ __forceinline__ static const u8* q_codes(const BwdParams& params, i32 q_tile) {
    return params.q_hat + static_cast<i64>(q_tile) * kCodeBytes;
  }
  __device__ __forceinline__ static const u8* k_codes(const BwdParams& params, i32 kv_tile) {
    return params.k_hat + static_cast<i64>(kv_tile) * kCodeBytes +
           static_cast<i64>(kv_tile >> params.log2_parts_of_kv_tile) * KvLine::kBytes;
  }
  __device__ __forceinline__ static u8* q_side(const BwdParams& params, i32 q_tile) {
    return params.q_side + static_cast<i64>(q_tile) * kQSideBytes;
  }
  __device__ __forceinline__ static u8* kv_side(const BwdParams& params, i32 kv_tile) {
    return params.kv_side + static_cast<i64>(kv_tile) * kKvSideBytes;
  }
};

// How many blocks of keys have added to the sums of dQ of a tile of queries, bwd/wgmma/sums_q.cuh. q_tile: of all
// heads.
__device__ __forceinline__ u32* q_count(const BwdParams& params, i32 q_tile) { return params.q_counts + q_tile; }

}  // namespace sage
