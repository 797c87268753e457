// Meanings of templates/include/sage/ptx/setmaxnreg.cuh.
#pragma once

#include "sage/types.cuh"

namespace sage::ptx {

constexpr bool is_register_count(i32 registers) { return registers % 8 == 0 && registers >= 24 && registers <= 256; }

template <i32 kRegisters>
inline void setmaxnreg_inc(sim::Site site = sim::Site::here()) {
  static_assert(is_register_count(kRegisters), "a multiple of 8 from 24 to 256");
  sim::set_registers(kRegisters, site);
}

template <i32 kRegisters>
inline void setmaxnreg_dec(sim::Site site = sim::Site::here()) {
  static_assert(is_register_count(kRegisters), "a multiple of 8 from 24 to 256");
  sim::set_registers(kRegisters, site);
}

}  // namespace sage::ptx
