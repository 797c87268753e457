// The second product with mma.sync, O += P·V: how P is packed, and how the sum over tiles is kept.
#pragma once

#include "sage/attn/mma/softmax.cuh"
#include "sage/attn/p_operand.cuh"
#include "sage/numerics/scale.cuh"
#include "sage/ptx/ldmatrix.cuh"
#include "sage/ptx/math.cuh"
#include "sage/ptx/mma.cuh"
#include "sage/tile/layout.cuh"

namespace sage {

// Row sums of P as it was rounded, in units of kSumUnit: products with a constant channel of V̂. O is divided by them,
// so that a constant V stays constant. Rounding e4m3 P may move a row's sum by a few percent, and the log-sum-exp with
// it: for that each thread also adds up P before rounding (attn/mma/softmax.cuh).
template <class Config>
using RowSums = float[Config::kWarpM / 8];

// Rescales O to new row references. Runs off the fast path: an f16 P, whose references have room, rarely takes it.
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

template <class Config>
__device__ __forceinline__ void rescale_all(OutputAccumulator<Config>& acc_o, float factor) {
  float of_rows[Config::kWarpM / 8];
#pragma unroll
  for (float& of_row : of_rows) of_row = factor;
  rescale<Config>(acc_o, of_rows);
}

// P and V in f16, f32 accumulators that persist over the tiles. V̂ lies in rows of keys; ldmatrix transposes it.
template <class Config>
struct PvF16 {
  static constexpr i32 kMTiles = Config::kWarpM / 16, kOTiles = Config::kHeadDim / 8;
  static constexpr i32 kSteps = Config::kBlockN / 16;  // keys a product: 16
  using Swizzle = typename TileLayout<Config>::VRows;

  // f16 reaches from 2^-24 to 2^16. When a reference is set, the largest P is 2^7, so that P down to 2^-21 of that
  // stays normal. P may exceed 2^7 by a factor of 2^8 before sums are rescaled.
  static constexpr float kTop = 7.0f;
  static constexpr float kLazyRise = 8.0f;
  static constexpr bool kWholeReference = true;
  static constexpr bool kMayFall = false;  // 31 powers of two hold whatever weighs something
  static constexpr float kLazyFall = 0.0f;
  static constexpr float kLargestFolded = 1.0f;
  // Whether threads sum P before rounding; whether a product sums P as it was rounded.
  static constexpr bool kSumsInThreads = false, kSumsRounded = true;
  static constexpr float kSumUnit = 1.0f;
  static constexpr bool kScalesGroups = false;  // of P
  // The scales of V̂ are powers of two, so that V̂ keeps all bits of a bf16 down to 2^-14. Few tiles need a v_factor.
  static constexpr float kVTypical = 0.0f, kVLeast = 0x1p-4f, kVLimit = 0x1p15f;

  using Operand = u32[kMTiles][kSteps][4];

  // x: scores tiles j and j + 1 of row r.
  __device__ __forceinline__ static void pack(Operand& p, i32 r, i32 j, const float (&x)[4]) {
    p[r / 2][j / 2][r % 2] = ptx::finite_f16x2(x[0], x[1]);
    p[r / 2][j / 2][r % 2 + 2] = ptx::finite_f16x2(x[2], x[3]);
  }

  // 16 keys by two chunks of 8 channels, keys first.
  __device__ __forceinline__ static u32 offset(i32 lane) { return Swizzle::offset(lane % 16, lane / 16); }

