// The next copy starts before the barrier that ends the reads of the last.
#include "fault.h"
#include "sage/ptx/cp_async.cuh"
#include "sage/ptx/shared.cuh"

extern "C" __global__ void copy_into_read_buffer(const __grid_constant__ Params params) {
  extern __shared__ __align__(128) unsigned char shared[];
  const unsigned first = sage::ptx::shared_address(shared);
  for (int i = 0; i < 2; ++i) {
    sage::ptx::cp_async_16(first + 16 * threadIdx.x, params.in);  // fault: data race
    sage::ptx::cp_async_commit();
    sage::ptx::cp_async_wait<0>();
    __syncthreads();
    params.out[threadIdx.x] = sage::ptx::load_shared_f32(first + 16 * (63 - threadIdx.x));  // fault: data race | asynchronous copy read before it was waited for
  }
}
