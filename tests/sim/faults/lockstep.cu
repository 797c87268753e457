// Lanes of a warp are not in step either: a shuffle orders no memory.
#include "fault.h"
#include "sage/ptx/warp.cuh"

extern "C" __global__ void lockstep(const __grid_constant__ Params params) {
  __shared__ float x[64];
  x[threadIdx.x] = params.in[threadIdx.x];
  const float y = sage::ptx::shuffle_xor(1.0f, 1);
  if (blockIdx.x == 0 && threadIdx.x == 1) params.out[0] = x[0] + y;  // fault: data race, block 0, thread 1
}
