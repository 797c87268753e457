// Threads write parts of the same words, which is right, and whole words before and after. One byte of a word has a race,
// the bytes next to it have none.
#include "fault.h"

extern "C" __global__ void part_of_a_word(const __grid_constant__ Params params) {
  __shared__ __align__(16) unsigned short halves[64];
  __shared__ __align__(16) unsigned char bytes[64];
  __shared__ __align__(16) unsigned whole[64];
  whole[threadIdx.x] = 0;
  __syncthreads();
  auto* parts = reinterpret_cast<unsigned char*>(whole);
  halves[threadIdx.x % 32 * 2 + threadIdx.x / 32] = 1;
  bytes[threadIdx.x] = 2;
  if (threadIdx.x % 2 == 0) parts[4 * threadIdx.x + 1] = 3;
  if (threadIdx.x % 2 == 1) parts[4 * threadIdx.x - 2] = 4;
  __syncthreads();
  const float sum = halves[threadIdx.x] + bytes[63 - threadIdx.x] + whole[(threadIdx.x + 32) % 64];
  __syncthreads();
  if (threadIdx.x == 5) bytes[6] = 7;  // fault: data race, thread 5
  if (threadIdx.x == 40) params.out[0] = bytes[7];
  if (threadIdx.x == 41) params.out[1] = bytes[6];  // fault: data race, thread 41
  params.out[threadIdx.x + 64] = sum;
}
