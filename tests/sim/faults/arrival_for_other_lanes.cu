// Lane 0 arrives for its warp, but what the other lanes did is not ordered before that: no __syncwarp.
#include "fault.h"
#include "sage/ptx/mbarrier.cuh"
#include "sage/ptx/shared.cuh"
#include "sage/ptx/warp.cuh"

extern "C" __global__ void arrival_for_other_lanes(const __grid_constant__ Params params) {
  __shared__ float x[32];
  __shared__ unsigned long long barrier;
  const unsigned full = sage::ptx::shared_address(&barrier);
  if (threadIdx.x == 0) sage::ptx::mbarrier_init(full, 1);
  if (threadIdx.x < 32) x[threadIdx.x] = 0.0f;
  __syncthreads();
  if (threadIdx.x < 32) {
    x[threadIdx.x] = params.in[threadIdx.x];  // fault: data race
    if (threadIdx.x == 0) sage::ptx::mbarrier_arrive(full);
  } else {
    sage::ptx::mbarrier_wait(full, 0);
    params.out[threadIdx.x] = x[threadIdx.x - 32];  // fault: data race
  }
}
