// Meanings of templates/include/sage/ptx/global.cuh.
#pragma once

#include "sage/ptx/shared.cuh"

namespace sage::ptx {

inline void store_global_u32x4(void* address, const U32x4& x, sim::Site site = sim::Site::here()) {
  sim::store_global("st.global.v4.b32", address, &x, sizeof x, site);
}

}  // namespace sage::ptx
