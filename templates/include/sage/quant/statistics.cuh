// Statistics over the sequence, per head and channel: the sums of K and V, for their means, and the largest and the
// smallest value of V, for its scale.
// In the first launch a block reduces one chunk of keys of one head of K or V, in the second it merges the chunks:
// otherwise each block of the quantizer would, and read nearly as many bytes of statistics as of V's rows. Every sum
// has one fixed order, so that runs are equal bit for bit: a thread adds its rows in ascending order, then the threads
// of a channel are added in ascending order of their first row, then the chunks in ascending order. Values that are
// not finite count as zero: they must spoil the rows that see them, not the mean and the scale that all rows share. A
// thread takes all for finite, and where its sums say otherwise goes over its rows again.
// Source: SageAttention2, section 3.1 (smoothing K), 3.3 (V per channel), 3.4 (smoothing V).
#pragma once

#include "sage/quant/arithmetic.cuh"
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
};

// Config: kHeadDim, kThreads.
template <class Config>
struct Statistics {
  static constexpr i32 kVectors = Config::kHeadDim / kVector;  // threads side by side on a row
  static constexpr i32 kRows = Config::kThreads / kVectors;    // rows a block reads at once
  static constexpr i32 kUnroll = 4;                            // loads in flight a thread

  // The totals of each thread, each statistic apart; of K only the sums. Channel 8v + i stands at i · kVectors + v,
  // where the lanes of a row write neighbouring words; the rows of a warp lie in different banks.
  static constexpr i32 kPitch = Config::kHeadDim + kVectors;

  // What the host needs to launch the kernel and to emulate it. A chunk's statistics take chunk_bytes, K's or V's.
  static constexpr auto facts() {
    return sage::facts(Fact{"threads", Config::kThreads}, Fact{"shared_bytes", 0}, Fact{"rows_at_once", kRows},
                       Fact{"chunk_bytes", kStatistics * Config::kHeadDim * 4});
  }

  struct Parts {
    float sum[kRows][kPitch];
    float largest[kRows][kPitch];
    float smallest[kRows][kPitch];
    i32 finite[kRows][kPitch];
  };

  const StatsParams& params;
  Parts& parts;  // shared

  __device__ __forceinline__ void run() const {
    if (params.merge) merge();
    else reduce();
  }

  // The first launch. blockIdx.x: chunk fastest, then K before V (V alone where K is not smoothed), then the head.
  __device__ __forceinline__ void reduce() const {
    const i32 chunk = blockIdx.x % params.num_chunks;
    const i32 tensors = params.smooth_k ? 2 : 1;
    const i32 tensor = blockIdx.x / params.num_chunks % tensors;
    const i32 head = blockIdx.x / params.num_chunks / tensors;
    const bool is_v = tensor == 1 || !params.smooth_k;
    float* out = (is_v ? params.v_stats : params.k_stats) +
                 (static_cast<i64>(head) * params.num_chunks + chunk) * kStatistics * Config::kHeadDim;
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
    const i32 vector = threadIdx.x % kVectors;
    const i32 lane_row = threadIdx.x / kVectors;
    const i32 first = chunk * params.chunk_rows;
    const i32 end = min(first + params.chunk_rows, params.seqlen_kv);

    Totals total[kVector];
    add_rows<kIsV, false>(source, vector * kVector, first + lane_row, end, total);
    bool all_finite = true;
#pragma unroll
    for (i32 i = 0; i < kVector; ++i) all_finite &= fabsf(total[i].sum) < ptx::infinity();
    if (!all_finite) add_rows<kIsV, true>(source, vector * kVector, first + lane_row, end, total);
#pragma unroll
    for (i32 i = 0; i < kVector; ++i) {
      parts.sum[lane_row][i * kVectors + vector] = total[i].sum;
      if constexpr (kIsV) {
        parts.largest[lane_row][i * kVectors + vector] = total[i].largest;
        parts.smallest[lane_row][i * kVectors + vector] = total[i].smallest;
        parts.finite[lane_row][i * kVectors + vector] = total[i].finite;
      }
    }
    __syncthreads();
    for (i32 place = threadIdx.x; place < Config::kHeadDim; place += Config::kThreads) {
      const i32 c = place % kVectors * kVector + place / kVectors;
      out[c] = fold(parts.sum, place, [](float a, float b) { return a + b; });
      if constexpr (kIsV) {
        out[Config::kHeadDim + c] = fold(parts.largest, place, [](float a, float b) { return fmaxf(a, b); });
        out[2 * Config::kHeadDim + c] = fold(parts.smallest, place, [](float a, float b) { return fminf(a, b); });
        const i32 finite = fold(parts.finite, place, [](i32 a, i32 b) { return min(a, b); });
        out[3 * Config::kHeadDim + c] = __int_as_float(finite);
      }
    }
  }

