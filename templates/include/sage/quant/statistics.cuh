// Statistics over the sequence, per head and channel: the sums of K and V, for their means, and the largest and the
// smallest value, for the scale of V.
// A block reduces one chunk of keys of one head of K or V. Every sum has one fixed order, so that runs are equal bit for
// bit: a thread adds its rows in ascending order, then the threads of a channel are added in ascending order of their
// first row; quantize.cuh adds the chunks in ascending order. Values that are not finite count as zero: they must spoil
// the rows that see them, not the mean that all rows share.
// Source: SageAttention2, section 3.1 (smoothing K), 3.3 (V per channel), 3.4 (smoothing V).
#pragma once

#include "sage/quant/source.cuh"

namespace sage {

// Sum, largest and smallest of the values of one channel.
struct Totals {
  float sum, largest, smallest;

  __device__ __forceinline__ void add(float x) {
    sum += finite_or_zero(x);
    largest = fmaxf(largest, x);
    smallest = fminf(smallest, x);
  }

  __device__ __forceinline__ void merge(const Totals& other) {
    sum += other.sum;
    largest = fmaxf(largest, other.largest);
    smallest = fminf(smallest, other.smallest);
  }
};

// Config: kHeadDim, kThreads.
template <class Config>
struct Statistics {
  static constexpr i32 kVectors = Config::kHeadDim / kVector;  // threads side by side on a row
  static constexpr i32 kRows = Config::kThreads / kVectors;    // rows a block reads at once
  static constexpr i32 kUnroll = 4;                            // loads in flight a thread

  using Parts = Totals[kRows][Config::kHeadDim];

  const StatsParams& params;
  Parts& parts;  // shared: the totals of each thread and channel

  // blockIdx.x: chunk fastest, then K before V (V alone where K is not smoothed), then the head.
  __device__ __forceinline__ void run() const {
    const i32 chunk = blockIdx.x % params.num_chunks;
    const i32 tensors = params.smooth_k ? 2 : 1;
    const i32 tensor = blockIdx.x / params.num_chunks % tensors;
    const i32 head = blockIdx.x / params.num_chunks / tensors;
    const bool is_v = tensor == 1 || !params.smooth_k;
    float* out = (is_v ? params.v_stats : params.k_stats) +
                 (static_cast<i64>(head) * params.num_chunks + chunk) * kStatistics * Config::kHeadDim;
    if (params.aligned) reduce_chunk<true>(is_v ? params.v : params.k, head, chunk, out);
    else reduce_chunk<false>(is_v ? params.v : params.k, head, chunk, out);
  }

  template <bool kAligned>
  __device__ __forceinline__ void reduce_chunk(const Tensor& tensor, i32 head, i32 chunk, float* out) const {
    const Source<kAligned> source(tensor, head / params.num_kv_heads, head % params.num_kv_heads, params.seqlen_kv,
                                  params.headdim, params.dtype);
    const i32 channel = threadIdx.x % kVectors * kVector;
    const i32 lane_row = threadIdx.x / kVectors;
    const i32 first = chunk * params.chunk_rows;
    const i32 end = min(first + params.chunk_rows, params.seqlen_kv);

    Totals total[kVector];
#pragma unroll
    for (i32 i = 0; i < kVector; ++i) total[i] = {0.0f, -ptx::infinity(), ptx::infinity()};
    for (i32 row = first + lane_row; row < end; row += kUnroll * kRows) {
      Raw raw[kUnroll];
#pragma unroll
      for (i32 u = 0; u < kUnroll; ++u) raw[u] = row + u * kRows < end ? source.load(row + u * kRows, channel) : Raw{};
#pragma unroll
      for (i32 u = 0; u < kUnroll; ++u) {
        if (row + u * kRows >= end) break;
        float x[kVector];
        source.convert(raw[u], x);
#pragma unroll
        for (i32 i = 0; i < kVector; ++i) total[i].add(x[i]);
      }
    }
#pragma unroll
    for (i32 i = 0; i < kVector; ++i) parts[lane_row][channel + i] = total[i];
    __syncthreads();
    for (i32 c = threadIdx.x; c < Config::kHeadDim; c += Config::kThreads) {
      Totals merged = parts[0][c];
      for (i32 r = 1; r < kRows; ++r) merged.merge(parts[r][c]);
      out[c] = merged.sum;
      out[Config::kHeadDim + c] = merged.largest;
      out[2 * Config::kHeadDim + c] = merged.smallest;
    }
  }
};

}  // namespace sage
