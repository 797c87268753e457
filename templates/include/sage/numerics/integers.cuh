// Rounding to integers of 8 or 4 bits, and packing them.
#pragma once

#include "sage/numerics/scale.cuh"
#include "sage/ptx/math.cuh"

namespace sage {

// 1.5 · 2^23. Added to a number of magnitude below 2^22, it leaves that number in the low bits of the sum, rounded to
// the nearest integer, ties to even.
constexpr float kIntegerBias = 12582912.0f;

// The low bytes of four words, the first in the lowest byte.
__device__ __forceinline__ u32 low_bytes(const u32 (&words)[4]) {
  return ptx::prmt(ptx::prmt(words[0], words[1], 0x0040), ptx::prmt(words[2], words[3], 0x0040), 0x5410);
}

// x as four integers of 8 bits, the first in the lowest byte; inv_scale: of x[0] and x[2], and of the others. Rounded
// magnitudes are at most 127, or of unsigned integers 255.
__device__ __forceinline__ u32 rounded_bytes(const float (&x)[4], const float (&inv_scale)[2]) {
  u32 bits[4];
#pragma unroll
  for (i32 i = 0; i < 4; ++i) bits[i] = __float_as_uint(fmaf(x[i], inv_scale[i % 2], kIntegerBias));
  return low_bytes(bits);
}

// Values are divided by a scale and rounded to the nearest, ties to even. At 4 bits, values beyond [-8, 7] are cut off;
// only a scale that clips (quant/clip.cuh) leaves such values.
template <i32 kBits>
struct Integers {
  static constexpr float kLimit = kBits == 8 ? 127.0f : 7.0f;
  static_assert(kBits == 8 || kBits == 4);

  // The scale of a group whose largest magnitude is amax, without a clip.
  __device__ __forceinline__ static Scale scale(float amax) { return scale_to(kLimit, amax); }

  // x · inv_scale as an integer, plus kIntegerBias.
  __device__ __forceinline__ static float rounded(float x, float inv_scale) {
    const float y = fmaf(x, inv_scale, kIntegerBias);
    if constexpr (kBits == 8) return y;
    return fminf(fmaxf(y, kIntegerBias - kLimit - 1.0f), kIntegerBias + kLimit);
  }

  // Rounds eight values and stores them side by side, the first in the lowest bits. Returns the sum of their squares.
  __device__ __forceinline__ static i32 store(u8* to, const float (&x)[8], float inv_scale) {
    const u32 lo = bytes<0>(x, inv_scale), hi = bytes<4>(x, inv_scale);
    if constexpr (kBits == 8) *reinterpret_cast<u64*>(to) = static_cast<u64>(hi) << 32 | lo;
    else *reinterpret_cast<u32*>(to) = nibbles(hi) << 16 | nibbles(lo);
    return ptx::dot_s8x4(lo, lo, ptx::dot_s8x4(hi, hi, 0));
  }

 private:
  // x[kFirst..kFirst+3] · inv_scale as four bytes, the first in the lowest byte.
  template <i32 kFirst>
  __device__ __forceinline__ static u32 bytes(const float (&x)[8], float inv_scale) {
    u32 bits[4];
#pragma unroll
    for (i32 i = 0; i < 4; ++i) bits[i] = __float_as_uint(rounded(x[kFirst + i], inv_scale));
    return low_bytes(bits);
  }

  // The low nibbles of four bytes, side by side.
  __device__ __forceinline__ static u32 nibbles(u32 bytes) {
    const u32 pairs = (bytes & 0x000f000f) | (bytes >> 4 & 0x00f000f0);
    return (pairs | pairs >> 8) & 0xffff;
  }
};

}  // namespace sage
