#include "fault.h"
#include "sage/ptx/ldmatrix.cuh"
#include "sage/ptx/shared.cuh"

extern "C" __global__ void misaligned_matrix(const __grid_constant__ Params params) {
  extern __shared__ __align__(128) unsigned char shared[];
  for (int i = threadIdx.x; i < 256; i += 64) reinterpret_cast<float*>(shared)[i] = params.in[i];
  __syncthreads();
  const unsigned row = sage::ptx::shared_address(shared) + threadIdx.x % 32 * 16;
  unsigned d[4];
  sage::ptx::ldmatrix_x4(d, row + (blockIdx.x == 0 && threadIdx.x == 31 ? 4 : 0));  // fault: misaligned access, block 0, thread 31
}
