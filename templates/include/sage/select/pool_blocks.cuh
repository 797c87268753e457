// Pooling: the mean of each block of rows, rounded to s8 with a scale per block, and how alike the rows are. A thread
// block pools a block of rows, which it reads once. Every sum has one order: a thread's rows, then the threads of a
// channel, or lanes in halves and then warps.
#pragma once

#include "sage/numerics/integers.cuh"
#include "sage/ptx/special.cuh"
#include "sage/ptx/warp.cuh"
#include "sage/quant/sample.cuh"
#include "sage/select/params.cuh"

namespace sage {

// Config: kHeadDim, kThreads.
template <class Config>
struct PoolBlocks {
  using Layout = SampleLayout<Config>;
  static constexpr i32 kRowsAtOnce = Layout::kRowsAtOnce;
  static constexpr i32 kWarps = Config::kThreads / kWarpSize;
  static constexpr i32 kInFlight = 4;  // rows that a thread loads before it adds the first
  static_assert(Config::kHeadDim <= Config::kThreads, "a thread has a channel of the mean");

  struct alignas(16) Shared {
    typename Layout::Sums sums;  // of the sample, then of the block's rows
    float centre[Config::kHeadDim];
    float of_warps[3][kWarps];
  };

  // Figures for the host: to launch the kernel, and to emulate it.
  static constexpr auto facts() {
    return sage::facts(Fact{"threads", Config::kThreads}, Fact{"shared_bytes", 0}, Fact{"samples", kSamples},
                       Fact{"rows_at_once", kRowsAtOnce}, Fact{"vector", kVector}, Fact{"largest_mean", kLargestMean},
                       Fact{"limit", Integers<8>::kLimit}, Fact{"smallest_abs_max", kSmallestAbsMax});
  }

  const PoolParams& params;
  Shared& shared;

  // blockIdx.x: blocks of rows fastest, then heads, then batch entries.
  template <SourceRows kSource>
  __device__ __forceinline__ void run() const {
    const i32 index = ptx::block_index(), head = index / params.blocks,
              first_row = index % params.blocks * params.block_rows;
    const Source<kSource> source(params.x, head / params.x_heads, head % params.x_heads, 0, params.seqlen,
                                 params.headdim, params.dtype);
    prepare_centre(source);
    __syncthreads();  // the centre is there, and the sums of the sample have been read
    const i32 rows = min(params.block_rows, params.seqlen - first_row);
    const float squares = add_rows(source, first_row, rows);
    __syncthreads();
    store(index, rows, squares);
  }

 private:
  // The vector that is subtracted from every row: softmax does not change, and s8 keeps more of what differs.
  template <SourceRows kSource>
  __device__ __forceinline__ void prepare_centre(const Source<kSource>& source) const {
    if (params.centre) {
      const Sample<Config, kSource> sample(source);
      sample.average(
          shared.sums, [](float x, i32) { return x; },
          [&](i32 channel, float mean) { shared.centre[channel] = subtractable(mean); });
    } else {
      for (i32 c = ptx::thread_index(); c < Config::kHeadDim; c += Config::kThreads) shared.centre[c] = 0.0f;
    }
  }

  // Adds up a thread's rows, into shared memory. Returns the sum of their squares.
  template <SourceRows kSource>
  __device__ __forceinline__ float add_rows(const Source<kSource>& source, i32 first_row, i32 rows) const {
    const i32 own = ptx::thread_index() / Layout::kVectors, channel = Layout::first_channel();
    float sum[kVector] = {}, centre[kVector], squares = 0.0f;
#pragma unroll
    for (i32 i = 0; i < kVector; ++i) centre[i] = shared.centre[channel + i];
#pragma unroll 1
    for (i32 first = own; first < rows; first += kInFlight * kRowsAtOnce) {
      typename Source<kSource>::Raw raw[kInFlight];
#pragma unroll
      for (i32 r = 0; r < kInFlight; ++r) {
        raw[r] = source.load(first_row + min(first + r * kRowsAtOnce, rows - 1), channel);
      }
#pragma unroll
      for (i32 r = 0; r < kInFlight; ++r) {
        if (first + r * kRowsAtOnce >= rows) break;
        float x[kVector];
        source.convert(raw[r], x);
#pragma unroll
        for (i32 i = 0; i < kVector; ++i) {
          const float value = finite_or_zero(x[i] - centre[i]);
          sum[i] += value;
          squares = fmaf(value, value, squares);
        }
      }
    }
#pragma unroll
    for (i32 i = 0; i < kVector; ++i) shared.sums[own][channel + i] = sum[i];
    return squares;
  }

  // Call with all threads: a thread has a channel.
  __device__ __forceinline__ void store(i32 index, i32 rows, float squares) const {
    const i32 c = ptx::thread_index(), warp = c / kWarpSize;
    const bool exists = c < Config::kHeadDim;
    float mean = 0.0f;
    if (exists) {
#pragma unroll
      for (i32 t = 0; t < kRowsAtOnce; ++t) mean += shared.sums[t][c];
      mean = finite_or_zero(divide(mean, static_cast<float>(rows)));
    }
    const float found[3] = {ptx::max_over_lanes<kWarpSize>(fabsf(mean)), ptx::sum_over_lanes<kWarpSize>(mean * mean),
                            ptx::sum_over_lanes<kWarpSize>(squares)};
    if (c % kWarpSize == 0) {
#pragma unroll
      for (i32 i = 0; i < 3; ++i) shared.of_warps[i][warp] = found[i];
    }
    __syncthreads();
    float amax = 0.0f, of_mean = 0.0f, of_rows = 0.0f;
#pragma unroll
    for (i32 w = 0; w < kWarps; ++w) {
      amax = fmaxf(amax, shared.of_warps[0][w]);
      of_mean += shared.of_warps[1][w], of_rows += shared.of_warps[2][w];
    }
    const Scale scale = Integers<8>::scale(amax);
    if (exists) {
      const float rounded = Integers<8>::rounded(mean, scale.inv_scale);
      params.x_hat[static_cast<i64>(index) * Config::kHeadDim + c] = static_cast<u8>(__float_as_uint(rounded));
      if (params.x_mean != nullptr && c < params.headdim) {
        params.x_mean[static_cast<i64>(index) * params.headdim + c] = mean + shared.centre[c];
      }
    }
    if (c == 0) {
      params.x_scale[index] = scale.scale;
      params.x_alike[index] = alike(of_mean, of_rows / static_cast<float>(rows));
    }
  }

  // The part of the rows' mean square that their mean has: 1 where all rows are equal, about 1 / rows where they have
  // nothing in common. 0 where the squares overflow, so that such a block is kept.
  __device__ __forceinline__ static float alike(float of_mean, float of_rows) {
    if (of_rows == 0.0f) return 1.0f;
    const float part = of_mean / of_rows;
    return part >= 0.0f ? fminf(part, 1.0f) : 0.0f;
  }
};

}  // namespace sage
