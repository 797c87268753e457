// Meanings of templates/include/sage/ptx/bulk_copy.cuh.
#pragma once

#include "sage/types.cuh"

namespace sage::ptx {

inline void bulk_copy(u32 shared, const void* global, u32 bytes, u32 barrier, sim::Site site = sim::Site::here()) {
  sim::bulk_copy(shared, global, bytes, barrier, site);
}

}  // namespace sage::ptx
