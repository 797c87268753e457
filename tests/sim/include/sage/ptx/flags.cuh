// Meanings of templates/include/sage/ptx/flags.cuh. Blocks run one after another, in their order.
#pragma once

#include "sage/types.cuh"

namespace sage::ptx {

inline u32 load_flag(const u32* address) {
  sim::see_flag();
  return *address;
}
inline void store_flag(u32* address, u32 x, sim::Site site = sim::Site::here()) {
  sim::check_before_flag(site);
  sim::store_global("st.relaxed.gpu.global.u32", address, &x, sizeof x, site);
}
inline void fence_gpu() { sim::fence_gpu(); }

}  // namespace sage::ptx
