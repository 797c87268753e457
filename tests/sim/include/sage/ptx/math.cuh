// Meanings of templates/include/sage/ptx/math.cuh; what each conversion does to a value stands in engine/numbers.h.
#pragma once

#include "sage/types.cuh"

namespace sage::ptx {

inline float infinity() { return __int_as_float(0x7f800000); }
inline float quiet_nan() { return __int_as_float(0x7fc00000); }

inline float ex2(float x) { return sim::exp2_ftz(x); }
inline float lg2(float x) { return sim::log2(x); }
inline float rcp(float x) { return sim::reciprocal_ftz(x); }

inline float f32_from_f16(u16 x) { return sim::from_f16(x); }
inline float f32_from_bf16(u16 x) { return __uint_as_float(static_cast<u32>(x) << 16); }

inline unsigned to_f16(float x) { return sim::to_f16(x); }
inline unsigned to_bf16(float x) { return sim::to_bf16(x); }

inline u32 f16x2(float lo, float hi) { return sim::to_f16(lo) | static_cast<u32>(sim::to_f16(hi)) << 16; }
inline u32 bf16x2(float lo, float hi) { return sim::to_bf16(lo) | static_cast<u32>(sim::to_bf16(hi)) << 16; }
// A word of two halves, of which those that are infinite become the finite number next to infinity.
template <u32 kInfinity>
inline u32 saturated(u32 halves) {
  for (u32 shift = 0; shift < 32; shift += 16) {
    if ((halves >> shift & 0x7fff) == kInfinity) halves -= 1u << shift;
  }
  return halves;
}
inline u32 finite_f16x2(float lo, float hi) { return saturated<0x7c00>(f16x2(lo, hi)); }
inline u32 finite_bf16x2(float lo, float hi) { return saturated<0x7f80>(bf16x2(lo, hi)); }
inline u16 e4m3x2(float lo, float hi) { return static_cast<u16>(sim::to_e4m3(lo) | sim::to_e4m3(hi) << 8); }
inline u32 e4m3x4(float a, float b, float c, float d) { return e4m3x2(a, b) | static_cast<u32>(e4m3x2(c, d)) << 16; }

inline u32 u8x4(float a, float b, float c, float d) {
  const auto byte = [](float x) { return x >= 255.0f ? 255u : x > 0.0f ? static_cast<u32>(__builtin_rintf(x)) : 0u; };
  return byte(a) | byte(b) << 8 | byte(c) << 16 | byte(d) << 24;
}

inline float sqrt(float x) { return __builtin_sqrtf(x); }

inline i32 dot_s8x4(u32 a, u32 b, i32 c) {
  for (u32 shift = 0; shift < 32; shift += 8) c += static_cast<i8>(a >> shift) * static_cast<i8>(b >> shift);
  return c;
}

inline u32 e2m1x8(const float (&x)[8]) {
  u32 word = 0;
  for (i32 i = 0; i < 8; ++i) word |= static_cast<u32>(sim::to_e2m1(x[i])) << 4 * i;
  return word;
}

inline float max_nan(float a, float b) { return sim::max_nan(a, b); }
// Of the halves of two words, f16 or bf16.
template <float (*kFrom)(u16), unsigned (*kTo)(float), float (*kPick)(float, float)>
inline u32 pick_halves(u32 a, u32 b) {
  u32 picked[2];
  for (i32 i = 0; i < 2; ++i) {
    picked[i] = kTo(kPick(kFrom(static_cast<u16>(a >> 16 * i)), kFrom(static_cast<u16>(b >> 16 * i))));
  }
  return picked[0] | picked[1] << 16;
}

inline float min_nan(float a, float b) { return a != a || b != b ? max_nan(a, b) : -max_nan(-a, -b); }
inline u32 max_nan_bf16x2(u32 a, u32 b) { return pick_halves<f32_from_bf16, to_bf16, max_nan>(a, b); }
inline u32 min_nan_bf16x2(u32 a, u32 b) { return pick_halves<f32_from_bf16, to_bf16, min_nan>(a, b); }
inline u32 max_nan_f16x2(u32 a, u32 b) { return pick_halves<f32_from_f16, to_f16, max_nan>(a, b); }
inline u32 min_nan_f16x2(u32 a, u32 b) { return pick_halves<f32_from_f16, to_f16, min_nan>(a, b); }

inline u32 prmt(u32 a, u32 b, u32 selector) { return sim::permute_bytes(a, b, selector); }

}  // namespace sage::ptx
