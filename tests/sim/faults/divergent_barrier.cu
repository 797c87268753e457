// All threads reach a barrier, but not the same.
#include "fault.h"

extern "C" __global__ void divergent_barrier(const __grid_constant__ Params params) {
  if (threadIdx.x < 32) {
    __syncthreads();  // fault: threads diverge
  } else {
    __syncthreads();  // fault: threads diverge
  }
}
