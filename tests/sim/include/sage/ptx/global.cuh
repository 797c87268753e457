// Meanings of templates/include/sage/ptx/global.cuh.
#pragma once

#include "sage/ptx/shared.cuh"

namespace sage::ptx {

inline U32x4 load_global_u32x4(const void* address, bool exists) {
  return exists ? *static_cast<const U32x4*>(address) : U32x4{};
}

inline i32 load_global_i32(const i32* address, bool exists, i32 otherwise) { return exists ? *address : otherwise; }

inline void store_global_f32x2(float* address, const F32x2& x, sim::Site site = sim::Site::here()) {
  sim::store_global("st.global.v2.f32", address, &x, sizeof x, site);
}

inline void store_global_u32x4(void* address, const U32x4& x, sim::Site site = sim::Site::here()) {
  sim::store_global("st.global.v4.b32", address, &x, sizeof x, site);
}

}  // namespace sage::ptx
