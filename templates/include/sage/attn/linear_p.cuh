// P without exponentials: the byte of P in e4m3 as a linear function of the score.
//
// The byte of a positive e4m3 is 8 · (log2 P + 7) at powers of two, and linear in P between them. With x = score -
// row_ref
//   byte = 8 · (x + 7) - kShift
// is 2^x to within a line and the rounding of a byte: 3.2 % of P (standard deviation), where rounding 2^x to e4m3 has
// 2.7 %. A factor that all P of a row have in common cancels against the row sum, which is one of the same bytes.
// Three ways to compute it. Of the wgmma family BitsLine takes the fewest instructions, FloatLine any scores. The mma
// family folds the line into the FMA that takes the bias off its scores (attn/mma/softmax.cuh).
#pragma once

#include "sage/attn/p_operand.cuh"
#include "sage/ptx/math.cuh"

namespace sage {

// Makes the byte of 2^kTop, the largest P, that of 448, and is near the mean of the line's error.
constexpr float kShift = 0.45884f;

// The line: bytes an octave, and the byte of a score that equals its reference.
constexpr float kBytesPerOctave = 8.0f, kByteOfOne = 8 * 7 - kShift;

// The byte of 448.
constexpr float kLargestByte = 126.0f;

// Of scores that BitsLine takes, in log2 units.
constexpr float kLargestLinearScore = 65.0f;

// The line as the bits of an f32, 2^23 an octave, which are then converted as 2^x is. For integer scores of at most
// kLargestLinearScore in this tile and in all before it: an f32 has room for 126 octaves below one, a score may lie
// that much below the largest. Their scale is then below 2^-7, the reference within ±128. A masked score makes some
// byte, which the caller hides: its product wraps around.
template <i32 kRows>
struct BitsLine {
  u32 factor, offset[kRows];

  __device__ __forceinline__ BitsLine(float scale, const float (&row_ref)[kRows]) {
    // Rounded to integers by a sum: an integer conversion would make the whole tile wait.
    constexpr float kUnits = 0x1.8p23f, kUnitsOf2p15 = 0x1.8p8f;
    factor = __float_as_uint(fmaf(scale, 0x1p23f, kUnits)) - __float_as_uint(kUnits);
#pragma unroll
    for (i32 r = 0; r < kRows; ++r) {
      constexpr u32 kAtZero = static_cast<u32>((8 * 127 - kShift) * 0x1p20f);
      const u32 reference = __float_as_uint(row_ref[r] + kUnitsOf2p15) - __float_as_uint(kUnitsOf2p15);
      offset[r] = kAtZero - reference * 256u;
    }
  }
  // Four bytes of P; score(e): of the row r.
  template <class Score>
  __device__ __forceinline__ u32 bytes(i32 r, Score score) const {
    float x[4];
#pragma unroll
    for (i32 e = 0; e < 4; ++e) x[e] = __uint_as_float(static_cast<u32>(score(e)) * factor + offset[r]);
    return ptx::e4m3x4(x[0], x[1], x[2], x[3]);
  }
};

// The line as an f32, converted to integers: bytes that would be negative are zero. For scores in f32, which may be
// beyond 2^16, so large that the reference, which is rounded down, is more than a byte too small.
template <i32 kRows>
struct FloatLine {
  float factor, offset[kRows];

  __device__ __forceinline__ FloatLine(float scale, const float (&row_ref)[kRows]) {
    factor = kBytesPerOctave * scale;
#pragma unroll
    for (i32 r = 0; r < kRows; ++r) offset[r] = fmaf(row_ref[r], -kBytesPerOctave, kByteOfOne);
  }
  template <class Score>
  __device__ __forceinline__ u32 bytes(i32 r, Score score) const {
    float x[4];
#pragma unroll
    for (i32 e = 0; e < 4; ++e) {
      x[e] = fmaf(__int_as_float(score(e)), factor, offset[r]);
      // NaN, of a masked score in a row without a reference, stays: it becomes zero.
      x[e] = ptx::min_nan(x[e], kLargestByte);
    }
    return ptx::u8x4(x[0], x[1], x[2], x[3]);
  }
};

}  // namespace sage
