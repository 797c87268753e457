// A loop whose end never comes.
#include "fault.h"

extern "C" __global__ void endless(const __grid_constant__ Params params) {
  if (blockIdx.x == 0 && threadIdx.x == 7) {
    for (unsigned i = 0; params.in[i % 256] > 0.0f; ++i) {  // fault: block that does not end, block 0, thread 7
    }
  }
}
