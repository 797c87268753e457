#include "fault.h"

extern "C" __global__ void unwritten_shared(const __grid_constant__ Params params) {
  __shared__ float x[64];
  if (threadIdx.x != 37) x[threadIdx.x] = params.in[threadIdx.x];
  __syncthreads();
  if (blockIdx.x == 1) params.out[threadIdx.x] = x[threadIdx.x];  // fault: read of memory that nothing wrote, block 1, thread 37
}
