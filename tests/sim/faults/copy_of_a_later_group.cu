// Waits, but for the group before.
#include "fault.h"
#include "sage/ptx/cp_async.cuh"
#include "sage/ptx/shared.cuh"

extern "C" __global__ void copy_of_a_later_group(const __grid_constant__ Params params) {
  extern __shared__ __align__(128) unsigned char shared[];
  const unsigned to = sage::ptx::shared_address(shared) + 32 * threadIdx.x;
  sage::ptx::cp_async_16(to, params.in);
  sage::ptx::cp_async_commit();
  sage::ptx::cp_async_16(to + 16, params.in);
  sage::ptx::cp_async_commit();
  sage::ptx::cp_async_wait<1>();
  float x = sage::ptx::load_shared_f32(to);
  if (blockIdx.x == 0 && threadIdx.x == 50) {
    x = sage::ptx::load_shared_f32(to + 16);  // fault: asynchronous copy read before it was waited for, block 0, thread 50
  }
  params.out[threadIdx.x] = x;
  sage::ptx::cp_async_wait<0>();
}
