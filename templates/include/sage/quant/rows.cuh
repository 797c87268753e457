// Functions that the quantizers of Q and K share: the mean of K, the largest magnitude of a row, rounding of rows.
#pragma once

#include "sage/numerics/scale.cuh"
#include "sage/ptx/math.cuh"
#include "sage/quant/block.cuh"

namespace sage {

// Added to a number below 2^22 it leaves, rounded to the nearest even, an integer in the low bits of the sum: 1.5 ·
// 2^23.
constexpr float kIntegerBias = 12582912.0f;

// Whether all rows take the path of smoothed or rotated rows, even rows that are neither: in the entry point for all
// other rows (Rows::kAny), and at 4 bits, where nearly all rows are smoothed or rotated. A second path would double the
// compile time.
template <class Config, Rows kSource>
constexpr bool kAlwaysChanged = kSource == Rows::kAny || Config::kQkBits == 4;

// Largest magnitude; NaN or infinity where an element is not finite.
template <i32 kRows>
__device__ __forceinline__ float abs_max(const float (&x)[kRows][kVector]) {
  float amax = 0.0f;
#pragma unroll
  for (i32 r = 0; r < kRows; ++r) {
#pragma unroll
    for (i32 i = 0; i < kVector; ++i) amax = ptx::max_nan(amax, fabsf(x[r][i]));
  }
  return amax;
}

// Zeros for what is not finite; returns the largest magnitude left.
template <i32 kRows>
__device__ __forceinline__ float make_finite(float (&x)[kRows][kVector]) {
#pragma unroll
  for (i32 r = 0; r < kRows; ++r) {
#pragma unroll
    for (i32 i = 0; i < kVector; ++i) x[r][i] = finite_or_zero(x[r][i]);
  }
  return abs_max(x);
}

// Computes the mean of K over a sample, into shared memory, behind a barrier. `store`: where the mean is stored for
// other kernels, or null. load_rows() issues the loads of the block's own rows behind the sample's loads, in front of
// its sums.
template <class Config, class Source, class Load>
__device__ __forceinline__ void prepare_k_mean(const Source& source, typename QuantBlock<Config>::Shared& shared,
                                               float* store, Load load_rows) {
  Sample<Config> sample;
  sample.load(source);
  load_rows();
  sample.average(
      source, shared.parts, [](float x, i32) { return x; },
      [&](i32 channel, float mean) {
        shared.mean[channel] = subtractable(mean);
        if (store != nullptr) store[channel] = subtractable(mean);
      });
  __syncthreads();
}

// Zero as a mean, likewise; `mean`: in shared memory.
template <class Config>
__device__ __forceinline__ void prepare_no_mean(float (&mean)[Config::kHeadDim], float* store) {
  for (i32 c = ptx::thread_index(); c < Config::kHeadDim; c += Config::kThreads) {
    mean[c] = 0.0f;
    if (store != nullptr) store[c] = 0.0f;
  }
  __syncthreads();
}

// Integers of kQkBits bits. Values are divided by a scale and rounded to the nearest, ties to even; those of s4 beyond
// [-8, 7], of a scale that clips, are cut off (quant/clip.cuh).
template <class Config>
struct QuantizedRows {
  static constexpr float kLimit = Config::kQkBits == 8 ? 127.0f : 7.0f;
  static_assert(Config::kQkBits == 8 || Config::kQkBits == 4);

  // Of a scale group, without a clip.
  __device__ __forceinline__ static Scale scale(float amax) { return scale_to(kLimit, amax); }

  // x · inv_scale as an integer, plus kIntegerBias.
  __device__ __forceinline__ static float rounded(float x, float inv_scale) {
    const float y = fmaf(x, inv_scale, kIntegerBias);
    if constexpr (Config::kQkBits == 8) return y;
    return fminf(fmaxf(y, kIntegerBias - kLimit - 1.0f), kIntegerBias + kLimit);
  }

  // Where eight channels of a row lie in a tile, as part of a chunk; eight rows further by eight rows' bytes.
  template <class Rows>
  __device__ __forceinline__ static i32 offset(i32 row, i32 first_channel) {
    const i32 byte = first_channel * Config::kQkBits / 8;
    return Rows::offset(row, byte / 16) + byte % 16;
  }

  // Rounds eight channels and stores them.
  __device__ __forceinline__ static void store(u8* to, const float (&x)[kVector], float inv_scale) {
    const u32 lo = bytes<0>(x, inv_scale), hi = bytes<4>(x, inv_scale);
    if constexpr (Config::kQkBits == 8) *reinterpret_cast<u64*>(to) = static_cast<u64>(hi) << 32 | lo;
    else *reinterpret_cast<u32*>(to) = nibbles(hi) << 16 | nibbles(lo);
  }

 private:
  // x[kFirst..kFirst+3] · inv_scale as four bytes, the first the lowest.
  template <i32 kFirst>
  __device__ __forceinline__ static u32 bytes(const float (&x)[kVector], float inv_scale) {
    u32 bits[4];
#pragma unroll
    for (i32 i = 0; i < 4; ++i) bits[i] = __float_as_uint(rounded(x[kFirst + i], inv_scale));
    return ptx::prmt(ptx::prmt(bits[0], bits[1], 0x0040), ptx::prmt(bits[2], bits[3], 0x0040), 0x5410);
  }

  // The low halves of four bytes, side by side.
  __device__ __forceinline__ static u32 nibbles(u32 bytes) {
    const u32 pairs = (bytes & 0x000f000f) | (bytes >> 4 & 0x00f000f0);
    return (pairs | pairs >> 8) & 0xffff;
  }
};

}  // namespace sage
