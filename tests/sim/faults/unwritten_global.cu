#include "fault.h"

extern "C" __global__ void unwritten_global(const __grid_constant__ Params params) {
  params.out[64 * blockIdx.x + threadIdx.x] = 1.0f;
  if (blockIdx.x == 1 && threadIdx.x == 5) {
    params.out[200] += 1.0f;  // fault: read of memory that nothing wrote, block 1, thread 5
  }
}
