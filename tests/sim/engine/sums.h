// The sum of an accumulator and a row times a column, as a tensor core computes it: products are exact; those of a step
// are aligned and cut off together, by the chip's table.
// Source: chip.h.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>

#include "chip.h"
#include "numbers.h"

namespace sim {

// Stands for the exponent of zero, which must not count as the largest.
constexpr int kOfZero = -10000;

// ue8m0: a power of two, 2^(code - 127).
constexpr int kUe8m0Bias = 127;
constexpr u32 kUe8m0Nan = 255;

// A row or a column of an operand, elements along k, split into significands and exponents once for all its sums.
template <class Format_, int kDepth_>
struct Vector {
  using Format = Format_;
  static constexpr int kDepth = kDepth_;

  u32 code[kDepth];
  i32 significand[kDepth];
  i32 exponent[kDepth];
  bool special = false;  // infinity or NaN among them

  explicit Vector(const u32 (&codes)[kDepth]) {
    for (int k = 0; k < kDepth; ++k) {
      code[k] = codes[k];
      significand[k] = Format::significand(codes[k]);
      exponent[k] = significand[k] ? Format::exponent(codes[k]) : kOfZero;
      special |= Format::special(codes[k]);
    }
  }

  // Multiplies all elements by a scale of type ue8m0.
  void scale(u32 ue8m0) {
    for (int k = 0; k < kDepth; ++k) {
      if (exponent[k] != kOfZero) exponent[k] += static_cast<int>(ue8m0) - kUe8m0Bias;
      if (ue8m0 == kUe8m0Nan) code[k] = Format::kNan;
    }
    special |= ue8m0 == kUe8m0Nan;
  }
};

// x · 2^shift, cut off towards zero.
inline i64 shifted(i64 x, int shift) {
  if (shift >= 0) return x << shift;
  const i64 magnitude = (x < 0 ? -x : x) >> std::min(-shift, 63);
  return x < 0 ? -magnitude : magnitude;
}

// One step's sum, before it is rounded to the accumulator's format.
template <class Accumulator, class Vector>
double step_sum(const Step& step, const Vector& a, const Vector& b, int first, u32 c) {
  const i64 c_significand = Accumulator::significand(c);
  const int c_exponent = c_significand ? Accumulator::exponent(c) : kOfZero;
  int largest = c_exponent;
  for (int k = first; k < first + step.products; ++k) largest = std::max(largest, a.exponent[k] + b.exponent[k]);
  if (largest <= kOfZero / 2) return 0.0;
  i64 sum = shifted(c_significand, c_exponent - largest + step.fraction_bits - Accumulator::kMantissaBits);
  for (int k = first; k < first + step.products; ++k) {
    const int exponent = a.exponent[k] + b.exponent[k];
    sum += shifted(static_cast<i64>(a.significand[k]) * b.significand[k],
                   exponent - largest + step.fraction_bits - 2 * Vector::Format::kMantissaBits);
  }
  return static_cast<double>(sum) * power_of_two(largest - step.fraction_bits);
}

// f32 with kept_bits of mantissa; the lower bits are cut off. Infinity from 2^128 on.
inline u32 cut_to_f32(double x, int kept_bits) {
  float y = static_cast<float>(x);
  if (std::fabs(y) > std::fabs(x) && std::fabs(x) < power_of_two(128)) y = std::nextafter(y, 0.0f);
  return std::bit_cast<u32>(y) & ~0u << (23 - kept_bits);
}

inline u32 rounded(const Step& step, double sum, F32) { return cut_to_f32(sum, step.kept_bits); }
inline u32 rounded(const Step&, double sum, F16) { return F16::from(sum); }

// A sum with infinity or NaN among the operands, which is infinity or NaN.
template <class Accumulator, class Vector>
u32 special_sum(const Vector& a, const Vector& b, u32 c) {
  double sum = Accumulator::value(c);
  for (int k = 0; k < Vector::kDepth; ++k) sum += Vector::Format::value(a.code[k]) * Vector::Format::value(b.code[k]);
  return Accumulator::from(sum);
}

// c plus row times column, step by step.
template <class Accumulator, class Vector>
u32 add_product(const Step& step, const Vector& a, const Vector& b, u32 c) {
  if (Accumulator::special(c) || a.special || b.special) return special_sum<Accumulator>(a, b, c);
  for (int k = 0; k < Vector::kDepth && !Accumulator::special(c); k += step.products) {  // an infinite sum stays one
    c = rounded(step, step_sum<Accumulator>(step, a, b, k, c), Accumulator{});
  }
  return c;
}

}  // namespace sim
