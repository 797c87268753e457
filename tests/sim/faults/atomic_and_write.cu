// An atomic needs no order among others, but is none to plain accesses: the store may take away what was marked.
#include "fault.h"

extern "C" __global__ void atomic_and_write(const __grid_constant__ Params params) {
  __shared__ unsigned marks[2];
  if (threadIdx.x == 0) marks[0] = 0;
  if (threadIdx.x == 32) marks[1] = 0;
  __syncthreads();
  atomicOr(&marks[0], 1u << threadIdx.x % 32);
  if (threadIdx.x == 63) marks[1] = 0;          // fault: data race
  atomicOr(&marks[1], 1u << threadIdx.x % 32);  // fault: data race
  __syncthreads();
  params.out[threadIdx.x] = params.in[threadIdx.x] + marks[0];
}
