// The thread commits, and does not wait.
#include "fault.h"
#include "sage/ptx/cp_async.cuh"
#include "sage/ptx/shared.cuh"

extern "C" __global__ void copy_read_early(const __grid_constant__ Params params) {
  extern __shared__ __align__(128) unsigned char shared[];
  const unsigned to = sage::ptx::shared_address(shared) + 16 * threadIdx.x;
  sage::ptx::cp_async_16(to, params.in + 4 * threadIdx.x);
  sage::ptx::cp_async_commit();
  if (blockIdx.x == 1 && threadIdx.x == 11) {
    params.out[0] = sage::ptx::load_shared_f32(to);  // fault: asynchronous copy read before it was waited for, block 1, thread 11
  }
  sage::ptx::cp_async_wait<0>();
}
