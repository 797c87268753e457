// What the compiler is told that a whole warp has, one lane has otherwise.
#include "fault.h"
#include "sage/ptx/warp.cuh"

extern "C" __global__ void not_uniform(const __grid_constant__ Params params) {
  const int warp = threadIdx.x / 32, stray = blockIdx.x == 1 && threadIdx.x == 37;
  params.out[threadIdx.x] = sage::ptx::uniform(warp + stray);  // fault: not uniform, block 1, thread 37
}
