// An atomic needs no order among others, but is none to plain accesses: the minimum may be of what was there before.
#include "fault.h"

extern "C" __global__ void atomic_beside_write(const __grid_constant__ Params params) {
  __shared__ int least[2];
  if (threadIdx.x == 0) least[0] = 64;
  if (threadIdx.x == 32) least[1] = 64;
  __syncthreads();
  atomicMin(&least[0], static_cast<int>(threadIdx.x));
  if (threadIdx.x == 63) least[1] = 0;                  // fault: data race
  atomicMin(&least[1], static_cast<int>(threadIdx.x));  // fault: data race
  __syncthreads();
  params.out[threadIdx.x] = params.in[threadIdx.x] + least[0];
}
