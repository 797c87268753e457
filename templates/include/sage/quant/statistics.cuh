// Statistics over the sequence, per head and channel: the sum of K, for its mean, and the largest |V|, for its scale.
// A block reduces one chunk of keys of one head of K or V. Every sum has one fixed order, so that runs are equal bit for
// bit: a thread adds its rows in ascending order, then the threads of a channel are added in ascending order of their
// first row; quantize.cuh adds the chunks in ascending order.
// Source: SageAttention2, section 3.1 (smoothing K), 3.3 (V per channel).
#pragma once

#include "sage/quant/source.cuh"

namespace sage {

// Config: kHeadDim, kThreads.
template <class Config>
struct Statistics {
  static constexpr i32 kVectors = Config::kHeadDim / kVector;  // threads side by side on a row
  static constexpr i32 kRows = Config::kThreads / kVectors;    // rows a block reads at once
  static constexpr i32 kUnroll = 4;                            // loads in flight a thread

  using Parts = float[kRows][Config::kHeadDim];

  const StatsParams& params;
  Parts& parts;  // shared: a total per thread and channel

  // blockIdx.x: chunk fastest, then K before V (V alone where K is not smoothed), then the head.
  __device__ __forceinline__ void run() const {
    const i32 chunk = blockIdx.x % params.num_chunks;
    const i32 tensors = params.smooth_k ? 2 : 1;
    const i32 tensor = blockIdx.x / params.num_chunks % tensors;
    const i32 head = blockIdx.x / params.num_chunks / tensors;
    const i64 part = (static_cast<i64>(head) * params.num_chunks + chunk) * Config::kHeadDim;
    if (tensor == 1 || !params.smooth_k) {
      reduce_tensor(params.v, head, chunk, params.v_absmax + part, AbsMax());
    } else {
      reduce_tensor(params.k, head, chunk, params.k_sum + part, Sum());
    }
  }

  struct Sum {
    __device__ float operator()(float total, float x) const { return total + x; }
    __device__ float merge(float total, float other) const { return total + other; }
  };
  struct AbsMax {
    __device__ float operator()(float total, float x) const { return fmaxf(total, fabsf(x)); }
    __device__ float merge(float total, float other) const { return fmaxf(total, other); }
  };

  template <class Reduce>
  __device__ __forceinline__ void reduce_tensor(const Tensor& tensor, i32 head, i32 chunk, float* out,
                                                Reduce reduce) const {
    if (params.aligned) reduce_chunk<true>(tensor, head, chunk, out, reduce);
    else reduce_chunk<false>(tensor, head, chunk, out, reduce);
  }

  template <bool kAligned, class Reduce>
  __device__ __forceinline__ void reduce_chunk(const Tensor& tensor, i32 head, i32 chunk, float* out,
                                               Reduce reduce) const {
    const Source<kAligned> source(tensor, head / params.num_kv_heads, head % params.num_kv_heads, params.seqlen_kv,
                                  params.headdim, params.dtype);
    const i32 channel = threadIdx.x % kVectors * kVector;
    const i32 lane_row = threadIdx.x / kVectors;
    const i32 first = chunk * params.chunk_rows;
    const i32 end = min(first + params.chunk_rows, params.seqlen_kv);

    float total[kVector] = {};
    for (i32 row = first + lane_row; row < end; row += kUnroll * kRows) {
      Raw raw[kUnroll];
#pragma unroll
      for (i32 u = 0; u < kUnroll; ++u) raw[u] = row + u * kRows < end ? source.load(row + u * kRows, channel) : Raw{};
#pragma unroll
      for (i32 u = 0; u < kUnroll; ++u) {
        float x[kVector];
        source.convert(raw[u], x);
#pragma unroll
        for (i32 i = 0; i < kVector; ++i) total[i] = reduce(total[i], x[i]);
      }
    }

#pragma unroll
    for (i32 i = 0; i < kVector; ++i) parts[lane_row][channel + i] = total[i];
    __syncthreads();
    for (i32 c = threadIdx.x; c < Config::kHeadDim; c += Config::kThreads) {
      float merged = parts[0][c];
      for (i32 r = 1; r < kRows; ++r) merged = reduce.merge(merged, parts[r][c]);
      out[c] = merged;
    }
  }
};

}  // namespace sage
