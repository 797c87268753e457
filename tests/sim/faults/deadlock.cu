// One warp waits for the block, the other for a lane that waits for the block.
#include "fault.h"
#include "sage/ptx/warp.cuh"

extern "C" __global__ void deadlock(const __grid_constant__ Params params) {
  if (blockIdx.x == 0 && threadIdx.x >= 33) sage::ptx::any(true);  // fault: deadlock
  __syncthreads();                                                 // fault: deadlock
}
