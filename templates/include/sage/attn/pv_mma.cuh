// The second product, O += P·V: how P is packed, and with mma.sync how the sum over tiles is kept.
#pragma once

#include "sage/attn/softmax.cuh"
#include "sage/numerics/scale.cuh"
#include "sage/ptx/ldmatrix.cuh"
#include "sage/ptx/math.cuh"
#include "sage/ptx/mma.cuh"
#include "sage/tile/layout.cuh"

namespace sage {

template <class Config>
using OutputAccumulator = float[Config::kWarpM / 16][Config::kHeadDim / 8][4];

// Sums of P over its rows, with mma.sync. f16 P is summed by a product with ones, which takes an addition a score off the
// other pipes.
// Rounding e4m3 P moves such a sum, and the log-sum-exp with it, by as much as 6 % where one key dominates: there each thread
// adds up P before it is rounded (attn/softmax.cuh).
template <class Config>
using RowSums = float[Config::kWarpM / 8];

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
  static constexpr bool kMayFall = false;  // 31 powers of two hold whatever weighs something
  static constexpr float kLazyFall = 0.0f;
  static constexpr float kLargestFolded = 1.0f;
  static constexpr bool kSumsInThreads = false;
  // V̂ has powers of two for its scales, and all bits of a bf16 down to 2^-14: few tiles need a factor of their own.
  static constexpr float kVTypical = 0.0f, kVLeast = 0x1p-4f, kVLimit = 0x1p15f;

  using Operand = u32[kMTiles][kSteps][4];

  // x: scores tiles j and j + 1 of row r.
  __device__ __forceinline__ static void pack(Operand& p, i32 r, i32 j, const float (&x)[4]) {
    p[r / 2][j / 2][r % 2] = ptx::f16x2(x[0], x[1]);
    p[r / 2][j / 2][r % 2 + 2] = ptx::f16x2(x[2], x[3]);
  }

  // 16 keys by two chunks of 8 channels, keys first.
  __device__ __forceinline__ static u32 offset(i32 lane) { return Rows::offset(lane % 16, lane / 16); }

  // v_factor: of the tile; O persists in the accumulators of the products, which are brought to the tile's unit and back.
  __device__ __forceinline__ static void accumulate(OutputAccumulator<Config>& acc_o, RowSums<Config>& row_sum,
                                                    const Operand& p, u32 v_row, float v_factor) {
    if (v_factor != 1.0f) rescale_all(acc_o, reciprocal_of_power_of_two(v_factor));
#pragma unroll
    for (i32 m = 0; m < kMTiles; ++m) {
      const float zero[4] = {};
      float sum[4];
#pragma unroll
      for (i32 step = 0; step < kSteps; ++step) {
        ptx::mma_m16n8k16_f16f16f32(sum, p[m][step], kOnes, kOnes, ptx::chain(step, zero, sum));
      }
      row_sum[2 * m] += sum[0];
      row_sum[2 * m + 1] += sum[2];
    }
#pragma unroll
    for (i32 step = 0; step < kSteps; ++step) {
#pragma unroll
      for (i32 n = 0; n < kOTiles; n += 2) {
        u32 v[4];
        ptx::ldmatrix_x4_trans(v, Rows::moved(v_row, 16 * step, n));
#pragma unroll
        for (i32 m = 0; m < kMTiles; ++m) {
          ptx::mma_m16n8k16_f16f16f32(acc_o[m][n], p[m][step], v[0], v[1], acc_o[m][n]);
          ptx::mma_m16n8k16_f16f16f32(acc_o[m][n + 1], p[m][step], v[2], v[3], acc_o[m][n + 1]);
        }
      }
    }
    if (v_factor != 1.0f) rescale_all(acc_o, v_factor);
  }

 private:
  static constexpr u32 kOnes = 0x3c003c00;  // twice 1.0

  __device__ __forceinline__ static void rescale_all(OutputAccumulator<Config>& acc_o, float factor) {
    float of_rows[Config::kWarpM / 8];
#pragma unroll
    for (float& of_row : of_rows) of_row = factor;
    rescale<Config>(acc_o, of_rows);
  }
};

