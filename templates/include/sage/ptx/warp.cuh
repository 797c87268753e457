// Exchange among the 32 lanes of a warp; every lane takes part.
// Source: CUDA programming guide, "Warp Shuffle Functions" and "Warp Vote Functions".
#pragma once

#include "sage/types.cuh"

namespace sage::ptx {

constexpr u32 kAllLanes = 0xffffffff;

__device__ __forceinline__ float shuffle_xor(float x, i32 lane_mask) {
  return __shfl_xor_sync(kAllLanes, x, lane_mask);
}

__device__ __forceinline__ u32 shuffle_xor(u32 x, i32 lane_mask) { return __shfl_xor_sync(kAllLanes, x, lane_mask); }

// x of another lane.
__device__ __forceinline__ i32 shuffle(i32 x, i32 lane) { return __shfl_sync(kAllLanes, x, lane); }

// Tells the compiler that all lanes have the same value: it then computes with the value once a warp.
__device__ __forceinline__ i32 uniform(i32 x) { return __shfl_sync(kAllLanes, x, 0); }

// Whether the predicate holds in any lane.
__device__ __forceinline__ bool any(bool predicate) { return __any_sync(kAllLanes, predicate); }

// A bit for every lane: whether the predicate holds there.
__device__ __forceinline__ u32 ballot(bool predicate) { return __ballot_sync(kAllLanes, predicate); }

__device__ __forceinline__ i32 popcount(u32 bits) { return __popc(bits); }

// The largest x, or the sum of x, over groups of kLanes neighbouring lanes. All lanes of a group get the same result.
template <i32 kLanes>
__device__ __forceinline__ float max_over_lanes(float x) {
#pragma unroll
  for (i32 mask = kLanes / 2; mask > 0; mask /= 2) x = fmaxf(x, shuffle_xor(x, mask));
  return x;
}

template <i32 kLanes, class T>
__device__ __forceinline__ T sum_over_lanes(T x) {
#pragma unroll
  for (i32 mask = kLanes / 2; mask > 0; mask /= 2) x += shuffle_xor(x, mask);
  return x;
}

}  // namespace sage::ptx
