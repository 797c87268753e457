// Two threads meet on each element, either of them first.
#include "fault.h"

extern "C" __global__ void missing_barrier(const __grid_constant__ Params params) {
  __shared__ float x[64];
  x[threadIdx.x] = 0.0f;
  __syncthreads();
  x[threadIdx.x] = params.in[threadIdx.x];        // fault: data race
  params.out[threadIdx.x] = x[63 - threadIdx.x];  // fault: data race
}
