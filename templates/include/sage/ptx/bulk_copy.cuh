// TMA bulk copies of consecutive bytes. They write shared memory through the async proxy.
// Source: PTX ISA, "cp.async.bulk".
#pragma once

#include "sage/types.cuh"

namespace sage::ptx {

// One thread issues a copy. Addresses and `bytes` must be multiples of 16. `barrier`: the mbarrier that counts the
// bytes that have landed.
__device__ __forceinline__ void bulk_copy(u32 shared, const void* global, u32 bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared),
               "l"(global), "r"(bytes), "r"(barrier)
               : "memory");
}

}  // namespace sage::ptx
