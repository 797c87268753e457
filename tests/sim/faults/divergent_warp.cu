#include "fault.h"
#include "sage/ptx/ldmatrix.cuh"
#include "sage/ptx/shared.cuh"

extern "C" __global__ void divergent_warp(const __grid_constant__ Params params) {
  extern __shared__ __align__(128) unsigned char shared[];
  float* x = reinterpret_cast<float*>(shared);
  for (int i = threadIdx.x; i < 256; i += 64) x[i] = params.in[i];
  __syncthreads();
  const unsigned row = sage::ptx::shared_address(shared) + threadIdx.x % 32 * 16;
  unsigned d[4];
  if (threadIdx.x % 2 == 0) {
    sage::ptx::ldmatrix_x4(d, row);  // fault: threads diverge
  } else {
    sage::ptx::ldmatrix_x4(d, row);  // fault: threads diverge
  }
}
