// Meanings of templates/include/sage/ptx/barrier.cuh.
#pragma once

#include "sage/types.cuh"

namespace sage::ptx {

inline void barrier_sync(u32 barrier, u32 threads, sim::Site site = sim::Site::here()) {
  sim::barrier_arrive(barrier, threads, true, site);
}

inline void barrier_arrive(u32 barrier, u32 threads, sim::Site site = sim::Site::here()) {
  sim::barrier_arrive(barrier, threads, false, site);
}

}  // namespace sage::ptx
