// Meanings of templates/include/sage/ptx/mbarrier.cuh; phases live in engine/barriers.h.
#pragma once

#include "sage/types.cuh"

namespace sage::ptx {

inline void mbarrier_init(u32 barrier, u32 arrivals, sim::Site site = sim::Site::here()) {
  sim::mbarrier_init(barrier, arrivals, site);
}

inline void fence_mbarrier_init() { sim::fence_mbarrier_init(); }

inline void mbarrier_arrive(u32 barrier, sim::Site site = sim::Site::here()) { sim::mbarrier_arrive(barrier, 0, site); }

inline void mbarrier_arrive_expect_tx(u32 barrier, u32 bytes, sim::Site site = sim::Site::here()) {
  sim::mbarrier_arrive(barrier, bytes, site);
}

inline void mbarrier_wait(u32 barrier, u32 parity, sim::Site site = sim::Site::here()) {
  sim::mbarrier_wait(barrier, parity, site);
}

}  // namespace sage::ptx
