// The mask of a KV tile, in registers.
#pragma once

#include "sage/attn/softmax.cuh"
#include "sage/problem/work_tile.cuh"

namespace sage {

// Replaces the scores of the keys that a row does not see. Scores: i32[kWarpM / 16][kBlockN / 8][4], as fragments of
// an accumulator.
template <class Config, class Scores>
__device__ __forceinline__ void apply_mask(Scores& acc_s, const AttnParams& params, const WorkTile& work, i32 warp,
                                           i32 lane, i32 tile) {
  // A lane looks one row of the warp up: a key mask is in memory, and each row's address would take registers.
  const i32 row = work.first_row + warp * Config::kWarpM + lane % Config::kWarpM;
  // On Hopper, whose warps have 16 rows, a branch keeps the look-up out of the main loop's schedule: 1.5 % of the time
  // at head dim 128. Elsewhere, or where Q is smoothed, the branch would spill registers.
  constexpr bool kBranch = Config::kWarpM == 16 && !Config::kSmoothQ;
  const auto of_row = visible_keys<Config::kMask, kBranch>(seqlen_of(params, work.batch), row);
  const i32 first_key = tile * Config::kBlockN + lane % 4 * 2;  // this thread has the keys 8n and 8n + 1 from there on
#pragma unroll
  for (i32 r = 0; r < Config::kWarpM / 8; ++r) {
    const auto keys = of_row.of_lane(lane / 4 + 8 * r).from(first_key);
#pragma unroll
    for (i32 n = 0; n < Config::kBlockN / 8; ++n) {
#pragma unroll
      for (i32 c = 0; c < 2; ++c) {
        if (!keys.contains(8 * n + c)) acc_s[r / 2][n][2 * (r % 2) + c] = kMaskedScore;
      }
    }
  }
}

}  // namespace sage
