// Meanings of templates/include/sage/ptx/wgmma.cuh; products run in engine/wgmma.h.
#pragma once

#include "sage/types.cuh"

namespace sage::ptx {

inline void wgmma_fence(sim::Site site = sim::Site::here()) { sim::wgmma_fence(site); }
inline void wgmma_commit(sim::Site site = sim::Site::here()) { sim::wgmma_commit(site); }

template <i32 kPending>
inline void wgmma_wait(sim::Site site = sim::Site::here()) {
  sim::wgmma_wait(kPending, site);
}

// D crosses as words; its size says how many columns there are.
template <class T, i32 kSize>
inline void warpgroup_product(const char* instruction, T (&d)[kSize], const u32* a, u64 a_matrix, u64 b,
                              bool accumulate, sim::Site site) {
  const bool integers = T(0.5f) == 0;
  sim::wgmma(instruction, {reinterpret_cast<u32*>(d), a, a_matrix, b, 2 * kSize, accumulate, site}, integers);
}

inline void wgmma_m64n64k32_s8s8s32(i32 (&d)[32], const u32 (&a)[4], u64 b, bool accumulate,
                                    sim::Site site = sim::Site::here()) {
  warpgroup_product("wgmma.m64n64k32.s8", d, a, 0, b, accumulate, site);
}

inline void wgmma_m64n64k32_s8s8s32(i32 (&d)[32], u64 a, u64 b, bool accumulate, sim::Site site = sim::Site::here()) {
  warpgroup_product("wgmma.m64n64k32.s8", d, nullptr, a, b, accumulate, site);
}

inline void wgmma_m64n64k32_e4m3e4m3f32(float (&d)[32], const u32 (&a)[4], u64 b, bool accumulate,
                                        sim::Site site = sim::Site::here()) {
  warpgroup_product("wgmma.m64n64k32.e4m3", d, a, 0, b, accumulate, site);
}

inline void wgmma_m64n128k32_s8s8s32(i32 (&d)[64], const u32 (&a)[4], u64 b, bool accumulate,
                                     sim::Site site = sim::Site::here()) {
  warpgroup_product("wgmma.m64n128k32.s8", d, a, 0, b, accumulate, site);
}

inline void wgmma_m64n128k32_s8s8s32(i32 (&d)[64], u64 a, u64 b, bool accumulate, sim::Site site = sim::Site::here()) {
  warpgroup_product("wgmma.m64n128k32.s8", d, nullptr, a, b, accumulate, site);
}

inline void wgmma_m64n128k32_e4m3e4m3f32(float (&d)[64], const u32 (&a)[4], u64 b, bool accumulate,
                                         sim::Site site = sim::Site::here()) {
  warpgroup_product("wgmma.m64n128k32.e4m3", d, a, 0, b, accumulate, site);
}

inline void wgmma_m64n72k32_e4m3e4m3f32(float (&d)[36], const u32 (&a)[4], u64 b, bool accumulate,
                                        sim::Site site = sim::Site::here()) {
  warpgroup_product("wgmma.m64n72k32.e4m3", d, a, 0, b, accumulate, site);
}

inline void wgmma_m64n136k32_e4m3e4m3f32(float (&d)[68], const u32 (&a)[4], u64 b, bool accumulate,
                                         sim::Site site = sim::Site::here()) {
  warpgroup_product("wgmma.m64n136k32.e4m3", d, a, 0, b, accumulate, site);
}

}  // namespace sage::ptx
