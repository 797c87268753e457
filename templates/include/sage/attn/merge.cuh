// The attention of a call whose keys are split: O = Σ w · O_s / Σ w over the splits s, where O_s is what a block made
// of the keys of its split, and w = exp(lse_s), relative to the largest of the row. Splits are added in order, so that
// equal calls give equal bits. NaN of a split stays NaN, whatever its weight.
// Source: "Flash-Decoding for long-context inference".
#pragma once

#include "sage/constants.cuh"
#include "sage/numerics/arithmetic.cuh"
#include "sage/params.cuh"
#include "sage/problem/seqlen.cuh"
#include "sage/ptx/global.cuh"
#include "sage/ptx/grid_dependency.cuh"
#include "sage/ptx/math.cuh"
#include "sage/ptx/special.cuh"
#include "sage/ptx/warp.cuh"

namespace sage {

// Config: kThreads, kProgrammatic. A warp takes a row.
template <class Config>
struct MergeSplits {
  static constexpr i32 kRows = Config::kThreads / kWarpSize;  // of a block
  static constexpr i32 kChannels = 4;                         // of a lane at a time
  static constexpr i32 kMostSplits = 64, kOwnSplits = kMostSplits / kWarpSize;

  // Figures for the host: to launch the kernel.
  static constexpr auto facts() {
    return sage::facts(Fact{"threads", Config::kThreads}, Fact{"shared_bytes", 0}, Fact{"rows", kRows},
                       Fact{"most_splits", kMostSplits}, Fact{"programmatic_launch", Config::kProgrammatic});
  }

  const MergeParams& params;

  // blockIdx.x: rows of a head fastest, then query heads.
  __device__ __forceinline__ void run() const {
    if constexpr (Config::kProgrammatic) ptx::grid_dependency_wait();  // the attention kernel's end
    const i32 index = ptx::block_index();
    const i32 block = index % params.row_blocks, head_of_all = index / params.row_blocks;
    i32 batch = head_of_all / params.num_q_heads, head = head_of_all % params.num_q_heads;
    i32 first_block = 0;  // of the batch entry
    if (params.cu_seqlens_q != nullptr) {
      batch = sequence_of_slot(params.cu_seqlens_q, params.batch, kRows, block);
      head = head_of_all;
      first_block = first_slot(params.cu_seqlens_q, batch, kRows);
    }
    const auto seqlen = seqlen_of(params, batch);
    const i32 row = (block - first_block) * kRows + ptx::thread_index() / kWarpSize;
    if (row >= seqlen.q()) return;
    const i32 row_of_head = seqlen.q_begin() + row;
    const Strides& stride = params.out.stride;
    merge(static_cast<i64>(head_of_all) * params.q_rows + row_of_head,
          batch * stride.batch + head * stride.head + row_of_head * stride.row);
  }

 private:
  // row: index of the row in a split. out: index of its first channel in the output.
  __device__ __forceinline__ void merge(i64 row, i64 out) const {
    const i32 lane = ptx::thread_index() % kWarpSize;
    float weight[kOwnSplits];
    const float lse = weights_of(row, lane, weight);
    if (params.lse != nullptr && lane == 0) params.lse[row] = lse;
#pragma unroll 1
    for (i32 first = 0; first < params.headdim; first += kChannels * kWarpSize) {
      const i32 channel = first + kChannels * lane, channels = min(kChannels, params.headdim - channel);
      const float* from = params.partial_out + row * params.partial_headdim + channel;
      float value[kChannels] = {};
#pragma unroll 8
      for (i32 s = 0; s < params.splits; ++s) {
        const ptx::U32x4 part = ptx::load_global_u32x4(from, channels > 0);
        add(weight_of(weight, s), part, value);
        from += static_cast<i64>(params.split_rows) * params.partial_headdim;
      }
      store(out + channel, channels, value);
    }
  }

  // The weights of the splits lane, lane + 32, ..., divided by the sum of all; returns the log-sum-exp. Of a row that
  // sees no key all weights are zero.
  __device__ __forceinline__ float weights_of(i64 row, i32 lane, float (&weight)[kOwnSplits]) const {
    float largest = -ptx::infinity();
#pragma unroll
    for (i32 i = 0; i < kOwnSplits; ++i) {
      const i32 split = lane + i * kWarpSize;
      weight[i] = -ptx::infinity();
      if (split < params.splits) weight[i] = params.partial_lse[split * static_cast<i64>(params.split_rows) + row];
      largest = fmaxf(largest, weight[i]);
    }
    largest = ptx::max_over_lanes<kWarpSize>(largest);
    if (largest == -ptx::infinity()) largest = 0.0f;
    float sum = 0.0f;
#pragma unroll
    for (i32 i = 0; i < kOwnSplits; ++i) {
      weight[i] = ptx::ex2((weight[i] - largest) * kLog2E);
      sum += weight[i];
    }
    sum = ptx::sum_over_lanes<kWarpSize>(sum);
    const float factor = sum == 0.0f ? 0.0f : 1.0f / sum;
#pragma unroll
    for (i32 i = 0; i < kOwnSplits; ++i) weight[i] *= factor;
    return largest + ptx::lg2(sum) * kLn2;
  }

  __device__ __forceinline__ static float weight_of(const float (&weight)[kOwnSplits], i32 split) {
    static_assert(kOwnSplits == 2);
    const float of_lanes = split < kWarpSize ? weight[0] : weight[1];
    return __int_as_float(ptx::shuffle(__float_as_int(of_lanes), split % kWarpSize));
  }

  __device__ __forceinline__ static void add(float weight, const ptx::U32x4& part, float (&value)[kChannels]) {
    const u32 words[kChannels] = {part.x, part.y, part.z, part.w};
#pragma unroll
    for (i32 c = 0; c < kChannels; ++c) value[c] = fmaf(weight, __uint_as_float(words[c]), value[c]);
  }

  // at: index of the first of `channels` channels of the output.
  __device__ __forceinline__ void store(i64 at, i32 channels, const float (&value)[kChannels]) const {
#pragma unroll
    for (i32 c = 0; c < kChannels; ++c) {
      if (c >= channels) continue;
      if (params.dtype == Dtype::kF32) static_cast<float*>(params.out.data)[at + c] = within_f32(value[c]);
      else static_cast<u16*>(params.out.data)[at + c] = rounded(value[c]);
    }
  }

  __device__ __forceinline__ u16 rounded(float value) const {
    return static_cast<u16>(params.dtype == Dtype::kBf16 ? ptx::finite_bf16x2(value, 0.0f)
                                                         : ptx::finite_f16x2(value, 0.0f));
  }
};

}  // namespace sage
