#include "fault.h"

extern "C" __global__ void early_exit(const __grid_constant__ Params params) {
  if (blockIdx.x == 1 && threadIdx.x == 40) return;
  __syncthreads();  // fault: barrier that not all threads reach, block 1, thread 0
}
