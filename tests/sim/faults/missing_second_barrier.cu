// The buffer is written again while slower threads may still read it.
#include "fault.h"

extern "C" __global__ void missing_second_barrier(const __grid_constant__ Params params) {
  __shared__ float x[64];
  float sum = 0.0f;
  for (int i = 0; i < 2; ++i) {
    x[threadIdx.x] = params.in[threadIdx.x];  // fault: data race
    __syncthreads();
    sum += x[63 - threadIdx.x];  // fault: data race
  }
  params.out[threadIdx.x] = sum;
}
