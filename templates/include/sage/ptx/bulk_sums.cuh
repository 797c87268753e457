// TMA bulk copies of consecutive bytes from shared to global memory, in groups of the thread that issues them. They
// read shared memory through the async proxy.
// Source: PTX ISA, "cp.async.bulk", "cp.reduce.async.bulk", "cp.async.bulk.commit_group", "cp.async.bulk.wait_group".
#pragma once

#include "sage/types.cuh"

namespace sage::ptx {

// Addresses and `bytes` must be multiples of 16.
__device__ __forceinline__ void bulk_store(void* global, u32 shared, u32 bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global), "r"(shared), "r"(bytes)
               : "memory");
}

// Adds f32 to f32, each by an atomic operation.
__device__ __forceinline__ void bulk_add_f32(void* global, u32 shared, u32 bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(global), "r"(shared),
               "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Waits until all groups of this thread have read shared memory.
__device__ __forceinline__ void bulk_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }

// Waits until all groups of this thread have written.
__device__ __forceinline__ void bulk_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

}  // namespace sage::ptx
