// Meanings of templates/include/sage/ptx/mma.cuh; fragments and sums stand in engine/mma.cpp.
#pragma once

#include "sage/types.cuh"

namespace sage::ptx {

template <class T, i32 kSize>
using Array = T[kSize];

template <class T, i32 kSize>
inline const Array<T, kSize>& chain(i32 step, const T (&start)[kSize], const T (&result)[kSize]) {
  return step == 0 ? start : result;
}

// Accumulators cross as words.
template <class T, i32 kSize>
inline void product(const char* instruction, sim::Meaning meaning, T (&d)[kSize], const u32 (&a)[4], u32 b0, u32 b1,
                    const T (&c)[kSize], sim::Site site) {
  static_assert(sizeof(T) == sizeof(u32));
  sim::Product lane{reinterpret_cast<u32*>(d), a, {b0, b1}, reinterpret_cast<const u32*>(c)};
  sim::together(instruction, &lane, meaning, site);
}

inline void mma_m16n8k32_s8s8s32(i32 (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, const i32 (&c)[4],
                                 sim::Site site = sim::Site::here()) {
  product("mma.m16n8k32.s8", sim::mma_s8, d, a, b0, b1, c, site);
}

inline void mma_m16n8k32_u8s8s32(i32 (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, const i32 (&c)[4],
                                 sim::Site site = sim::Site::here()) {
  product("mma.m16n8k32.u8.s8", sim::mma_u8s8, d, a, b0, b1, c, site);
}

inline void mma_m16n8k64_s4s4s32(i32 (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, const i32 (&c)[4],
                                 sim::Site site = sim::Site::here()) {
  product("mma.m16n8k64.s4", sim::mma_s4, d, a, b0, b1, c, site);
}

inline void mma_m16n8k16_f16f16f32(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, const float (&c)[4],
                                   sim::Site site = sim::Site::here()) {
  product("mma.m16n8k16.f16", sim::mma_f16, d, a, b0, b1, c, site);
}

inline void mma_m16n8k16_bf16bf16f32(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, const float (&c)[4],
                                     sim::Site site = sim::Site::here()) {
  product("mma.m16n8k16.bf16", sim::mma_bf16, d, a, b0, b1, c, site);
}

inline void mma_m16n8k32_e4m3e4m3f32(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, const float (&c)[4],
                                     sim::Site site = sim::Site::here()) {
  product("mma.m16n8k32.e4m3", sim::mma_e4m3_f32, d, a, b0, b1, c, site);
}

inline void mma_m16n8k32_e4m3e4m3f16(u32 (&d)[2], const u32 (&a)[4], u32 b0, u32 b1, const u32 (&c)[2],
                                     sim::Site site = sim::Site::here()) {
  product("mma.m16n8k32.e4m3.f16", sim::mma_e4m3_f16, d, a, b0, b1, c, site);
}

inline void scaled_product(const char* instruction, sim::Meaning meaning, float (&d)[4], const u32 (&a)[4], u32 b0,
                           u32 b1, const float (&c)[4], u32 a_scale, u32 b_scale, u32 b_lane, sim::Site site) {
  sim::ScaledProduct lane{{reinterpret_cast<u32*>(d), a, {b0, b1}, reinterpret_cast<const u32*>(c)},
                          a_scale,
                          b_scale,
                          b_lane};
  sim::together(instruction, &lane, meaning, site);
}

inline void mma_m16n8k32_mxf8_e4m3e4m3f32(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, const float (&c)[4],
                                          u32 a_scale, u32 b_scale, sim::Site site = sim::Site::here()) {
  scaled_product("mma.m16n8k32.mxf8.e4m3", sim::mma_mxf8_e4m3, d, a, b0, b1, c, a_scale, b_scale, 0, site);
}

inline void mma_m16n8k64_nvfp4_e2m1e2m1f32(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, const float (&c)[4],
                                           u32 a_scale, u32 b_scale, u16 b_lane, sim::Site site = sim::Site::here()) {
  scaled_product("mma.m16n8k64.nvfp4", sim::mma_nvfp4, d, a, b0, b1, c, a_scale, b_scale, b_lane, site);
}

}  // namespace sage::ptx
