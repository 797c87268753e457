// The end of a query tile: O / row_sum · v_scale, plus the mean that smoothing took off V, in the caller's dtype; and the
// log-sum-exp.
#pragma once

#include "sage/attn/softmax.cuh"
#include "sage/attn/work.cuh"

namespace sage {

constexpr float kLn2 = 0.693147180559945f;

// Two neighbouring channels of one row; `row` may lie on any multiple of 2 bytes.
__device__ __forceinline__ void store_pair(u16* row, i32 channel, i32 headdim, u32 pair) {
  u16* to = row + channel;
  if (channel + 1 < headdim && reinterpret_cast<u64>(to) % 4 == 0) {
    *reinterpret_cast<u32*>(to) = pair;
  } else {
    if (channel < headdim) to[0] = static_cast<u16>(pair);
    if (channel + 1 < headdim) to[1] = static_cast<u16>(pair >> 16);
  }
}

// row_sum holds whole rows. A row that saw no key is zero, its log-sum-exp -inf.
template <class Config, class Product, class Accumulator>
__device__ __forceinline__ void store_output(const AttnParams& params, const Work& work, i32 warp, i32 lane,
                                             const Accumulator& acc_o,
                                             const OnlineSoftmax<Config, Product>& softmax) {
  constexpr i32 kRows = Config::kWarpM / 8, kOTiles = Config::kHeadDim / 8;
  const i32 first = warp * Config::kWarpM + lane / 4;
  const float* row_bias = params.row_bias + (static_cast<i64>(work.q_head) * params.q_tiles + work.q_tile) * Config::kBlockM;
  const float* v_scale = params.v_scale + static_cast<i64>(work.kv_head) * Config::kHeadDim;
  const float* v_mean = params.v_mean + static_cast<i64>(work.kv_head) * Config::kHeadDim;
  const i32* v_finite = params.v_finite + static_cast<i64>(work.kv_head) * Config::kHeadDim;
  const i32 k_finite = params.k_finite[work.kv_head];
  const Strides& stride = params.out.stride;
  u16* out = static_cast<u16*>(params.out.data) + work.batch * stride.batch + work.head * stride.head;

  // A query that is not finite, as row_bias tells, turns its row into NaN, and so does a key in sight; one that sees no key
  // has nothing to spoil.
  float factor[kRows];
  i32 keys[kRows];  // that the row sees
#pragma unroll
  for (i32 r = 0; r < kRows; ++r) {
    const i32 row = work.first_row + first + 8 * r;
    keys[r] = Work::key_limit<Config::kCausal>(params, row);
    const float sum = softmax.row_sum[r];
    float bias = row_bias[first + 8 * r];
    if (keys[r] > k_finite || !(fabsf(bias) < ptx::infinity())) bias = ptx::quiet_nan();
    if (keys[r] == 0) bias = 0.0f;
    factor[r] = (sum > 0.0f ? 1.0f / sum : 0.0f) + 0.0f * bias;
    if (params.lse != nullptr && lane % 4 == 0 && row < params.seqlen_q) {
      const float lse_log2 = softmax.row_ref[r] + ptx::lg2(sum) + bias;
      params.lse[static_cast<i64>(work.q_head) * params.seqlen_q + row] = lse_log2 * kLn2;
    }
  }
#pragma unroll
  for (i32 n = 0; n < kOTiles; ++n) {
    const i32 channel = 8 * n + 2 * (lane % 4);
    const float scale[2] = {v_scale[channel], v_scale[channel + 1]};
    const i32 finite[2] = {v_finite[channel], v_finite[channel + 1]};
    float mean[2] = {};
    if constexpr (Config::kSmoothV) mean[0] = v_mean[channel], mean[1] = v_mean[channel + 1];
#pragma unroll
    for (i32 r = 0; r < kRows; ++r) {
      const i32 row = work.first_row + first + 8 * r;
      if (row >= params.seqlen_q) continue;
      const float unless_empty = softmax.row_sum[r] > 0.0f ? 1.0f : 0.0f;  // P sums to one where the row saw a key
      float value[2];
#pragma unroll
      for (i32 e = 0; e < 2; ++e) {
        value[e] = acc_o[r / 2][n][2 * (r % 2) + e] * factor[r] * scale[e] + mean[e] * unless_empty;
        if (keys[r] > finite[e]) value[e] = ptx::quiet_nan();
      }
      const u32 pair = params.dtype == Dtype::kBf16 ? ptx::bf16x2(value[0], value[1]) : ptx::f16x2(value[0], value[1]);
      store_pair(out + row * stride.row, channel, params.headdim, pair);
    }
  }
}

}  // namespace sage
