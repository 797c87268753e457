// Meanings of templates/include/sage/ptx/cp_async.cuh; asynchrony lives in engine/copies.h.
#pragma once

#include "sage/types.cuh"

namespace sage::ptx {

inline void cp_async_16(u32 shared, const void* global, sim::Site site = sim::Site::here()) {
  sim::copy_async(shared, global, 16, site);
}

inline void cp_async_16_or_zeros(u32 shared, const void* global, bool exists, sim::Site site = sim::Site::here()) {
  sim::copy_async(shared, exists ? global : nullptr, 16, site);
}

inline void cp_async_commit() { sim::commit_copies(); }

template <i32 kPending>
inline void cp_async_wait() {
  sim::wait_for_copies(kPending);
}

}  // namespace sage::ptx
