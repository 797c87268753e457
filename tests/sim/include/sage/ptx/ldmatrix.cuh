// Meanings of templates/include/sage/ptx/ldmatrix.cuh.
#pragma once

#include "sage/types.cuh"

namespace sage::ptx {

inline void ldmatrix_x4(u32 (&d)[4], u32 shared, sim::Site site = sim::Site::here()) {
  sim::ldmatrix_x4(d, shared, false, site);
}

inline void ldmatrix_x4_trans(u32 (&d)[4], u32 shared, sim::Site site = sim::Site::here()) {
  sim::ldmatrix_x4(d, shared, true, site);
}

inline void stmatrix_x4(u32 shared, const u32 (&s)[4], sim::Site site = sim::Site::here()) {
  sim::stmatrix_x4(shared, s, site);
}

}  // namespace sage::ptx
