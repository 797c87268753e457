// Meanings of templates/include/sage/ptx/f16x2.cuh.
#pragma once

#include "sage/ptx/math.cuh"

namespace sage::ptx {

// What `operation` makes of each half of a and b. A sum or a product of two f16 fits into an f64.
template <class Operation>
inline u32 of_halves(u32 a, u32 b, Operation operation) {
  u32 y = 0;
  for (u32 shift = 0; shift < 32; shift += 16) {
    const double x = operation(static_cast<double>(sim::from_f16(static_cast<u16>(a >> shift))),
                               static_cast<double>(sim::from_f16(static_cast<u16>(b >> shift))));
    y |= static_cast<u32>(sim::to_f16(static_cast<float>(x))) << shift;
  }
  return y;
}

inline u32 add_f16x2(u32 a, u32 b) {
  return of_halves(a, b, [](double x, double y) { return x + y; });
}
inline u32 sub_f16x2(u32 a, u32 b) {
  return of_halves(a, b, [](double x, double y) { return x - y; });
}
inline u32 mul_f16x2(u32 a, u32 b) {
  return of_halves(a, b, [](double x, double y) { return x * y; });
}

inline u32 max_f16x2(u32 a, u32 b) {
  return of_halves(a, b, [](double x, double y) { return x > y ? x : y; });
}
inline u32 min_f16x2(u32 a, u32 b) {
  return of_halves(a, b, [](double x, double y) { return x < y ? x : y; });
}

inline u32 e4m3x2_of_f16x2(u32 x) {
  return e4m3x2(sim::from_f16(static_cast<u16>(x)), sim::from_f16(static_cast<u16>(x >> 16)));
}
inline u32 f16x2_of_e4m3x2(u32 x) {
  return f16x2(sim::from_e4m3(static_cast<u8>(x)), sim::from_e4m3(static_cast<u8>(x >> 8)));
}

}  // namespace sage::ptx
