// What a tensor core makes of a row times a column and an accumulator: exact products, a step of them aligned and cut
// off at once, as the chip's table says.
// Source: chip.h.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <iterator>

#include "chip.h"
#include "numbers.h"

namespace sim {

// Elements of one operand along k, taken apart.
template <int kDepth>
struct Vector {
  i32 significand[kDepth];
  i32 exponent[kDepth];
};

// The exponent of zero, which must not count as the largest.
constexpr int kOfZero = -10000;

template <class Format, int kDepth>
Vector<kDepth> taken_apart(const u32 (&codes)[kDepth]) {
  Vector<kDepth> result;
  for (int k = 0; k < kDepth; ++k) {
    result.significand[k] = Format::significand(codes[k]);
    result.exponent[k] = result.significand[k] ? Format::exponent(codes[k]) : kOfZero;
  }
  return result;
}

// x · 2^shift, cut off towards zero.
inline i64 shifted(i64 x, int shift) {
  if (shift >= 0) return x << shift;
  const i64 magnitude = (x < 0 ? -x : x) >> std::min(-shift, 63);
  return x < 0 ? -magnitude : magnitude;
}

// One step's sum, before it is rounded to the accumulator's format.
template <class Format, class Accumulator, int kDepth>
double step_sum(const Step& step, const Vector<kDepth>& a, const Vector<kDepth>& b, int first, u32 c) {
  const i64 c_significand = Accumulator::significand(c);
  const int c_exponent = c_significand ? Accumulator::exponent(c) : kOfZero;
  int largest = c_exponent;
  for (int k = first; k < first + step.products; ++k) largest = std::max(largest, a.exponent[k] + b.exponent[k]);
  if (largest <= kOfZero / 2) return 0.0;
  i64 sum = shifted(c_significand, c_exponent - largest + step.fraction_bits - Accumulator::kMantissaBits);
  for (int k = first; k < first + step.products; ++k) {
    const int exponent = a.exponent[k] + b.exponent[k];
    sum += shifted(static_cast<i64>(a.significand[k]) * b.significand[k],
                   exponent - largest + step.fraction_bits - 2 * Format::kMantissaBits);
  }
  return std::ldexp(static_cast<double>(sum), largest - step.fraction_bits);
}

// f32 with kept_bits of mantissa, the others cut off.
inline u32 cut_to_f32(double x, int kept_bits) {
  float y = static_cast<float>(x);
  if (std::fabs(y) > std::fabs(x)) y = std::nextafter(y, 0.0f);
  return std::bit_cast<u32>(y) & ~0u << (23 - kept_bits);
}

inline u32 rounded(const Step& step, double sum, F32) { return cut_to_f32(sum, step.kept_bits); }
inline u32 rounded(const Step&, double sum, F16) { return F16::from(sum); }

template <class Format, int kDepth>
bool any_special(const u32 (&codes)[kDepth]) {
  return std::any_of(std::begin(codes), std::end(codes), [](u32 code) { return Format::special(code); });
}

// With infinity or NaN among the operands: that is what the sum is.
template <class Format, class Accumulator, int kDepth>
u32 special_sum(const u32 (&a)[kDepth], const u32 (&b)[kDepth], u32 c) {
  double sum = Accumulator::value(c);
  for (int k = 0; k < kDepth; ++k) sum += Format::value(a[k]) * Format::value(b[k]);
  return Accumulator::from(sum);
}

// c plus row times column, step by step.
template <class Format, class Accumulator, int kDepth>
u32 add_product(const Step& step, const u32 (&a)[kDepth], const u32 (&b)[kDepth], u32 c) {
  if (Accumulator::special(c) || any_special<Format>(a) || any_special<Format>(b)) {
    return special_sum<Format, Accumulator>(a, b, c);
  }
  const Vector<kDepth> a_parts = taken_apart<Format>(a), b_parts = taken_apart<Format>(b);
  for (int k = 0; k < kDepth && !Accumulator::special(c); k += step.products) {  // an infinite sum stays one
    c = rounded(step, step_sum<Format, Accumulator>(step, a_parts, b_parts, k, c), Accumulator{});
  }
  return c;
}

}  // namespace sim
