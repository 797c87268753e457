#include "fault.h"
#include "sage/ptx/cp_async.cuh"
#include "sage/ptx/shared.cuh"

extern "C" __global__ void copy_overwritten(const __grid_constant__ Params params) {
  extern __shared__ __align__(128) unsigned char shared[];
  sage::ptx::cp_async_16(sage::ptx::shared_address(shared) + 16 * threadIdx.x, params.in);
  sage::ptx::cp_async_commit();
  if (blockIdx.x == 1 && threadIdx.x == 20) {
    reinterpret_cast<float*>(shared)[81] = 0.0f;  // fault: buffer overwritten while an asynchronous copy into it is pending, block 1, thread 20
  }
  sage::ptx::cp_async_wait<0>();
}
