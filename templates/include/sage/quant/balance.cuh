// Balance of Q and K. A channel of K that is far larger than most sets the scales of K's rows, so that few of the 8
// bits are left for the other channels. Such a channel of K is divided by a power of two, and the same channel of Q is
// multiplied by it: products of rows stay what they are, and nothing is rounded. Where no channel is that large,
// nothing changes. How large a channel of K is says the exponent of its largest difference from its mean in a sample,
// by what it exceeds the mean of all channels' exponents; of Q, that of its largest value. K's divisor takes half of
// what K's excess is more than Q's, so that channels that are large in both stay as they are. Where K is quantized
// before there is a Q, the divisor takes a quarter of K's excess.
// Source: SmoothQuant (arXiv:2211.10438), section 4, with the exponent 1/2.
#pragma once

#include "sage/numerics/scale.cuh"
#include "sage/ptx/warp.cuh"
#include "sage/quant/sample.cuh"

namespace sage {

constexpr i32 kMostBalance = 4;              // log2 of the largest divisor
constexpr i32 kLeastExcess = 2;              // of K's exponents, from which on a channel may be divided
constexpr float kQUnit = 1 << kMostBalance;  // Q's rows are divided by it, so that no product is beyond f32

// Exponents of the channels of K or Q, one a thread.
template <class Config>
struct Exponents {
  using Sums = typename SampleLayout<Config>::Sums;
  static_assert(Config::kHeadDim <= Config::kThreads && Config::kHeadDim % kWarpSize == 0, "a thread has a channel");

  u32& sum;  // over the channels, with the number of those above zero in the upper half; zero before; shared memory

  // By what the exponent of this thread's channel exceeds the mean of those above zero, to the nearest integer, or
  // zero. `largest`: the largest values of each thread's rows, behind a barrier. Call with all threads.
  __device__ __forceinline__ i32 excess(const Sums& largest) const {
    const i32 channel = ptx::thread_index();
    const i32 exponent = channel < Config::kHeadDim ? exponent_of(largest, channel) : 0;
    const u32 counted = static_cast<u32>(exponent) + (exponent > 0 ? 0x10000u : 0u);
    const u32 of_warp = ptx::sum_over_lanes<kWarpSize>(counted);
    if (channel % kWarpSize == 0) atomicAdd(&sum, of_warp);
    __syncthreads();
    return max(exponent - mean(), 0);
  }

 private:
  // The biased exponent of a channel's largest value; zero where all are zero.
  __device__ __forceinline__ static i32 exponent_of(const Sums& largest, i32 channel) {
    float of_all = largest[0][channel];
#pragma unroll
    for (i32 t = 1; t < SampleLayout<Config>::kRowsAtOnce; ++t) of_all = fmaxf(of_all, largest[t][channel]);
    return static_cast<i32>(__float_as_uint(of_all) >> kMantissaBits);
  }

  __device__ __forceinline__ i32 mean() const {
    const u32 total = sum & 0xffff, count = max(sum >> 16, 1u);
    return static_cast<i32>((2 * total + count) / (2 * count));
  }
};

// By which a channel of K is multiplied that is divided by a power of two.
__device__ __forceinline__ float factor_of_k(i32 log2_of_divisor) {
  return __uint_as_float(static_cast<u32>(static_cast<i32>(kExponentBias) - log2_of_divisor) << kMantissaBits);
}

// The divisor of a channel of K, log2; zero where K's excess is below kLeastExcess.
__device__ __forceinline__ i32 log2_of_divisor(i32 excess_of_k, i32 excess_of_q) {
  return min(max(excess_of_k - excess_of_q, 0) / 2, kMostBalance);
}
__device__ __forceinline__ i32 log2_of_divisor(i32 excess_of_k) { return min(excess_of_k / 4, kMostBalance); }

}  // namespace sage
