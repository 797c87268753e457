// Statistics over the sequence, per head and channel: the sums of K and V, for their means, and the largest and the
// smallest value of V, for its scale.
// A block reduces one chunk of keys of one head of K or V. Every sum has one fixed order, so that runs are equal bit for
// bit: a thread adds its rows in ascending order, then the threads of a channel are added in ascending order of their
// first row; quantize.cuh adds the chunks in ascending order. Values that are not finite count as zero: they must spoil
// the rows that see them, not the mean and the scale that all rows share. A thread takes all for finite, and where its
// sums say otherwise goes over its rows again.
// Source: SageAttention2, section 3.1 (smoothing K), 3.3 (V per channel), 3.4 (smoothing V).
#pragma once

#include "sage/quant/source.cuh"

namespace sage {

// What params.cuh says of one channel.
struct Totals {
  float sum, largest, smallest;
  i32 finite;

  __device__ __forceinline__ void clear() {
    sum = 0.0f;
    largest = -ptx::infinity();
    smallest = ptx::infinity();
    finite = kAllFinite;
  }

  template <bool kExtrema>
  __device__ __forceinline__ void add(float x) {
    sum += x;
    if constexpr (kExtrema) {
      largest = fmaxf(largest, x);
      smallest = fminf(smallest, x);
    }
  }

  __device__ __forceinline__ void merge(const Totals& other) {
    sum += other.sum;
    largest = fmaxf(largest, other.largest);
    smallest = fminf(smallest, other.smallest);
    finite = min(finite, other.finite);
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
    if (is_v && chunk == 0 && threadIdx.x == 0) params.k_finite[head] = kAllFinite;
    if (blockIdx.x == 0 && threadIdx.x == 0) *params.taken = 0;
    if (params.aligned) reduce<true>(is_v, head, chunk, out);
    else reduce<false>(is_v, head, chunk, out);
  }

  template <bool kAligned>
  __device__ __forceinline__ void reduce(bool is_v, i32 head, i32 chunk, float* out) const {
    if (is_v) reduce_chunk<kAligned, true>(params.v, head, chunk, out);
    else reduce_chunk<kAligned, false>(params.k, head, chunk, out);
  }

  template <bool kAligned, bool kIsV>
  __device__ __forceinline__ void reduce_chunk(const Tensor& tensor, i32 head, i32 chunk, float* out) const {
    const Source<kAligned> source(tensor, head / params.num_kv_heads, head % params.num_kv_heads, params.seqlen_kv,
                                  params.headdim, params.dtype);
    const i32 channel = threadIdx.x % kVectors * kVector;
    const i32 lane_row = threadIdx.x / kVectors;
    const i32 first = chunk * params.chunk_rows;
    const i32 end = min(first + params.chunk_rows, params.seqlen_kv);

    Totals total[kVector];
    add_rows<kIsV, false>(source, channel, first + lane_row, end, total);
    bool finite = true;
#pragma unroll
    for (i32 i = 0; i < kVector; ++i) finite &= fabsf(total[i].sum) < ptx::infinity();
    if (!finite) add_rows<kIsV, true>(source, channel, first + lane_row, end, total);
#pragma unroll
    for (i32 i = 0; i < kVector; ++i) parts[lane_row][channel + i] = total[i];
    __syncthreads();
    for (i32 c = threadIdx.x; c < Config::kHeadDim; c += Config::kThreads) {
      Totals merged = parts[0][c];
      for (i32 r = 1; r < kRows; ++r) merged.merge(parts[r][c]);
      out[c] = merged.sum;
      if constexpr (kIsV) {
        out[Config::kHeadDim + c] = merged.largest;
        out[2 * Config::kHeadDim + c] = merged.smallest;
        out[3 * Config::kHeadDim + c] = __int_as_float(merged.finite);
      }
    }
  }

  // This thread's rows, from `first` on, kRows apart. kChecked: leaves out what is not finite, and notes the first.
  template <bool kExtrema, bool kChecked, class Source>
  __device__ __forceinline__ static void add_rows(const Source& source, i32 channel, i32 first, i32 end,
                                                  Totals (&total)[kVector]) {
#pragma unroll
    for (i32 i = 0; i < kVector; ++i) total[i].clear();
    for (i32 row = first; row < end; row += kUnroll * kRows) {
      Raw raw[kUnroll];
#pragma unroll
      for (i32 u = 0; u < kUnroll; ++u) raw[u] = row + u * kRows < end ? source.load(row + u * kRows, channel) : Raw{};
#pragma unroll
      for (i32 u = 0; u < kUnroll; ++u) {
        if (row + u * kRows >= end) break;
        float x[kVector];
        source.convert(raw[u], x);
#pragma unroll
        for (i32 i = 0; i < kVector; ++i) {
          if (!kChecked || fabsf(x[i]) < ptx::infinity()) total[i].template add<kExtrema>(x[i]);
          else total[i].finite = min(total[i].finite, row + u * kRows);
        }
      }
    }
  }
};

}  // namespace sage
