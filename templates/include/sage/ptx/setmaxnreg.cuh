// Registers a thread, changed by all warps of a warpgroup together. The sum over the block must not exceed the
// registers with which the kernel was launched. kRegisters: a multiple of 8 from 24 to 256.
// Source: PTX ISA, "setmaxnreg".
#pragma once

#include "sage/types.cuh"

namespace sage::ptx {

__device__ constexpr bool is_register_count(i32 registers) {
  return registers % 8 == 0 && registers >= 24 && registers <= 256;
}

// Waits until the registers are free.
template <i32 kRegisters>
__device__ __forceinline__ void setmaxnreg_inc() {
  static_assert(is_register_count(kRegisters), "a multiple of 8 from 24 to 256");
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <i32 kRegisters>
__device__ __forceinline__ void setmaxnreg_dec() {
  static_assert(is_register_count(kRegisters), "a multiple of 8 from 24 to 256");
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace sage::ptx
