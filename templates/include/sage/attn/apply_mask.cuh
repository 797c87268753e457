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
  const i32 row = work.first_row + warp * Config::kWarpM + lane / 4;
  const i32 first_key = tile * Config::kBlockN + lane % 4 * 2;
  VisibleKeys<Config::kMask> keys[Config::kWarpM / 8];  // by row, from first_key on: this thread's are 8n and 8n + 1
#pragma unroll
  for (i32 r = 0; r < Config::kWarpM / 8; ++r) {
    keys[r] = visible_keys<Config::kMask>(seqlen_of(params, work.batch), row + 8 * r).from(first_key);
  }
#pragma unroll
  for (i32 m = 0; m < Config::kWarpM / 16; ++m) {
#pragma unroll
    for (i32 n = 0; n < Config::kBlockN / 8; ++n) {
#pragma unroll
      for (i32 c = 0; c < 4; ++c) {
        if (!keys[2 * m + c / 2].contains(8 * n + c % 2)) acc_s[m][n][c] = kMaskedScore;
      }
    }
  }
}

}  // namespace sage
