// Meanings of templates/include/sage/ptx/bulk_sums.cuh; asynchrony lives in engine/bulk_stores.h.
#pragma once

#include "sage/types.cuh"

namespace sage::ptx {

inline void bulk_store(void* global, u32 shared, u32 bytes, sim::Site site = sim::Site::here()) {
  sim::bulk_store(global, shared, bytes, false, site);
}
inline void bulk_add_f32(void* global, u32 shared, u32 bytes, sim::Site site = sim::Site::here()) {
  sim::bulk_store(global, shared, bytes, true, site);
}
inline void bulk_commit() { sim::bulk_commit(); }
inline void bulk_wait_read(sim::Site site = sim::Site::here()) { sim::bulk_wait(true, site); }
inline void bulk_wait(sim::Site site = sim::Site::here()) { sim::bulk_wait(false, site); }

}  // namespace sage::ptx
