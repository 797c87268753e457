// Registers a thread, changed by all warps of a warpgroup together. The sum over the block may not exceed what the kernel
// was launched with; kRegisters is a multiple of 8 from 24 to 256.
// Source: PTX ISA, "setmaxnreg".
#pragma once

#include "sage/types.cuh"

namespace sage::ptx {

// Waits until that many are free.
template <i32 kRegisters>
__device__ __forceinline__ void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <i32 kRegisters>
__device__ __forceinline__ void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace sage::ptx
