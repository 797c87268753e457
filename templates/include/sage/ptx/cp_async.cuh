// Asynchronous copies from global to shared memory, 16 bytes a thread.
// Source: PTX ISA, "cp.async", "cp.async.commit_group", "cp.async.wait_group".
#pragma once

#include "sage/types.cuh"

namespace sage::ptx {

// Both addresses must be multiples of 16. .cg caches in L2 alone: nothing would read the line again from L1.
__device__ __forceinline__ void cp_async_16(u32 shared, const void* global) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared), "l"(global) : "memory");
}

// The same where `exists`; else 16 bytes of zeros, and `global` is not read.
__device__ __forceinline__ void cp_async_16_or_zeros(u32 shared, const void* global, bool exists) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(exists ? 16 : 0)
               : "memory");
}

// Ends a group: all copies of this thread since the last commit.
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most kPending of this thread's groups are in flight. To read other threads' copies, add a barrier.
template <i32 kPending>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace sage::ptx
