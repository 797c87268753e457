#include "fault.h"

struct alignas(16) Vector {
  float x[4];
};

extern "C" __global__ void misaligned_struct(const __grid_constant__ Params params) {
  if (blockIdx.x == 1 && threadIdx.x == 3) {
    const Vector v = *reinterpret_cast<const Vector*>(params.in + 2);  // fault: misaligned access, block 1, thread 3
    params.out[0] = v.x[0];
  }
}
