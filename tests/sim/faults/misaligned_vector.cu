#include "fault.h"

extern "C" __global__ void misaligned_vector(const __grid_constant__ Params params) {
  if (blockIdx.x == 0 && threadIdx.x == 44) {
    reinterpret_cast<unsigned long long*>(params.out + 1)[3] = 0;  // fault: misaligned access, block 0, thread 44
  }
}