// P and V in e4m3, two-level accumulation: the product of one tile in a fresh accumulator R, then O += v_factor · R in f32. R in f32
// keeps 13 mantissa bits. R in f16 runs at twice the rate on some chips; V̂ is scaled to 4.5 then, so that no sum of a
// tile leaves f16. Keys of V̂ are ordered as key_of_column() says, channels are its rows.
// Source: SageAttention2, section 3.4; SageAttention2++.
template <class Config>
struct PvE4m3 {
  static constexpr i32 kMTiles = Config::kWarpM / 16, kOTiles = Config::kHeadDim / 8;
  static constexpr i32 kSteps = Config::kBlockN / 32;  // keys a product: 32
  static constexpr bool kF16Accum = Config::kPvAccum == PvAccum::kTwoLevelF16;
  using Rows = typename TileLayout<Config>::VRows;
  static_assert(Config::kPvAccum != PvAccum::kF32, "13 bits are too few for a whole sequence");
  static_assert(!kF16Accum || Config::kBlockN == 64, "224 · 4.5 · 64 is the most that f16 holds");

  static constexpr float kTop = kF16Accum ? 7.807355f : 8.807355f;  // log2 of 224, and of 448, the largest e4m3
  static constexpr float kLazyRise = 0.0f;                          // P fills its range: no room for more
  static constexpr bool kWholeReference = false;
  static constexpr bool kMayFall = true;  // below 2^-9 P is zero
  static constexpr float kLazyFall = 6.0f;
  static constexpr float kLargestFolded = 0.015625f;
  static constexpr bool kSumsInThreads = true;
  // The largest V̂: that of e4m3, or with P up to 224, a tile of 64 keys and sums in f16, what no sum leaves f16 with. Above the
  // mean magnitude there is room for 40 times that, or 12.
  static constexpr float kVLimit = kF16Accum ? 4.5f : 448.0f, kVLeast = kVLimit / 32;
  static constexpr float kVTypical = kF16Accum ? 0.375f : 11.0f;  // e4m3 holds both: a constant channel stays exact

  using Operand = u32[kMTiles][kSteps][4];

  __device__ __forceinline__ static void pack(Operand& p, i32 r, i32 j, const float (&x)[4]) {
    p[r / 2][j / 4][r % 2 + 2 * (j / 2 % 2)] = ptx::e4m3x4(x[0], x[1], x[2], x[3]);
  }

  // 8 channels by four chunks of 16 keys, chunks last.
  __device__ __forceinline__ static u32 offset(i32 lane) { return Rows::offset(lane % 8, lane / 8); }

  __device__ __forceinline__ static void accumulate(OutputAccumulator<Config>& acc_o, RowSums<Config>&,
                                                    const Operand& p, u32 v_row, float v_factor) {
#pragma unroll
    for (i32 n = 0; n < kOTiles; ++n) {
      u32 v[2 * kSteps];
#pragma unroll
      for (i32 step = 0; step < kSteps; step += 2) {
        u32 (&pair)[4] = reinterpret_cast<u32 (&)[4]>(v[2 * step]);
        ptx::ldmatrix_x4(pair, Rows::moved(v_row, 8 * n, 2 * step));
      }
#pragma unroll
      for (i32 m = 0; m < kMTiles; ++m) {
        float r[4];
        multiply(r, p[m], v);
#pragma unroll
        for (i32 c = 0; c < 4; ++c) acc_o[m][n][c] = fmaf(r[c], v_factor, acc_o[m][n][c]);
      }
    }
  }

 private:
  // 16 rows of P by the whole tile of 8 channels.
  __device__ __forceinline__ static void multiply(float (&r)[4], const u32 (&p)[kSteps][4],
                                                  const u32 (&v)[2 * kSteps]) {
    if constexpr (kF16Accum) {
      const u32 zero[2] = {};
      u32 h[2];
#pragma unroll
      for (i32 step = 0; step < kSteps; ++step) {
        ptx::mma_m16n8k32_e4m3e4m3f16(h, p[step], v[2 * step], v[2 * step + 1], ptx::chain(step, zero, h));
      }
#pragma unroll
      for (i32 c = 0; c < 4; ++c) r[c] = ptx::f32_from_f16(static_cast<u16>(h[c / 2] >> 16 * (c % 2)));
    } else {
      const float zero[4] = {};
#pragma unroll
      for (i32 step = 0; step < kSteps; ++step) {
        ptx::mma_m16n8k32_e4m3e4m3f32(r, p[step], v[2 * step], v[2 * step + 1], ptx::chain(step, zero, r));
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
