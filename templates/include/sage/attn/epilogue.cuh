// The end of a query tile: O / row_sum · v_scale, plus the mean that smoothing took off V, in the caller's dtype; and
// the log-sum-exp.
#pragma once

#include "sage/constants.cuh"
#include "sage/numerics/arithmetic.cuh"
#include "sage/problem/work_tile.cuh"
#include "sage/ptx/global.cuh"
#include "sage/ptx/ldmatrix.cuh"
#include "sage/ptx/math.cuh"
#include "sage/ptx/shared.cuh"

namespace sage {

// The constants that store_output() needs of a query tile, read from global memory; channels in pairs of neighbours.
template <class Config>
struct ConstantsInMemory {
  const AttnParams& params;
  i64 channels, rows;  // of the KV head and of the query tile: their first

  __device__ __forceinline__ ConstantsInMemory(const AttnParams& params_, const WorkTile& work)
      : params(params_),
        channels(channel_index<Config>(work.kv_head)),
        rows(q_tile_index(work.q_head, params_.q_tiles, work.q_tile) * Config::kBlockM) {}

  __device__ __forceinline__ float row_bias(i32 row) const { return params.row_bias[rows + row]; }
  __device__ __forceinline__ ptx::F32x2 v_scale(i32 channel) const { return pair(params.v_scale, channel); }
  __device__ __forceinline__ ptx::F32x2 v_mean(i32 channel) const { return pair(params.v_mean, channel); }

 private:
  __device__ __forceinline__ ptx::F32x2 pair(const float* of_channels, i32 channel) const {
    return {of_channels[channels + channel], of_channels[channels + channel + 1]};
  }
};

// Channels that are finished and stored at once: the registers of a thread bound them.
template <class Config>
constexpr i32 kStoredChannels = Config::kHeadDim <= 128 ? Config::kHeadDim : 64;

// Two neighbouring channels a word, in f16 or bf16: of kStoredChannels of the rows first_row, first_row + 8, ... of a
// warp, as a lane has them in an accumulator.
template <class Config>
using RoundedOutput = u32[Config::kWarpM / 8][kStoredChannels<Config> / 8];

// Stores fragments directly to the caller's rows: a lane has two of every eight channels.
template <class Config>
struct StoreFragments {
  static constexpr i32 kTiles = kStoredChannels<Config> / 8;

  __device__ __forceinline__ void operator()(const AttnParams& params, const WorkTile& work, i32 first_row, i32 lane,
                                             i32 first_channel, const RoundedOutput<Config>& pairs) const {
#pragma unroll
    for (i32 r = 0; r < Config::kWarpM / 8; ++r) {
      const i32 row = first_row + lane / 4 + 8 * r;
      if (row >= work.lengths.q) continue;
      store_row(work.template output_row<u16>(params, row) + first_channel, lane, params.headdim - first_channel,
                pairs[r]);
    }
  }

 private:
  // `row`: the first channel of pairs[0], on any multiple of 2 bytes. headdim: channels of the row from there on.
  __device__ __forceinline__ static void store_row(u16* row, i32 lane, i32 headdim, const u32 (&pairs)[kTiles]) {
    u16* to = row + 2 * (lane % 4);
    if (headdim >= kStoredChannels<Config> && reinterpret_cast<u64>(row) % 4 == 0) {
#pragma unroll
      for (i32 n = 0; n < kTiles; ++n) *reinterpret_cast<u32*>(to + 8 * n) = pairs[n];
      return;
    }
#pragma unroll
    for (i32 n = 0; n < kTiles; ++n) {
      const i32 channel = 8 * n + 2 * (lane % 4);
      if (channel < headdim) to[8 * n] = static_cast<u16>(pairs[n]);
      if (channel + 1 < headdim) to[8 * n + 1] = static_cast<u16>(pairs[n] >> 16);
    }
  }
};

// Stores through shared memory of the warp's own. A lane then stores 16 bytes, a warp kStoredChannels of whole rows:
// a quarter of the stores, each of full sectors.
template <class Config>
struct StoreWholeRows {
  static_assert(Config::kWarpM == 16);
  static constexpr i32 kTiles = kStoredChannels<Config> / 8;
  static constexpr i32 kPitch = kTiles * 16 + 16;  // bytes; a channel of eight rows lies in different banks
  static constexpr i32 kBytes = Config::kWarpM * kPitch;

  u8* staged;  // [kWarpM][kPitch]

