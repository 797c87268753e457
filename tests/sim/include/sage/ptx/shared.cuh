// Meanings of templates/include/sage/ptx/shared.cuh.
#pragma once

#include "sage/types.cuh"

namespace sage::ptx {

inline u32 shared_address(const void* pointer, sim::Site site = sim::Site::here()) {
  return __cvta_generic_to_shared(pointer, site);
}

inline float load_shared_f32(u32 shared, sim::Site site = sim::Site::here()) {
  return *static_cast<const float*>(sim::load_shared("ld.shared.f32", shared, 4, site));
}

struct F32x2 {
  float x, y;
};

inline F32x2 load_shared_f32x2(u32 shared, sim::Site site = sim::Site::here()) {
  return *static_cast<const F32x2*>(sim::load_shared("ld.shared.v2.f32", shared, 8, site));
}

}  // namespace sage::ptx
