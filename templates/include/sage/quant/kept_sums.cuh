// Rounding of V̂ to e4m3 so that the sum of each channel over a KV tile nearly stays: where attention is diffuse, the
// error of the sum is the error of the output.
//
// Per channel and tile, the errors of rounding add up to some steps of e4m3. Half of the keys take equal parts of that
// error before they are rounded: of these keys, those that lie near the middle of a step are rounded the other way. The
// other half does not: of values of equal size, which all have the same error, all would be rounded the other way.
#pragma once

#include "sage/ptx/f16x2.cuh"
#include "sage/ptx/math.cuh"

namespace sage {

// Four keys of a channel. Two take parts of the error of the tile's sum, so they are rounded when that is known.
struct OpenKeys {
  static constexpr i32 kKeys = 4, kOpen = 2;

  u16 rounded;  // the first two, in e4m3
  u32 open;     // the others, in f16

  // Returns the sums of x less x in e4m3 over the first and the third key, and over the others.
  __device__ __forceinline__ u32 round(const float (&x)[kKeys]) {
    const u32 first = ptx::f16x2(x[0], x[1]);
    open = ptx::f16x2(x[2], x[3]);
    rounded = ptx::e4m3x2_of_f16x2(first);
    return ptx::add_f16x2(ptx::sub_f16x2(first, ptx::f16x2_of_e4m3x2(rounded)),
                          ptx::sub_f16x2(open, ptx::f16x2_of_e4m3x2(ptx::e4m3x2_of_f16x2(open))));
  }

  // All four in e4m3. part: what an open key takes, in both halves of the word.
  __device__ __forceinline__ u32 bytes(u32 part) const {
    return rounded | static_cast<u32>(ptx::e4m3x2_of_f16x2(ptx::add_f16x2(open, part))) << 16;
  }
};

}  // namespace sage