  __device__ __forceinline__ void operator()(const AttnParams& params, const WorkTile& work, i32 first_row, i32 lane,
                                             i32 first_channel, const RoundedOutput<Config>& pairs) const {
    const u32 fragments = ptx::shared_address(staged) + lane % 8 * kPitch + lane / 8 * 16;
    __syncwarp();  // what was staged before has been read
#pragma unroll
    for (i32 r = 0; r < 2; ++r) {
#pragma unroll
      for (i32 n = 0; n < kTiles; n += 4) {
        ptx::stmatrix_x4(fragments + 8 * r * kPitch + n * 16, reinterpret_cast<const u32 (&)[4]>(pairs[r][n]));
      }
    }
    __syncwarp();
    const i32 own = lane / kTiles, own_channel = lane % kTiles * 8, channel = first_channel + own_channel;
    // Rows that are there, from this lane's first on.
    const i32 rows = work.lengths.q - (first_row + own);
    u16* to = work.template output_row<u16>(params, first_row + own) + channel;
    const u8* from = staged + own * kPitch + own_channel * sizeof(u16);
    const u64 first = reinterpret_cast<u64>(work.template output_row<u16>(params, 0));
    const u64 alignment = first | params.out.stride.row * sizeof(u16);
    if (params.headdim % 8 == 0 && alignment % 16 == 0) {
      copy_chunks(to, params.out.stride.row, from, channel < params.headdim ? rows : 0);
    } else {
      copy_elements(to, params.out.stride.row, from, rows, min(8, params.headdim - channel));
    }
  }

 private:
  static constexpr i32 kRowsAtOnce = kWarpSize / kTiles;

  __device__ __forceinline__ static void copy_chunks(u16* to, i64 stride, const u8* from, i32 rows) {
    const u32 chunks = ptx::shared_address(from);
    ptx::U32x4 chunk[Config::kWarpM / kRowsAtOnce];
#pragma unroll
    for (i32 i = 0; i < Config::kWarpM; i += kRowsAtOnce) {
      chunk[i / kRowsAtOnce] = ptx::load_shared_u32x4(chunks + i * kPitch);
    }
#pragma unroll
    for (i32 i = 0; i < Config::kWarpM; i += kRowsAtOnce, to += kRowsAtOnce * stride) {
      if (i < rows) ptx::store_global_u32x4(to, chunk[i / kRowsAtOnce]);
    }
  }

