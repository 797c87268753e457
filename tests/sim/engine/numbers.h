// Small floating-point formats: their values, and rounding to them.
// Source: PTX ISA, "Fundamental Types" and "cvt"; IEEE 754-2008; "FP8 Formats for Deep Learning" (arXiv:2209.05433).
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>

#include "types.h"

namespace sim {

// Powers of two and exponents of normal f64, faster than the library's. All numbers of smaller formats and their
// products are normal f64. The exponent of zero is -1023, that of infinity 1024.
inline double power_of_two(int exponent) { return std::bit_cast<double>(static_cast<u64>(exponent + 1023) << 52); }
inline int exponent_of(double x) { return static_cast<int>(std::bit_cast<u64>(x) >> 52 & 0x7ff) - 1023; }

// From the highest bit: a sign, kExponentBits of exponent, biased by 2^(kExponentBits - 1) - 1, kMantissaBits of
// mantissa.
template <int kExponentBits_, int kMantissaBits_>
struct Format {
  static constexpr int kMantissaBits = kMantissaBits_;
  static constexpr int kBias = (1 << (kExponentBits_ - 1)) - 1;
  static constexpr int kLeast = 1 - kBias;  // exponent of the least normal number, and of subnormal ones
  static constexpr u32 kMantissa = (1u << kMantissaBits) - 1;
  static constexpr u32 kExponents = (1u << kExponentBits_) - 1;
  static constexpr u32 kSign = 1u << (kExponentBits_ + kMantissaBits);

  static constexpr u32 exponent_field(u32 bits) { return bits >> kMantissaBits & kExponents; }
  static constexpr int exponent(u32 bits) {
    return exponent_field(bits) ? static_cast<int>(exponent_field(bits)) - kBias : kLeast;
  }

  // In units of 2^(exponent - kMantissaBits), with the sign.
  static constexpr i32 significand(u32 bits) {
    const i32 magnitude = static_cast<i32>((bits & kMantissa) | (exponent_field(bits) ? kMantissa + 1 : 0));
    return bits & kSign ? -magnitude : magnitude;
  }

  // The value of bits that are neither infinity nor NaN.
  static double finite_value(u32 bits) { return significand(bits) * power_of_two(exponent(bits) - kMantissaBits); }

  // The nearest of the format's numbers, ties to even, as if exponents had no upper end.
  static double nearest(double x) {
    const int unit = std::max(exponent_of(x), kLeast) - kMantissaBits;
    return std::nearbyint(x * power_of_two(-unit)) * power_of_two(unit);
  }

  // The bits of one of the format's numbers.
  static u32 bits(double number) {
    const u32 sign = std::signbit(number) ? kSign : 0;
    const double magnitude = std::fabs(number);
    if (magnitude < power_of_two(kLeast)) {
      return sign | static_cast<u32>(magnitude * power_of_two(kMantissaBits - kLeast));
    }
    const int exponent = exponent_of(magnitude);
    const u32 significand = static_cast<u32>(magnitude * power_of_two(kMantissaBits - exponent));
    return sign | static_cast<u32>(exponent + kBias) << kMantissaBits | (significand & kMantissa);
  }
};

// Formats whose highest exponent stands for infinity and NaN.
template <int kExponentBits, int kMantissaBits>
struct Ieee : Format<kExponentBits, kMantissaBits> {
  using Base = Format<kExponentBits, kMantissaBits>;
  static constexpr u32 kNan = Base::kSign - 1;  // the only NaN that instructions make
  static constexpr u32 kInfinity = Base::kExponents << kMantissaBits;

  static constexpr bool special(u32 bits) { return (bits & kInfinity) == kInfinity; }

  static double value(u32 bits) {
    if (!special(bits)) return Base::finite_value(bits);
    return bits & Base::kMantissa ? NAN : bits & Base::kSign ? -INFINITY : INFINITY;
  }

  static u32 from(double x) {
    if (x != x) return kNan;
    const double y = Base::nearest(x);
    return std::fabs(y) < power_of_two(Base::kBias + 1) ? Base::bits(y) : (x < 0 ? Base::kSign : 0) | kInfinity;
  }
};

using F16 = Ieee<5, 10>;
using Bf16 = Ieee<8, 7>;
using F32 = Ieee<8, 23>;

// One NaN and no infinity; numbers that are too large become the largest number.
struct E4m3 : Format<4, 3> {
  static constexpr u32 kNan = kSign - 1;
  static constexpr double kLargest = 448;

  static constexpr bool special(u32 bits) { return (bits & kNan) == kNan; }

  static double value(u32 bits) { return special(bits) ? NAN : finite_value(bits); }

  static u32 from(double x) {
    if (x != x) return kNan;
    return bits(std::copysign(std::fabs(x) < kLargest ? nearest(std::fabs(x)) : kLargest, x));
  }
};

// Neither NaN nor infinity: numbers that are too large become the largest number, with their sign; NaN becomes 6.
struct E2m1 : Format<2, 1> {
  static constexpr double kLargest = 6;

  static u32 from(double x) {
    if (x != x) return bits(kLargest);
    return bits(std::copysign(std::fabs(x) < kLargest ? nearest(std::fabs(x)) : kLargest, x));
  }
};

}  // namespace sim
