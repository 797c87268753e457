// Meanings of templates/include/sage/ptx/wgmma.cuh; products run in engine/wgmma.h.
#pragma once

#include <type_traits>

#include "sage/types.cuh"

namespace sage::ptx {

inline void wgmma_fence(sim::Site site = sim::Site::here()) { sim::wgmma_fence(site); }
inline void wgmma_commit(sim::Site site = sim::Site::here()) { sim::wgmma_commit(site); }

template <i32 kPending>
inline void wgmma_wait(sim::Site site = sim::Site::here()) {
  sim::wgmma_wait(kPending, site);
}

// D crosses as words: s32 as i32, the bits of f32 as u32. Its size says how many columns there are.
template <class T, i32 kSize>
inline void warpgroup_product(T (&d)[kSize], const u32* a, u64 a_matrix, u64 b, bool accumulate, sim::Site site) {
  static_assert(kSize == 32 || kSize == 36 || kSize == 64 || kSize == 68, "the shapes that have a wrapper");
  constexpr bool integers = std::is_same_v<T, i32>;
  sim::wgmma(integers ? "wgmma.m64k32.s8" : "wgmma.m64k32.e4m3",
             {integers ? sim::WarpgroupTypes::kS8 : sim::WarpgroupTypes::kE4m3, reinterpret_cast<u32*>(d), a, a_matrix,
              b, 2 * kSize, accumulate, false, false, site});
}

template <class T, i32 kSize>
inline void wgmma_m64k32(T (&d)[kSize], const u32 (&a)[4], u64 b, bool accumulate, sim::Site site = sim::Site::here()) {
  warpgroup_product(d, a, 0, b, accumulate, site);
}

template <i32 kSize>
inline void wgmma_m64k32(i32 (&d)[kSize], u64 a, u64 b, bool accumulate, sim::Site site = sim::Site::here()) {
  warpgroup_product(d, nullptr, a, b, accumulate, site);
}

// The products in 16 bits of the backward kernels.
#define SAGE_WGMMA_SHARED(name, types) \
  inline void name(i32 (&d)[32], u64 a, u64 b, bool accumulate, sim::Site site = sim::Site::here()) { \
    sim::wgmma(#name, {sim::WarpgroupTypes::types, reinterpret_cast<u32*>(d), nullptr, a, b, 64, accumulate, false, \
                       false, site}); \
  }
SAGE_WGMMA_SHARED(wgmma_m64n64_f16, kF16)
SAGE_WGMMA_SHARED(wgmma_m64n64_bf16, kBf16)
#undef SAGE_WGMMA_SHARED

#define SAGE_WGMMA_HELD(name, types) \
  inline void name(i32 (&d)[32], const u32 (&a)[4], u64 b, bool accumulate, sim::Site site = sim::Site::here()) { \
    sim::wgmma(#name, \
               {sim::WarpgroupTypes::types, reinterpret_cast<u32*>(d), a, 0, b, 64, accumulate, false, false, site}); \
  }
SAGE_WGMMA_HELD(wgmma_m64n64_f16, kF16)
SAGE_WGMMA_HELD(wgmma_m64n64_bf16, kBf16)
#undef SAGE_WGMMA_HELD

#define SAGE_WGMMA_ROWS_OF_K(name, types) \
  inline void name(float (&d)[32], const u32 (&a)[4], u64 b, sim::Site site = sim::Site::here()) { \
    sim::wgmma(#name, {sim::WarpgroupTypes::types, reinterpret_cast<u32*>(d), a, 0, b, 64, true, true, false, site}); \
  }
SAGE_WGMMA_ROWS_OF_K(wgmma_m64n64_f16_rows, kF16)
SAGE_WGMMA_ROWS_OF_K(wgmma_m64n64_bf16_rows, kBf16)
#undef SAGE_WGMMA_ROWS_OF_K

template <i32 kSize>
inline void wgmma_bf16_columns_by_rows(i32 (&d)[kSize], u64 a, u64 b, bool accumulate,
                                       sim::Site site = sim::Site::here()) {
  static_assert(kSize == 16 || kSize == 32, "the shapes that have a wrapper");
  sim::wgmma("wgmma_bf16_columns_by_rows", {sim::WarpgroupTypes::kBf16, reinterpret_cast<u32*>(d), nullptr, a, b,
                                            2 * kSize, accumulate, true, true, site});
}

}  // namespace sage::ptx
