#include "fault.h"

extern "C" __global__ void outside_array(const __grid_constant__ Params params) {
  float x[4] = {};
  const unsigned i = blockIdx.x == 0 && threadIdx.x == 2 ? 4 : 0;
  x[i] = params.in[0];  // fault: index outside an array, block 0, thread 2
  params.out[threadIdx.x] = x[0];
}
