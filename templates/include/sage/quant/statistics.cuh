// Statistics of the channels of K and V, from a sample of the sequence. A launch of its own finds them, in front of the
// quantizer's, whose blocks for K, V and Q read them. A block takes K or V of one KV head.
//
// Softmax does not change when one vector is subtracted from all keys. A mean over 64 keys therefore removes a
// channel's offset as well as the mean over all keys. The scale of a channel of V needs no maximum: a KV tile that
// exceeds it has a v_factor (quant/quantize_v.cuh).
#pragma once

#include "sage/numerics/scale.cuh"
#include "sage/ptx/grid_dependency.cuh"
#include "sage/quant/balance.cuh"
#include "sage/quant/block.cuh"

namespace sage {

// More than the rounding of a channel's mean, as a share of the mean: of 64 equal values, each of 64 sums rounds.
constexpr float kRoundingOfMean = 0x1p-16f;

// Config: kHeadDim, kQk, kPv, kThreads, kProgrammatic.
template <class Config>
struct Statistics {
  using Layout = SampleLayout<Config>;

  struct alignas(16) Shared {
    float mean[Config::kHeadDim];
    float magnitude[Config::kHeadDim];
    typename Layout::Sums sums;
    u32 exponents[2];  // of K and Q
  };

  const QuantParams& params;
  Shared& shared;

  // blockIdx.x: KV heads, and of each K and V.
  template <SourceRows kSource>
  __device__ __forceinline__ void run() const {
    if constexpr (Config::kProgrammatic) ptx::grid_dependency_wait();
    ptx::launch_dependents();
    const i32 entry_and_head = ptx::block_index() / 2;
    const i32 batch = entry_and_head / params.num_kv_heads, head = entry_and_head % params.num_kv_heads;
    const bool is_k = ptx::block_index() % 2 == 0;
    const auto source =
        QuantBlock<Config>::template kv_source<kSource>(params, is_k ? params.k : params.v, batch, head);
    const i64 channels = channel_index<Config>(entry_and_head);
    if (is_k) of_k(source, batch, head, channels);
    else of_v(source, channels);
  }

 private:
  // channels: index of the head's first channel.
  template <SourceRows kSource>
  __device__ __forceinline__ void of_k(const Source<kSource>& source, i32 batch, i32 head, i64 channels) const {
    const Sample<Config, kSource> sample(source);
    prepare_mean(sample, params.smooth_k);
    for (i32 c = ptx::thread_index(); c < Config::kHeadDim; c += Config::kThreads) {
      params.k_mean[channels + c] = shared.mean[c];
    }
    const bool balances = params.balance != Balance::kByNothing && source.rows >= kLeastKeys;
    const i32 divisor = balances ? divisor_of(sample, batch, head) : 0;
    const bool any = !__syncthreads_and(divisor == 0);
    const i32 channel = ptx::thread_index();
    if (channel < Config::kHeadDim) params.k_factor[channels + channel] = factor_of_k(divisor);
    if (channel == 0) params.q_unit[batch * params.num_kv_heads + head] = any ? kQUnit : 1.0f;
  }

  // By what this thread's channel of K is divided, log2. Call with all threads.
  template <SourceRows kSource>
  __device__ __forceinline__ i32 divisor_of(const Sample<Config, kSource>& sample, i32 batch, i32 head) const {
    if (ptx::thread_index() < 2) shared.exponents[ptx::thread_index()] = 0;
    prepare_magnitude(sample);
    const i32 channel = ptx::thread_index();
    const bool has_channel = channel < Config::kHeadDim;
    const i32 of_k = Exponents<Config>{shared.exponents[0]}.excess(has_channel ? shared.magnitude[channel] : 0.0f);
    if (__syncthreads_and(of_k < kLeastExcess)) return 0;
    if (params.balance == Balance::kByK) return log2_of_divisor(of_k);
    store_largest_of_q<kSource>(batch, head);
    __syncthreads();
    const float largest = has_channel ? largest_of(channel) : 0.0f;
    return log2_of_divisor(of_k, Exponents<Config>{shared.exponents[1]}.excess(largest));
  }