  // What the threads of a channel have, in ascending order of their first row.
  template <class T, class Combine>
  __device__ __forceinline__ static T fold(const T (&part)[kRows][kPitch], i32 place, Combine combine) {
    T folded = part[0][place];
#pragma unroll
    for (i32 r = 1; r < kRows; ++r) folded = combine(folded, part[r][place]);
    return folded;
  }

  // The second launch. blockIdx.x: K before V, then the head.
  __device__ __forceinline__ void merge() const {
    const bool is_v = blockIdx.x % 2 == 1;
    const i32 head = blockIdx.x / 2;
    for (i32 c = threadIdx.x; c < Config::kHeadDim; c += Config::kThreads) {
      const i64 channel = static_cast<i64>(head) * Config::kHeadDim + c;
      if (is_v) merge_v(head, c, channel);
      else params.k_mean[channel] = params.smooth_k ? mean_over_keys(params.k_stats, head, c) : 0.0f;
    }
    if (is_v && threadIdx.x == 0) params.k_finite[head] = kAllFinite;
    if (blockIdx.x == 0 && threadIdx.x == 0) *params.taken = 0;
  }

  __device__ __forceinline__ void merge_v(i32 head, i32 c, i64 channel) const {
    float mean = params.smooth_v ? mean_over_keys(params.v_stats, head, c) : 0.0f;
    float largest = -ptx::infinity(), smallest = ptx::infinity();
    i32 finite = kAllFinite;
#pragma unroll 8
    for (i32 chunk = 0; chunk < params.num_chunks; ++chunk) {
      largest = fmaxf(largest, statistic(params.v_stats, head, chunk, 1, c));
      smallest = fminf(smallest, statistic(params.v_stats, head, chunk, 2, c));
      finite = min(finite, __float_as_int(statistic(params.v_stats, head, chunk, 3, c)));
    }
    if (!(fmaxf(largest - mean, mean - smallest) < ptx::infinity())) mean = 0.0f;  // as in mean_over_keys(): a choice
    params.v_mean[channel] = mean;
    params.v_amax[channel] = fmaxf(largest - mean, mean - smallest);
    params.v_finite[channel] = finite;
  }

  // Zero where the sum is beyond f32: what is subtracted is a choice, as long as it is known.
  __device__ __forceinline__ float mean_over_keys(const float* stats, i32 head, i32 c) const {
    float sum = 0.0f;
#pragma unroll 16
    for (i32 chunk = 0; chunk < params.num_chunks; ++chunk) sum += statistic(stats, head, chunk, 0, c);
    return finite_or_zero(divide(sum, static_cast<float>(params.seqlen_kv)));
  }

  // Statistic `which` of a channel in one chunk: 0 the sum, 1 the largest, 2 the smallest, 3 the first key not finite.
  __device__ __forceinline__ float statistic(const float* stats, i32 head, i32 chunk, i32 which, i32 c) const {
    return stats[((static_cast<i64>(head) * params.num_chunks + chunk) * kStatistics + which) * Config::kHeadDim + c];
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
