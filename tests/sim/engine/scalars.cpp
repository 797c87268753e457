// Scalar instructions. Where the ISA bounds the error and leaves the bits open (ex2, lg2, rcp), the result is the
// nearest number.
// Source: PTX ISA, "ex2", "lg2", "rcp", "max", "prmt", "cvt".

#include <bit>
#include <cmath>

#include "numbers.h"
#include "sim/engine.h"

namespace sim {

namespace {

constexpr float kLeastNormal = 0x1p-126f;

float flush(float x) { return std::fabs(x) < kLeastNormal ? std::copysign(0.0f, x) : x; }

// Tables measured on a chip, or null: by mantissa of x in [1, 2), the bits of 2^x and of 2^-x.
const u32 *measured_up = nullptr, *measured_down = nullptr;

constexpr int kMantissaBits = 23;

// 2^x as the measured chip computes it: |x| is cut off to a multiple of 2^-23, whose fraction alone determines the
// mantissa of the result.
float exp2_as_measured(float x) {
  if (!(std::fabs(x) < 256.0f)) return std::exp2(x);
  const u32 units = static_cast<u32>(std::ldexp(std::fabs(x), kMantissaBits));
  const u32 fraction = units & ((1u << kMantissaBits) - 1);
  const int power = static_cast<int>(units >> kMantissaBits) - 1;  // beyond the [1, 2) of the tables
  const float at_fraction = std::bit_cast<float>(x < 0 ? measured_down[fraction] : measured_up[fraction]);
  return flush(std::ldexp(at_fraction, x < 0 ? -power : power));
}

}  // namespace

void set_exp2(const u32* up, const u32* down) { measured_up = up, measured_down = down; }

float exp2_ftz(float x) {
  if (measured_up) return exp2_as_measured(flush(x));
  return flush(static_cast<float>(std::exp2(static_cast<double>(flush(x)))));
}

float log2(float x) { return static_cast<float>(std::log2(static_cast<double>(x))); }
float reciprocal_ftz(float x) { return flush(static_cast<float>(1.0 / static_cast<double>(flush(x)))); }

float max_nan(float a, float b) {
  if (a != a || b != b) return std::bit_cast<float>(F32::kNan);
  if (a == b) return std::signbit(a) ? b : a;
  return a > b ? a : b;
}

u32 permute_bytes(u32 a, u32 b, u32 selector) {
  const u64 bytes = static_cast<u64>(b) << 32 | a;
  u32 result = 0;
  for (int i = 0; i < 4; ++i) {
    const u32 digit = selector >> 4 * i & 15;
    u32 byte = static_cast<u32>(bytes >> 8 * (digit & 7)) & 0xff;
    if (digit & 8) byte = byte & 0x80 ? 0xff : 0;  // the byte's sign, eight times
    result |= byte << 8 * i;
  }
  return result;
}

float from_f16(u16 x) {
  const u32 sign = static_cast<u32>(x & F16::kSign) << 16;
  if (F16::special(x)) return std::bit_cast<float>(x & F16::kMantissa ? F32::kNan : sign | F32::kInfinity);
  return std::copysign(static_cast<float>(F16::value(x)), sign ? -1.0f : 1.0f);
}

u16 to_f16(float x) { return static_cast<u16>(F16::from(x)); }
u16 to_bf16(float x) { return static_cast<u16>(Bf16::from(x)); }
float from_e4m3(u8 x) { return static_cast<float>(E4m3::value(x)); }
u8 to_e4m3(float x) { return static_cast<u8>(E4m3::from(x)); }
u8 to_e2m1(float x) { return static_cast<u8>(E2m1::from(x)); }

}  // namespace sim