  // Rows that start anywhere, or end in the middle of a chunk.
  __device__ __forceinline__ static void copy_elements(u16* to, i64 stride, const u8* from, i32 rows, i32 channels) {
#pragma unroll 1
    for (i32 i = 0; i < min(Config::kWarpM, rows); i += kRowsAtOnce, to += kRowsAtOnce * stride) {
#pragma unroll 1
      for (i32 c = 0; c < channels; ++c) to[c] = reinterpret_cast<const u16*>(from + i * kPitch)[c];
    }
  }
};

// Stores the channels from 8 · first_tile on, kStoredChannels of them, as f32. A lane has two of every eight; four
// lanes side by side store a whole sector.
template <class Config, class Accumulator>
__device__ __forceinline__ void store_floats(const AttnParams& params, const WorkTile& work, i32 first_row, i32 lane,
                                             const Accumulator& acc_o, i32 first_tile) {
#pragma unroll
  for (i32 r = 0; r < Config::kWarpM / 8; ++r) {
    const i32 row = first_row + lane / 4 + 8 * r;
    if (row >= work.lengths.q) continue;
    float* to = work.template output_row<float>(params, row);
    const bool pairs = reinterpret_cast<u64>(to) % 8 == 0;
#pragma unroll
    for (i32 n = first_tile; n < first_tile + kStoredChannels<Config> / 8; ++n) {
      const i32 channel = 8 * n + 2 * (lane % 4);
      const float* own = &acc_o[r / 2][n][2 * (r % 2)];
      const float value[2] = {within_f32(own[0]), within_f32(own[1])};
      if (pairs && channel + 1 < params.headdim) {
        ptx::store_global_f32x2(to + channel, {value[0], value[1]});
        continue;
      }
      if (channel < params.headdim) to[channel] = value[0];
      if (channel + 1 < params.headdim) to[channel + 1] = value[1];
    }
  }
}

template <Dtype kDtype, class Config, class Accumulator>
__device__ __forceinline__ void round_output(const Accumulator& acc_o, i32 first_tile, RoundedOutput<Config>& pairs) {
#pragma unroll
  for (i32 r = 0; r < Config::kWarpM / 8; ++r) {
#pragma unroll
    for (i32 n = 0; n < kStoredChannels<Config> / 8; ++n) {
      const float* value = &acc_o[r / 2][first_tile + n][2 * (r % 2)];
      if constexpr (kDtype == Dtype::kBf16) pairs[r][n] = ptx::finite_bf16x2(value[0], value[1]);
      else pairs[r][n] = ptx::finite_f16x2(value[0], value[1]);
    }
  }
}

// log2(2^a + 2^b).
__device__ __forceinline__ float add_log2(float a, float b) {
  const float larger = a > b ? a : b, smaller = a > b ? b : a;
  return larger == -ptx::infinity() ? a + b : larger + ptx::lg2(1.0f + ptx::ex2(smaller - larger));
}

// The sink of the head, in log2 units; -inf where there is none. Of split keys the first split has it: it counts once.
__device__ __forceinline__ float sink_of(const AttnParams& params, const WorkTile& work) {
  if (params.sinks.data == nullptr || work.q_begin >= params.split_rows) return -ptx::infinity();
  return static_cast<const float*>(params.sinks.data)[work.head * params.sinks.stride.head] * kLog2E;
}

// Finishes acc_o in place and stores it. o_factor: the unit in which acc_o counts. references.row_sum and lse_sum, the
// sums of P for the log-sum-exp, are of whole rows. A row that saw no key is zero, its log-sum-exp -inf, or the sink
// where its head has one. What finite values make is finite: outputs are clamped to the range of their dtype. The
// log-sum-exp takes the sum of the rounded P where lse_sum is infinite: P overflowed, or nobody added it up.
template <class Config, class References, class Accumulator, class Constants, class Store>
__device__ __forceinline__ void store_output(const AttnParams& params, const WorkTile& work, i32 warp, i32 lane,
                                             Accumulator& acc_o, float o_factor, const References& references,
                                             const float (&lse_sum)[Config::kWarpM / 8], const Constants& constants,
                                             const Store& store) {
  constexpr i32 kRows = Config::kWarpM / 8, kTiles = kStoredChannels<Config> / 8;
  constexpr float kUnit = References::kSumUnit;
  const i32 first = warp * Config::kWarpM;  // row of the query tile

  VisibleKeys<Config::kMask> keys[kRows];  // of a dense mask
  if constexpr (Config::kMask != Mask::kSparse) {
#pragma unroll
    for (i32 r = 0; r < kRows; ++r) {
      const i32 row = work.first_row + first + lane / 4 + 8 * r;
      keys[r] = visible_keys<Config::kMask>(work.seqlen(params), row);
    }
  }

  // A query that is not finite has a row_bias that is not finite, which makes the row NaN. Rows that see no key stay
  // zero.
  float factor[kRows];  // of O
  float share[kRows];   // of the keys in the softmax: 1, less where there is a sink, 0 where the row saw no key
#pragma unroll
  for (i32 r = 0; r < kRows; ++r) {
    const i32 own = first + lane / 4 + 8 * r, row = work.first_row + own;
    const float sum = references.row_sum[r];
    float bias = constants.row_bias(own);
    if (!(fabsf(bias) < ptx::infinity())) bias = ptx::quiet_nan();
    bool sees_none = !(sum > 0.0f);
    if constexpr (Config::kMask != Mask::kSparse) sees_none = keys[r].empty();
    if (sees_none) bias = 0.0f;
    factor[r] = (sum > 0.0f ? kUnit / sum * o_factor : 0.0f) + 0.0f * bias;
    share[r] = sum > 0.0f ? 1.0f : 0.0f;
    float sink = -ptx::infinity();
    if constexpr (Config::kMask == Mask::kSparse) {
      sink = sink_of(params, work);
      if (sum > 0.0f) {
        const float rise = sink - references.row_ref[r] - bias - ptx::lg2(sum / kUnit);
        share[r] = sink == -ptx::infinity() ? 1.0f : 1.0f / (1.0f + ptx::ex2(rise));
      }
      factor[r] *= share[r];
    }
    if (params.lse != nullptr && lane % 4 == 0 && row < work.lengths.q) {
      const float sum_of_p = lse_sum[r] < ptx::infinity() ? lse_sum[r] : sum / kUnit;
      float lse_log2 = references.row_ref[r] + ptx::lg2(sum_of_p) + bias;
      if constexpr (Config::kMask == Mask::kSparse) lse_log2 = add_log2(lse_log2, sink);
      *work.lse_row(params, row) = lse_log2 * kLn2;
    }
  }

#pragma unroll
  for (i32 first_tile = 0; first_tile < Config::kHeadDim / 8; first_tile += kTiles) {
#pragma unroll
    for (i32 n = first_tile; n < first_tile + kTiles; ++n) {
      const i32 channel = 8 * n + 2 * (lane % 4);
      const ptx::F32x2 scale = constants.v_scale(channel);
      ptx::F32x2 mean = {};
      if constexpr (Config::kSmoothV) mean = constants.v_mean(channel);
#pragma unroll
      for (i32 r = 0; r < kRows; ++r) {
        float* value = &acc_o[r / 2][n][2 * (r % 2)];
        value[0] = value[0] * factor[r] * scale.x + mean.x * share[r];
        value[1] = value[1] * factor[r] * scale.y + mean.y * share[r];
      }
    }
    if (params.dtype == Dtype::kF32) {
      store_floats<Config>(params, work, work.first_row + first, lane, acc_o, first_tile);
      continue;
    }
    RoundedOutput<Config> pairs;
    if (params.dtype == Dtype::kBf16) round_output<Dtype::kBf16, Config>(acc_o, first_tile, pairs);
    else round_output<Dtype::kF16, Config>(acc_o, first_tile, pairs);
    store(params, work, work.first_row + first, lane, 8 * first_tile, pairs);
  }
}

}  // namespace sage
