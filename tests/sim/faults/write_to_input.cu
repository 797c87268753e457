#include "fault.h"

extern "C" __global__ void write_to_input(const __grid_constant__ Params params) {
  if (blockIdx.x == 0 && threadIdx.x == 9) {
    const_cast<float*>(params.in)[3] = 0.0f;  // fault: access outside an allocation, block 0, thread 9
  }
}
