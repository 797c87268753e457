#include "fault.h"

extern "C" __global__ void outside_global(const __grid_constant__ Params params) {
  const int i = blockIdx.x * 128 + 2 * threadIdx.x;
  const float x = params.in[i + 1];
  params.out[i] = i == 254 ? params.in[i + 2] : x;  // fault: access outside an allocation, block 1, thread 63
}
