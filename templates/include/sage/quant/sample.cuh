// A sample of a sequence's rows, and means of its channels. The sample has one row per stratum of the sequence, at a
// hashed position, so that it cannot beat with a period of the rows, such as the width of an image.
// Every sum has one fixed order: a thread adds its samples in ascending order, then the threads of a channel are added
// in ascending order. Values that are not finite count as zero.
#pragma once

#include "sage/numerics/arithmetic.cuh"
#include "sage/ptx/opaque.cuh"
#include "sage/ptx/special.cuh"
#include "sage/quant/source.cuh"

namespace sage {

constexpr i32 kSamples = 64;

// The bits of a counter, mixed: murmur3's finalizer, shortened.
__device__ constexpr u32 hashed(u32 x) {
  x = (x + 1) * 0x9e3779b9u;
  x = (x ^ x >> 16) * 0x85ebca6bu;
  return x ^ x >> 13;
}

// The first row of a stratum.
__device__ constexpr i32 stratum_begin(i32 sample, i32 rows) {
  return sample * (rows / kSamples) + sample * (rows % kSamples) / kSamples;
}

// The row of a sample: one of its stratum. Where there are no more rows than samples, sample i is row i, which may not
// exist.
__device__ constexpr i32 sampled_row(i32 sample, i32 rows) {
  if (rows <= kSamples) return sample;
  const i32 begin = stratum_begin(sample, rows), length = stratum_begin(sample + 1, rows) - begin;
  return begin + static_cast<i32>(static_cast<u64>(hashed(sample)) * static_cast<u32>(length) >> 32);
}

// The shares of a block's threads in the sample of one head: a thread has eight channels of every
// kThreads / kVectors-th sampled row. Config: kHeadDim, kThreads.
template <class Config>
struct SampleLayout {
  static constexpr i32 kVectors = Config::kHeadDim / kVector;      // threads side by side on a row
  static constexpr i32 kRowsAtOnce = Config::kThreads / kVectors;  // rows read at once
  static constexpr i32 kSteps = kSamples / kRowsAtOnce;
  static constexpr float kWeight = 1.0f / kSamples;  // of a sample: sums stay within f32
  static_assert(kSamples % kRowsAtOnce == 0, "every thread reads equally many rows");

  // The sums of each thread, in shared memory, at a multiple of 16 bytes.
  using Sums = float[kRowsAtOnce][Config::kHeadDim];

  __device__ __forceinline__ static i32 first_channel() { return ptx::thread_index() % kVectors * kVector; }

  // Stores what this thread has of its channels.
  __device__ __forceinline__ static void store(Sums& sums, const float (&of)[kVector]) {
    struct alignas(16) Four {
      float x, y, z, w;
    };
    float* const own = sums[ptx::thread_index() / kVectors] + first_channel();
#pragma unroll
    for (i32 i = 0; i < kVector; i += 4) {
      *reinterpret_cast<Four*>(own + i) = {of[i], of[i + 1], of[i + 2], of[i + 3]};
    }
  }
};

// A thread's part of a sample.
template <class Config, SourceRows kSource>
struct Sample : SampleLayout<Config> {
  using Layout = SampleLayout<Config>;
  using Layout::kRowsAtOnce, Layout::kSteps, Layout::kVectors, Layout::kWeight, Layout::first_channel, Layout::store;

  const Source<kSource>& source;
  HeldRows<kSource, kSource != SourceRows::kAny, kSteps> rows = {};

  __device__ __forceinline__ explicit Sample(const Source<kSource>& source_) : source(source_) {
    rows.load([&](i32 s) { return load_step(s); });
  }

  // The mean of value(x, i) over the sampled rows, i: of this thread's eight channels. Calls on_mean(channel, mean) for
  // every channel of the head, by one thread each, behind a barrier.
  template <class Value, class OnMean>
  __device__ __forceinline__ void average(typename Layout::Sums& sums, Value value, OnMean on_mean) const {
    float sum[kVector];
    add_up(value, sum);
    bool finite = true;
#pragma unroll
    for (i32 i = 0; i < kVector; ++i) finite &= fabsf(sum[i]) < ptx::infinity();
    if (!finite) add_up([&](float x, i32 i) { return finite_or_zero(value(x, i)); }, sum);
    store(sums, sum);
    __syncthreads();
    const float weights = min(source.rows, kSamples) * kWeight;
    for (i32 c = ptx::thread_index(); c < Config::kHeadDim; c += Config::kThreads) {
      float total = sums[0][c];
#pragma unroll
      for (i32 t = 1; t < kRowsAtOnce; ++t) total += sums[t][c];
      on_mean(c, divide(total, weights));
    }
  }

 private:
  template <class Value>
  __device__ __forceinline__ void add_up(Value value, float (&sum)[kVector]) const {
#pragma unroll
    for (i32 i = 0; i < kVector; ++i) sum[i] = 0.0f;
    [[maybe_unused]] constexpr i32 kUnroll = decltype(rows)::kUnroll;
#pragma unroll kUnroll
    for (i32 s = 0; s < kSteps; ++s) {
      float x[kVector];
      // Opaque: the rows as f32, kept for the next average(), would take too many registers.
      source.convert(opaque(rows.get(s, [&](i32 step) { return load_step(step); })), x);
      const float weight = sample_of_step(s) < source.rows ? kWeight : 0.0f;
#pragma unroll
      for (i32 i = 0; i < kVector; ++i) sum[i] = fmaf(value(x[i], i), weight, sum[i]);
    }
  }

  __device__ __forceinline__ auto load_step(i32 step) const {
    return source.load(sampled_row(sample_of_step(step), source.rows), first_channel());
  }

  __device__ __forceinline__ static Halves opaque(Halves row) {
#pragma unroll
    for (u32& word : row.word) word = ptx::opaque(word);
    return row;
  }
  __device__ __forceinline__ static Floats opaque(const Floats& row) { return row; }

  __device__ __forceinline__ static i32 sample_of_step(i32 step) {
    return step * kRowsAtOnce + ptx::thread_index() / kVectors;
  }
};

// The mean if the difference from any finite value is finite in f32, else zero. Any offset is valid.
constexpr float kLargestMean = 0x1p103f;

__device__ __forceinline__ float subtractable(float mean) { return fabsf(mean) < kLargestMean ? mean : 0.0f; }

}  // namespace sage
