// Balance of Q and K. A channel of K that is far larger than most sets the scales of K's rows, so that few of the 8
// bits are left for the other channels. Such a channel of K is divided by a power of two, and the same channel of Q is
// multiplied by it: products of rows stay what they are, and nothing is rounded.
//
// A channel's excess is the exponent of its magnitude less the mean exponent of all channels, at least zero. K's
// magnitude is the mean difference from the mean, over a sample of at least kLeastKeys keys; Q's is its largest value
// in a sample. The divisor is 2^((excess of K - excess of Q) / 2): channels that are large in both stay as they are.
// Where K is quantized before there is a Q, it is 2^(excess of K / 4).
// Source: SmoothQuant (arXiv:2211.10438), section 4, with the exponent 1/2.
#pragma once

#include "sage/numerics/scale.cuh"
#include "sage/ptx/warp.cuh"
#include "sage/types.cuh"

namespace sage {

constexpr i32 kMostBalance = 4;              // log2 of the largest divisor
constexpr i32 kLeastExcess = 2;              // of K, for a divisor
constexpr i32 kLeastKeys = 16;               // of fewer keys, chance alone makes channels of far different magnitudes
constexpr float kQUnit = 1 << kMostBalance;  // Q's rows are divided by it, so that no product is beyond f32

// Exponents of the channels of K or Q, one a thread.
template <class Config>
struct Exponents {
  static_assert(Config::kHeadDim <= Config::kThreads && Config::kHeadDim % kWarpSize == 0, "a thread has a channel");

  u32& sum;  // over the channels, with the number of those above zero in the upper half; zero before; shared memory

  // The excess of this thread's channel. Channels of zeros do not count in the mean. Call with all threads, behind a
  // barrier; those that have no channel pass zero.
  __device__ __forceinline__ i32 excess(float magnitude) const {
    const i32 exponent = static_cast<i32>(__float_as_uint(magnitude) >> kMantissaBits);  // biased
    const u32 counted = static_cast<u32>(exponent) + (exponent > 0 ? 0x10000u : 0u);
    const u32 of_warp = ptx::sum_over_lanes<kWarpSize>(counted);
    if (ptx::thread_index() % kWarpSize == 0) atomicAdd(&sum, of_warp);
    __syncthreads();
    return max(exponent - mean(), 0);
  }

 private:
  // To the nearest integer.
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