  // v_factor: of the tile. O stays in the accumulators of the products: where v_factor is not one, rescale O to it and
  // back.
  __device__ __forceinline__ static void accumulate(OutputAccumulator<Config>& acc_o, RowSums<Config>& row_sum,
                                                    const Operand& p, u32 sV, u32 v_offset, float v_factor) {
    const u32 v_row = sV + v_offset;
    if (v_factor != 1.0f) rescale_all<Config>(acc_o, reciprocal_of_power_of_two(v_factor));
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
        ptx::ldmatrix_x4_trans(v, Swizzle::moved(v_row, 16 * step, n));
#pragma unroll
        for (i32 m = 0; m < kMTiles; ++m) {
          ptx::mma_m16n8k16_f16f16f32(acc_o[m][n], p[m][step], v[0], v[1], acc_o[m][n]);
          ptx::mma_m16n8k16_f16f16f32(acc_o[m][n + 1], p[m][step], v[2], v[3], acc_o[m][n + 1]);
        }
      }
    }
    if (v_factor != 1.0f) rescale_all<Config>(acc_o, v_factor);
  }

 private:
  static constexpr u32 kOnes = 0x3c003c00;  // twice 1.0
};

// P and V in e4m3, two-level accumulation: the product of one tile in a fresh accumulator R, then promotion, O +=
// v_factor · R, in f32. R in f32 keeps 13 mantissa bits. R in f16 runs at twice the rate on some chips; V̂ is then
// scaled to 4.5, so that no sum of a tile leaves f16. The rows of V̂ are channels; its columns are keys in the order of
// key_of_column().
// Source: SageAttention2, section 3.4; SageAttention2++.
template <class Config>
struct PvE4m3 : E4m3Operand<Config> {
  using E4m3Operand<Config>::kMTiles, E4m3Operand<Config>::kSteps, E4m3Operand<Config>::kF16Accum;
  using E4m3Operand<Config>::kSumUnits;
  using typename E4m3Operand<Config>::Operand;
  static constexpr i32 kOTiles = Config::kHeadDim / 8;
  static constexpr bool kTakesAlpha = Config::kHeadDim <= 64;  // accumulate() may; wider heads lack the registers
  using Swizzle = typename TileLayout<Config>::VRows;

  // 8 channels by four chunks of 16 keys, chunks last.
  __device__ __forceinline__ static u32 offset(i32 lane) { return Swizzle::offset(lane % 8, lane / 8); }

  __device__ __forceinline__ static void accumulate(OutputAccumulator<Config>& acc_o, RowSums<Config>& row_sum,
                                                    const Operand& p, u32 sV, u32 v_offset, float v_factor) {
    multiply_all(row_sum, p, sV + v_offset, [&](i32 m, i32 n, const float (&r)[4]) {
#pragma unroll
      for (i32 c = 0; c < 4; ++c) acc_o[m][n][c] = fmaf(r[c], v_factor, acc_o[m][n][c]);
    });
  }

  // Promotion that takes O to new references, too: O = alpha · O + R, in units of the tile's v_factor. `unit`: in which
  // O counts, before and after.
  __device__ __forceinline__ static void accumulate(OutputAccumulator<Config>& acc_o, RowSums<Config>& row_sum,
                                                    const float (&alpha)[Config::kWarpM / 8], float& unit,
                                                    const Operand& p, u32 sV, u32 v_offset, float v_factor) {
    const float ratio = unit * reciprocal_of_power_of_two(v_factor);
    unit = v_factor;
    multiply_all(row_sum, p, sV + v_offset, [&](i32 m, i32 n, const float (&r)[4]) {
#pragma unroll
      for (i32 c = 0; c < 4; ++c) acc_o[m][n][c] = fmaf(acc_o[m][n][c], alpha[2 * m + c / 2] * ratio, r[c]);
    });
  }

