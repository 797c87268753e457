// The end of a query tile: O / row_sum · v_scale, plus the mean that smoothing took off V, in the caller's dtype; and the
// log-sum-exp.
#pragma once

#include "sage/attn/softmax.cuh"
#include "sage/attn/work.cuh"
#include "sage/ptx/shared.cuh"

namespace sage {

constexpr float kLn2 = 0.693147180559945f;

// A lane's channels of one row, two of every eight. `row` may lie on any multiple of 2 bytes.
template <i32 kOTiles>
__device__ __forceinline__ void store_row(u16* row, i32 lane, i32 headdim, const u32 (&pairs)[kOTiles]) {
  u16* to = row + 2 * (lane % 4);
  if (headdim == 8 * kOTiles && reinterpret_cast<u64>(row) % 4 == 0) {
#pragma unroll
    for (i32 n = 0; n < kOTiles; ++n) *reinterpret_cast<u32*>(to + 8 * n) = pairs[n];
    return;
  }
#pragma unroll
  for (i32 n = 0; n < kOTiles; ++n) {
    const i32 channel = 8 * n + 2 * (lane % 4);
    if (channel < headdim) to[8 * n] = static_cast<u16>(pairs[n]);
    if (channel + 1 < headdim) to[8 * n + 1] = static_cast<u16>(pairs[n] >> 16);
  }
}

// What store_output() needs of a query tile, as the quantizer left it in memory; of channels two neighbours at a time.
template <class Config>
struct ConstantsInMemory {
  const AttnParams& params;
  i64 channels, rows;  // of the KV head and of the query tile: their first
  i32 k_finite;

  __device__ __forceinline__ ConstantsInMemory(const AttnParams& params_, const Work& work)
      : params(params_),
        channels(static_cast<i64>(work.kv_head) * Config::kHeadDim),
        rows((static_cast<i64>(work.q_head) * params_.q_tiles + work.q_tile) * Config::kBlockM),
        k_finite(params_.k_finite[work.kv_head]) {}

  __device__ __forceinline__ float row_bias(i32 row) const { return params.row_bias[rows + row]; }
  __device__ __forceinline__ ptx::F32x2 v_scale(i32 channel) const { return pair<ptx::F32x2>(params.v_scale, channel); }
  __device__ __forceinline__ ptx::F32x2 v_mean(i32 channel) const { return pair<ptx::F32x2>(params.v_mean, channel); }
  __device__ __forceinline__ ptx::I32x2 v_finite(i32 channel) const { return pair<ptx::I32x2>(params.v_finite, channel); }

 private:
  template <class Pair, class T>
  __device__ __forceinline__ Pair pair(const T* of_channels, i32 channel) const {
    return {of_channels[channels + channel], of_channels[channels + channel + 1]};
  }
};

// rows.row_sum holds whole rows, and so does lse_sum, the sums of P for log-sum-exps. A row that saw no key is zero, its
// log-sum-exp -inf. Everything is computed before anything is stored: loads need not wait for stores that they might depend
// on.
template <class Config, class Rows, class Accumulator, class Constants>
__device__ __forceinline__ void store_output(const AttnParams& params, const Work& work, i32 warp, i32 lane,
                                             const Accumulator& acc_o, const Rows& rows,
                                             const float (&lse_sum)[Config::kWarpM / 8], const Constants& constants) {
  constexpr i32 kRows = Config::kWarpM / 8, kOTiles = Config::kHeadDim / 8;
  const i32 first = warp * Config::kWarpM + lane / 4;

  // A query that is not finite, as row_bias tells, turns its row into NaN, and so does a key in sight; one that sees no key
  // has nothing to spoil.
  float factor[kRows];
  i32 keys[kRows];  // that the row sees
#pragma unroll
  for (i32 r = 0; r < kRows; ++r) {
    const i32 row = work.first_row + first + 8 * r;
    keys[r] = Work::key_limit<Config::kCausal>(params, row);
    const float sum = rows.row_sum[r];
    float bias = constants.row_bias(first + 8 * r);
    if (keys[r] > constants.k_finite || !(fabsf(bias) < ptx::infinity())) bias = ptx::quiet_nan();
    if (keys[r] == 0) bias = 0.0f;
    factor[r] = (sum > 0.0f ? 1.0f / sum : 0.0f) + 0.0f * bias;
    if (params.lse != nullptr && lane % 4 == 0 && row < params.seqlen_q) {
      const float lse_log2 = rows.row_ref[r] + ptx::lg2(lse_sum[r]) + bias;
      params.lse[static_cast<i64>(work.q_head) * params.seqlen_q + row] = lse_log2 * kLn2;
    }
  }

  u32 pairs[kRows][kOTiles];  // of channels
#pragma unroll
  for (i32 n = 0; n < kOTiles; ++n) {
    const i32 channel = 8 * n + 2 * (lane % 4);
    const ptx::F32x2 scale = constants.v_scale(channel);
    const ptx::I32x2 finite = constants.v_finite(channel);
    ptx::F32x2 mean = {};
    if constexpr (Config::kSmoothV) mean = constants.v_mean(channel);
#pragma unroll
    for (i32 r = 0; r < kRows; ++r) {
      const float unless_empty = rows.row_sum[r] > 0.0f ? 1.0f : 0.0f;  // P sums to one where the row saw a key
      const float* value = &acc_o[r / 2][n][2 * (r % 2)];
      float x = value[0] * factor[r] * scale.x + mean.x * unless_empty;
      float y = value[1] * factor[r] * scale.y + mean.y * unless_empty;
      if (keys[r] > finite.x) x = ptx::quiet_nan();
      if (keys[r] > finite.y) y = ptx::quiet_nan();
      pairs[r][n] = params.dtype == Dtype::kBf16 ? ptx::bf16x2(x, y) : ptx::f16x2(x, y);
    }
  }

  const Strides& stride = params.out.stride;
  u16* out = static_cast<u16*>(params.out.data) + work.batch * stride.batch + work.head * stride.head;
#pragma unroll
  for (i32 r = 0; r < kRows; ++r) {
    const i32 row = work.first_row + first + 8 * r;
    if (row < params.seqlen_q) store_row<kOTiles>(out + row * stride.row, lane, params.headdim, pairs[r]);
  }
}

}  // namespace sage
