#include "fault.h"

extern "C" __global__ void outside_shared(const __grid_constant__ Params params) {
  extern __shared__ __align__(128) unsigned char shared[];
  float* x = reinterpret_cast<float*>(shared);
  x[threadIdx.x] = params.in[threadIdx.x];
  if (blockIdx.x == 1 && threadIdx.x == 63) x[threadIdx.x + 961] = 0.0f;  // fault: access outside an allocation, block 1, thread 63
}
