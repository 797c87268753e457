// Meanings of templates/include/sage/ptx/setmaxnreg.cuh.
#pragma once

#include "sage/types.cuh"

namespace sage::ptx {

template <i32 kRegisters>
inline void setmaxnreg_inc(sim::Site site = sim::Site::here()) {
  sim::set_registers(kRegisters, site);
}

template <i32 kRegisters>
inline void setmaxnreg_dec(sim::Site site = sim::Site::here()) {
  sim::set_registers(kRegisters, site);
}

}  // namespace sage::ptx
