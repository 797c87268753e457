// Waits for its own copies and reads another thread's: pending or landed, never safe.
#include "fault.h"
#include "sage/ptx/cp_async.cuh"
#include "sage/ptx/shared.cuh"

extern "C" __global__ void copy_without_barrier(const __grid_constant__ Params params) {
  extern __shared__ __align__(128) unsigned char shared[];
  const unsigned first = sage::ptx::shared_address(shared);
  sage::ptx::cp_async_16(first + 16 * threadIdx.x, params.in);
  sage::ptx::cp_async_commit();
  sage::ptx::cp_async_wait<0>();
  __syncthreads();
  sage::ptx::cp_async_16(first + 1024 + 16 * threadIdx.x, params.in);
  sage::ptx::cp_async_commit();
  sage::ptx::cp_async_wait<0>();
  if (threadIdx.x < 32) {
    params.out[threadIdx.x] = sage::ptx::load_shared_f32(first + 1024 + 16 * (threadIdx.x + 32));  // fault: data race | asynchronous copy read before it was waited for | read of memory that nothing wrote
  }
}
