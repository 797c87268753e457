// Rounding of V̂ to e4m3 so that the sum of each channel over a KV tile nearly stays: where attention is diffuse, the
// error of the sum is the error of the output.
//
// Per channel and tile, the errors of rounding add up to some steps of e4m3. Half of the keys take equal parts of that
// error before they are rounded: of these keys, those that lie near the middle of a step are rounded the other way. A
// value takes at most 1/16 of itself, as much as rounding changes it, so that small values stay small. The other keys
// take nothing: of values of equal size, which all have the same error, all would be rounded the other way.
#pragma once

#include "sage/ptx/f16x2.cuh"
#include "sage/ptx/math.cuh"

namespace sage {

// Four keys of a pair of channels. Two keys take parts of the error of the tile's sum, so they are rounded when that is
// known.
struct OpenKeys {
  static constexpr i32 kKeys = 4, kOpen = 2;

  u32 rounded;  // the first two keys in e4m3, a half of the word a channel
  u32 open[2];  // the others in f16, a word a channel

  // x: [channel][key]. Returns the sums of x less x in e4m3, in f16, a half of the word a channel.
  __device__ __forceinline__ u32 round(const float (&x)[2][kKeys]) {
    u32 errors[2];  // of every other key, in a half each
    rounded = 0;
#pragma unroll
    for (i32 c = 0; c < 2; ++c) {
      const u32 first = ptx::f16x2(x[c][0], x[c][1]);
      open[c] = ptx::f16x2(x[c][2], x[c][3]);
      const u32 bytes = ptx::e4m3x2_of_f16x2(first);
      rounded |= bytes << 16 * c;
      errors[c] = ptx::add_f16x2(error_of(first, bytes), error_of(open[c], ptx::e4m3x2_of_f16x2(open[c])));
    }
    return ptx::add_f16x2(ptx::prmt(errors[0], errors[1], 0x5410), ptx::prmt(errors[0], errors[1], 0x7632));
  }

  // All keys of a channel in e4m3. parts: what an open key of each channel takes.
  __device__ __forceinline__ u32 bytes(i32 channel, u32 parts) const {
    constexpr u32 kMagnitudes = 0x7fff7fff, kSigns = 0x80008000, kSixteenth = 0x2c002c00;
    const u32 part = ptx::prmt(parts, parts, channel == 0 ? 0x1010 : 0x3232);
    const u32 most = ptx::mul_f16x2(open[channel] & kMagnitudes, kSixteenth);
    const u32 taken = ptx::max_f16x2(ptx::min_f16x2(part, most), most | kSigns);
    const u32 bytes = ptx::e4m3x2_of_f16x2(ptx::add_f16x2(open[channel], taken));
    return ptx::prmt(rounded, bytes, channel == 0 ? 0x5410 : 0x5432);
  }

 private:
  __device__ __forceinline__ static u32 error_of(u32 x, u32 bytes) {
    return ptx::sub_f16x2(x, ptx::f16x2_of_e4m3x2(bytes));
  }
};

}  // namespace sage
