// The order between ordinary accesses to shared memory and those of the async proxy: bulk copies, and the operands that
// wgmma reads.
// Source: PTX ISA, "Async proxy", "membar / fence".
#pragma once

#include "sage/types.cuh"

namespace sage::ptx {

// Call this after the thread's ordinary writes, and before the barrier after which the async proxy accesses the bytes.
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// The same for all memory, also global memory that other blocks wrote through the async proxy.
__device__ __forceinline__ void fence_proxy_async_all() { asm volatile("fence.proxy.async;" ::: "memory"); }

}  // namespace sage::ptx
