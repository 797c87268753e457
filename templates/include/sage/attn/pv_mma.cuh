// The second product, O += P·V, with mma.sync: how P is packed, and how the sum over tiles is kept.
#pragma once

#include "sage/attn/softmax.cuh"
#include "sage/ptx/ldmatrix.cuh"
#include "sage/ptx/math.cuh"
#include "sage/ptx/mma.cuh"
#include "sage/tile/layout.cuh"

namespace sage {

template <class Config>
using OutputAccumulator = float[Config::kWarpM / 16][Config::kHeadDim / 8][4];

// Brings what was summed so far to new references. A branch of its own, and rarely taken: once a row has seen a few tiles
// its maximum hardly moves.
template <class Config>
__device__ __forceinline__ void rescale(OutputAccumulator<Config>& acc_o, const float (&alpha)[Config::kWarpM / 8]) {
#pragma unroll
  for (i32 m = 0; m < Config::kWarpM / 16; ++m) {
#pragma unroll
    for (i32 n = 0; n < Config::kHeadDim / 8; ++n) {
#pragma unroll
      for (i32 c = 0; c < 4; ++c) acc_o[m][n][c] *= alpha[2 * m + c / 2];
    }
  }
}

// P and V in f16, f32 accumulators that persist over the tiles. V̂ lies in rows of keys; ldmatrix transposes it.
template <class Config>
struct PvF16 {
  static constexpr i32 kMTiles = Config::kWarpM / 16, kOTiles = Config::kHeadDim / 8;
  static constexpr i32 kSteps = Config::kBlockN / 16;  // keys a product: 16
  using Rows = typename TileLayout<Config>::VRows;

  // f16 reaches from 2^-24 to 2^16: P tops at 2^7, so that all down to 2^-21 of the largest stays normal, and may
  // outgrow that by 2^8 before sums must be rescaled.
  static constexpr float kTop = 7.0f;
  static constexpr float kLazyRise = 8.0f;
  static constexpr bool kWholeReference = true;
  static constexpr float kLargestFolded = 1.0f;

  using Operand = u32[kMTiles][kSteps][4];

  // x: scores tiles j and j + 1 of row r.
  __device__ __forceinline__ static void pack(Operand& p, i32 r, i32 j, const float (&x)[4]) {
    p[r / 2][j / 2][r % 2] = ptx::f16x2(x[0], x[1]);
    p[r / 2][j / 2][r % 2 + 2] = ptx::f16x2(x[2], x[3]);
  }

  // 16 keys by two chunks of 8 channels, keys first.
  __device__ __forceinline__ static u32 lane_offset(i32 lane) { return Rows::offset(lane % 16, lane / 16); }

  __device__ __forceinline__ static void accumulate(OutputAccumulator<Config>& acc_o, const Operand& p, u32 sV,
                                                    u32 v_offset) {
#pragma unroll
    for (i32 step = 0; step < kSteps; ++step) {
#pragma unroll
      for (i32 n = 0; n < kOTiles; n += 2) {
        u32 v[4];
        ptx::ldmatrix_x4_trans(v, sV + Rows::moved(v_offset, 16 * step, n));
#pragma unroll
        for (i32 m = 0; m < kMTiles; ++m) {
          ptx::mma_m16n8k16_f16f16f32(acc_o[m][n], p[m][step], v[0], v[1], acc_o[m][n]);
          ptx::mma_m16n8k16_f16f16f32(acc_o[m][n + 1], p[m][step], v[2], v[3], acc_o[m][n + 1]);
        }
      }
    }
  }
};

// P and V in e4m3, two-level accumulation: the product of one tile in a fresh accumulator R, which keeps 13 mantissa
// bits, then O += R in f32. Keys of V̂ are ordered as key_of_column() says, channels are its rows.
// Source: SageAttention2, section 3.4.
template <class Config>
struct PvE4m3 {
  static constexpr i32 kMTiles = Config::kWarpM / 16, kOTiles = Config::kHeadDim / 8;
  static constexpr i32 kSteps = Config::kBlockN / 32;  // keys a product: 32
  using Rows = typename TileLayout<Config>::VRows;

  static constexpr float kTop = 8.807354f;  // log2(448), the largest e4m3
  static constexpr float kLazyRise = 0.0f;  // P fills e4m3: no room for more
  static constexpr bool kWholeReference = false;
  static constexpr float kLargestFolded = 0.015625f;

  using Operand = u32[kMTiles][kSteps][4];

  __device__ __forceinline__ static void pack(Operand& p, i32 r, i32 j, const float (&x)[4]) {
    p[r / 2][j / 4][r % 2 + 2 * (j / 2 % 2)] = ptx::e4m3x4(x[0], x[1], x[2], x[3]);
  }

  // 8 channels by four chunks of 16 keys, chunks last.
  __device__ __forceinline__ static u32 lane_offset(i32 lane) { return Rows::offset(lane % 8, lane / 8); }

  __device__ __forceinline__ static void accumulate(OutputAccumulator<Config>& acc_o, const Operand& p, u32 sV,
                                                    u32 v_offset) {
    const float zero[4] = {};
#pragma unroll
    for (i32 n = 0; n < kOTiles; ++n) {
      u32 v[2 * kSteps];
#pragma unroll
      for (i32 step = 0; step < kSteps; step += 2) {
        u32 (&pair)[4] = reinterpret_cast<u32 (&)[4]>(v[2 * step]);
        ptx::ldmatrix_x4(pair, sV + Rows::moved(v_offset, 8 * n, 2 * step));
      }
#pragma unroll
      for (i32 m = 0; m < kMTiles; ++m) {
        float r[4];
#pragma unroll
        for (i32 step = 0; step < kSteps; ++step) {
          ptx::mma_m16n8k32_e4m3e4m3f32(r, p[m][step], v[2 * step], v[2 * step + 1], ptx::chain(step, zero, r));
        }
#pragma unroll
        for (i32 c = 0; c < 4; ++c) acc_o[m][n][c] += r[c];
      }
    }
  }
};

template <class Config, Pv kPv = Config::kPv>
struct SelectPv;
template <class Config>
struct SelectPv<Config, Pv::kF16> : PvF16<Config> {};
template <class Config>
struct SelectPv<Config, Pv::kE4m3> : PvE4m3<Config> {};

}  // namespace sage