  // Stores the largest magnitude of each thread's rows of Q, of as many as there are samples of K. The query heads of
  // the KV head have them by turns.
  template <SourceRows kSource>
  __device__ __forceinline__ void store_largest_of_q(i32 batch, i32 head) const {
    const auto seqlen = seqlen_of(params, batch);
    const i32 rows = seqlen.q(), heads = params.q_heads_per_kv_head;
    float largest[kVector] = {};
#pragma unroll 1
    for (i32 i = ptx::thread_index() / Layout::kVectors; i < kSamples && rows > 0; i += Layout::kRowsAtOnce) {
      const Source<kSource> source(params.q, batch, head * heads + i % params.q_heads_per_kv_head, seqlen.q_begin(),
                                   rows, params.headdim, params.dtype);
      float x[kVector];
      source.convert(source.load(sampled_row(i, rows), Layout::first_channel()), x);
#pragma unroll
      for (i32 c = 0; c < kVector; ++c) largest[c] = fmaxf(largest[c], fabsf(finite_or_zero(x[c])));
    }
    Layout::store(shared.sums, largest);
  }

  // The largest of what all threads stored of a channel.
  __device__ __forceinline__ float largest_of(i32 channel) const {
    float largest = shared.sums[0][channel];
#pragma unroll
    for (i32 t = 1; t < Layout::kRowsAtOnce; ++t) largest = fmaxf(largest, shared.sums[t][channel]);
    return largest;
  }

  template <SourceRows kSource>
  __device__ __forceinline__ void of_v(const Source<kSource>& source, i64 channels) const {
    const Sample<Config, kSource> sample(source);
    prepare_mean(sample, params.smooth_v);
    prepare_magnitude(sample);
    for (i32 c = ptx::thread_index(); c < Config::kHeadDim; c += Config::kThreads) {
      const Scale scale = channel_scale(c);
      params.v_scale[channels + c] = scale.scale;
      params.v_inv_scale[channels + c] = scale.inv_scale;
      params.v_mean[channels + c] = shared.mean[c];
    }
  }

  // The mean of each channel, or zero, into shared memory, behind a barrier.
  template <SourceRows kSource>
  __device__ __forceinline__ void prepare_mean(const Sample<Config, kSource>& sample, bool smooth) const {
    if (smooth) {
      sample.average(
          shared.sums, [](float x, i32) { return x; },
          [&](i32 channel, float mean) { shared.mean[channel] = subtractable(mean); });
    } else {
      for (i32 c = ptx::thread_index(); c < Config::kHeadDim; c += Config::kThreads) shared.mean[c] = 0.0f;
    }
    __syncthreads();
  }

  // The mean difference from the mean of each channel, into shared memory, behind a barrier.
  template <SourceRows kSource>
  __device__ __forceinline__ void prepare_magnitude(const Sample<Config, kSource>& sample) const {
    const float* own_mean = shared.mean + Layout::first_channel();
    sample.average(
        shared.sums, [&](float x, i32 i) { return fabsf(x - own_mean[i]); },
        [&](i32 channel, float average) { shared.magnitude[channel] = average; });
    __syncthreads();
  }

  // The scale of a channel of V; one where the head's values are zeros.
  __device__ __forceinline__ Scale channel_scale(i32 channel) const {
    float magnitude = shared.magnitude[channel];
    if (!is_known(channel)) {
      magnitude = likely_magnitude(channel);
      if (magnitude < kSmallestAbsMax) return {1.0f, 1.0f};
    }
    const float clamped = fminf(fmaxf(magnitude, kSmallestMagnitude), kLargestMagnitude);
    if constexpr (Config::kPv == Pv::kF16) return power_of_two_scale(clamped);
    else return scale_to(params.v_typical, clamped);
  }

  // Whether the channel's sample differs from its mean by more than the rounding of the mean.
  __device__ __forceinline__ bool is_known(i32 channel) const {
    return shared.magnitude[channel] >= fmaxf(kRoundingOfMean * fabsf(shared.mean[channel]), kSmallestAbsMax);
  }

  // For a channel whose sample is all one value, as that of padding, which says nothing of the other keys: the largest
  // magnitude of the head's channels, or mean where none is known, at least the channel's own mean. With a smaller one
  // those keys may be so large that the factor of their tile takes the bits of all channels.
  __device__ __forceinline__ float likely_magnitude(i32 channel) const {
    float of_samples = 0.0f, of_means = 0.0f;
#pragma unroll 1
    for (i32 c = 0; c < Config::kHeadDim; ++c) {
      if (is_known(c)) of_samples = fmaxf(of_samples, shared.magnitude[c]);
      of_means = fmaxf(of_means, fabsf(shared.mean[c]));
    }
    return fmaxf(fabsf(shared.mean[channel]), of_samples > 0.0f ? of_samples : of_means);
  }

  // Bounds of a channel's magnitude. Beyond them the reciprocal of a scale, or that times the reciprocal of a tile's
  // factor, would leave f32's normal range.
  static constexpr float kSmallestMagnitude = 0x1p-90f, kLargestMagnitude = 0x1p120f;
};

}  // namespace sage
