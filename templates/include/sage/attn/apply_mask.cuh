// The mask of a KV tile, in registers.
#pragma once

#include "sage/problem/sparse_mask.cuh"
#include "sage/ptx/warp.cuh"

namespace sage {

// A masked score: -inf as a float, below every biased score as an integer.
constexpr i32 kMaskedScore = static_cast<i32>(0xff800000);

// Whether any row of the warp sees any key of the tile. own_row: as below. Call with all lanes of the warp.
template <class Config>
__device__ __forceinline__ bool warp_sees(const VisibleKeys<Config::kMask>& own_row, i32 tile) {
  const auto keys = own_row.from(tile * Config::kBlockN);
  return ptx::any(keys.begin < Config::kBlockN && keys.end > 0);
}

// Replaces the scores of the keys that a row does not see. Scores: i32[kWarpM / 16][kBlockN / 8][4], as fragments of
// an accumulator. own_row: the keys that row lane % kWarpM of the warp sees. A lane holds one row's alone: a row's keys
// may be in memory, and each row's address would take registers.
template <class Config, class Scores>
__device__ __forceinline__ void apply_mask(Scores& acc_s, const VisibleKeys<Config::kMask>& own_row, i32 lane,
                                           i32 tile) {
  const i32 first_key = tile * Config::kBlockN + lane % 4 * 2;  // this thread has the keys 8n and 8n + 1 from there on
#pragma unroll
  for (i32 r = 0; r < Config::kWarpM / 8; ++r) {
    const auto keys = own_row.of_lane(lane / 4 + 8 * r).from(first_key);
#pragma unroll
    for (i32 n = 0; n < Config::kBlockN / 8; ++n) {
#pragma unroll
      for (i32 c = 0; c < 2; ++c) {
        if (!keys.contains(8 * n + c)) acc_s[r / 2][n][2 * (r % 2) + c] = kMaskedScore;
      }
    }
  }
}

// The same of a sparse mask. seen: FragmentBits of each of the thread's rows.
template <class Config, class Scores, class Rows>
__device__ __forceinline__ void apply_mask(Scores& acc_s, const Rows& seen) {
  using Bits = FragmentBits<Config::kBlockN>;
#pragma unroll
  for (i32 r = 0; r < Config::kWarpM / 8; ++r) {
#pragma unroll
    for (i32 e = 0; e < 4; ++e) {
#pragma unroll
      for (i32 bit = 0; bit < Bits::kField; ++bit) {  // in the order of bits, which become predicates several at a time
        const i32 n = 2 * (Bits::kField - 1 - bit) + e / 2, c = e % 2;
        if (!(seen[r] & Bits::bit(n, c))) acc_s[r / 2][n][2 * (r % 2) + c] = kMaskedScore;
      }
    }
  }
}

}  // namespace sage
