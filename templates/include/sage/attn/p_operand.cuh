// The accumulator of O, and P in e4m3 as an operand of P·V: its range, its packing, and the range of V̂ next to it.
#pragma once

#include "sage/ptx/math.cuh"
#include "sage/types.cuh"

namespace sage {

template <class Config>
using OutputAccumulator = float[Config::kWarpM / 16][Config::kHeadDim / 8][4];

// The mma family's R is in f32 or in f16, the wgmma family's in f32. Block-scaled products of the mma family have no R.
template <class Config>
struct E4m3Operand {
  static constexpr i32 kMTiles = Config::kWarpM / 16;
  static constexpr i32 kSteps = Config::kBlockN / 32;  // keys a product: 32
  static constexpr bool kF16Accum = Config::kPvAccum == PvAccum::kTwoLevelF16;
  static_assert(!kF16Accum || Config::kBlockN == 64, "224 · 4.5 · 64 is the most that f16 holds");

  static constexpr float kTop = kF16Accum ? 7.807355f : 8.807355f;  // log2 of 224, and of 448, the largest e4m3
  static constexpr float kLazyRise = 0.0f;                          // P fills its range: no room for more
  static constexpr bool kWholeReference = false;
  static constexpr bool kMayFall = true;  // below 2^-9 P is zero
  static constexpr float kLazyFall = 6.0f;
  static constexpr float kLargestFolded = 0.015625f;
  static constexpr bool kSumsInThreads = true, kSumsRounded = true;
  static constexpr bool kScalesGroups = false;
  // The largest V̂. For sums in f32 it is the largest e4m3. For sums in f16, P up to 224 and a tile of 64 keys, it is
  // the value with which no sum leaves f16. There is room for 40 times, or 12 times, the mean magnitude.
  static constexpr float kVLimit = kF16Accum ? 4.5f : 448.0f, kVLeast = kVLimit / 32;
  static constexpr float kVTypical = kF16Accum ? 0.375f : 11.0f;  // e4m3 holds both: a constant channel stays exact
  // P sums as a constant channel of V̂ does, which accumulators cut off alike: such channels come back constant.
  static constexpr float kSumUnit = kVTypical;
  static constexpr u32 kSumUnits = kF16Accum ? 0x2c2c2c2c : 0x53535353;  // four of it, in e4m3

  using Operand = u32[kMTiles][kSteps][4];

  // Four P of row r: of the tiles j and j + 1 of eight keys.
  __device__ __forceinline__ static u32& word(Operand& p, i32 r, i32 j) {
    return p[r / 2][j / 4][r % 2 + 2 * (j / 2 % 2)];
  }
  __device__ __forceinline__ static void pack(Operand& p, i32 r, i32 j, const float (&x)[4]) {
    word(p, r, j) = ptx::e4m3x4(x[0], x[1], x[2], x[3]);
  }
};

}  // namespace sage
