// Meanings of templates/include/sage/ptx/shared_vectors.cuh.
#pragma once

#include "sage/ptx/shared.cuh"

namespace sage::ptx {

inline void store_shared_u32x4(u32 shared, const U32x4& x, sim::Site site = sim::Site::here()) {
  sim::store_shared("st.shared.v4.b32", shared, &x, sizeof x, site);
}

}  // namespace sage::ptx