 private:
  // The products of P with the sum units and with all channels of V̂, R of each 16 rows and eight channels.
  template <class Promote>
  __device__ __forceinline__ static void multiply_all(RowSums<Config>& row_sum, const Operand& p, u32 v_row,
                                                      Promote promote) {
    u32 units[2 * kSteps];
#pragma unroll
    for (u32& unit : units) unit = kSumUnits;
#pragma unroll
    for (i32 m = 0; m < kMTiles; ++m) {
      float r[4];
      multiply(r, p[m], units);
      row_sum[2 * m] += r[0];
      row_sum[2 * m + 1] += r[2];
    }
#pragma unroll
    for (i32 n = 0; n < kOTiles; ++n) {
      u32 v[2 * kSteps];
#pragma unroll
      for (i32 step = 0; step < kSteps; step += 2) {
        u32 (&pair)[4] = reinterpret_cast<u32 (&)[4]>(v[2 * step]);
        ptx::ldmatrix_x4(pair, Swizzle::moved(v_row, 8 * n, 2 * step));
      }
#pragma unroll
      for (i32 m = 0; m < kMTiles; ++m) {
        float r[4];
        multiply(r, p[m], v);
        promote(m, n, r);
      }
    }
  }

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

// P and V in e4m3, block-scaled products: sums keep all bits of f32, and O stays in the accumulators of the products.
// The scale of V̂ is v_factor. V̂ is laid out as for PvE4m3.
template <class Config>
struct PvMxf8 : E4m3Operand<Config> {
  static constexpr bool kTakesAlpha = false;  // O is in the accumulators of the products
  using E4m3Operand<Config>::kMTiles, E4m3Operand<Config>::kSteps, E4m3Operand<Config>::kSumUnits;
  using typename E4m3Operand<Config>::Operand;
  static constexpr i32 kOTiles = Config::kHeadDim / 8;
  using Swizzle = typename TileLayout<Config>::VRows;

  // Two groups of 8 channels by two chunks of 16 keys, chunks first.
  __device__ __forceinline__ static u32 offset(i32 lane) {
    return Swizzle::offset(lane / 16 * 8 + lane % 8, lane / 8 % 2);
  }

  __device__ __forceinline__ static void accumulate(OutputAccumulator<Config>& acc_o, RowSums<Config>& row_sum,
                                                    const Operand& p, u32 sV, u32 v_offset, float v_factor) {
    const u32 v_row = sV + v_offset;
    constexpr u32 kOne = kExponentBias;                              // in ue8m0
    const u32 v_scale = __float_as_uint(v_factor) >> kMantissaBits;  // a power of two, whose exponent is its ue8m0
#pragma unroll
    for (i32 step = 0; step < kSteps; ++step) {
#pragma unroll
      for (i32 m = 0; m < kMTiles; ++m) {
        float sum[4] = {row_sum[2 * m], row_sum[2 * m], row_sum[2 * m + 1], row_sum[2 * m + 1]};
        ptx::mma_m16n8k32_mxf8_e4m3e4m3f32(sum, p[m][step], kSumUnits, kSumUnits, sum, kOne, kOne);
        row_sum[2 * m] = sum[0];
        row_sum[2 * m + 1] = sum[2];
      }
#pragma unroll
      for (i32 n = 0; n < kOTiles; n += 2) {
        u32 v[4];
        ptx::ldmatrix_x4(v, Swizzle::moved(v_row, 8 * n, 2 * step));
#pragma unroll
        for (i32 m = 0; m < kMTiles; ++m) {
          ptx::mma_m16n8k32_mxf8_e4m3e4m3f32(acc_o[m][n], p[m][step], v[0], v[1], acc_o[m][n], kOne, v_scale);
          ptx::mma_m16n8k32_mxf8_e4m3e4m3f32(acc_o[m][n + 1], p[m][step], v[2], v[3], acc_o[m][n + 1], kOne, v_scale);
        }
      }
    }
  }
};

template <class Config, Pv kPv = Config::kPv, bool kTwoLevel = Config::kPvAccum != PvAccum::kF32>
struct SelectPv;
template <class Config>
struct SelectPv<Config, Pv::kF16, false> : PvF16<Config> {};
template <class Config>
struct SelectPv<Config, Pv::kE4m3, true> : PvE4m3<Config> {};
template <class Config>
struct SelectPv<Config, Pv::kE4m3, false> : PvMxf8<Config> {};

}  // namespace sage
