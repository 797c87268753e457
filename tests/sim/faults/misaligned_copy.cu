#include "fault.h"
#include "sage/ptx/cp_async.cuh"
#include "sage/ptx/shared.cuh"

extern "C" __global__ void misaligned_copy(const __grid_constant__ Params params) {
  extern __shared__ __align__(128) unsigned char shared[];
  const unsigned to = sage::ptx::shared_address(shared) + 16 * threadIdx.x;
  sage::ptx::cp_async_16(to + (blockIdx.x == 0 && threadIdx.x == 7 ? 8 : 0), params.in);  // fault: misaligned access, block 0, thread 7
  sage::ptx::cp_async_commit();
  sage::ptx::cp_async_wait<0>();
}
