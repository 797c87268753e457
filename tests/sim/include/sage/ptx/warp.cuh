// Meanings of templates/include/sage/ptx/warp.cuh.
#pragma once

#include "sage/types.cuh"

namespace sage::ptx {

inline float shuffle_xor(float x, i32 lane_mask, sim::Site site = sim::Site::here()) {
  return sim::shuffle_xor(x, lane_mask, site);
}

inline u32 shuffle_xor(u32 x, i32 lane_mask, sim::Site site = sim::Site::here()) {
  return __float_as_uint(sim::shuffle_xor(__uint_as_float(x), lane_mask, site));
}

inline i32 shuffle(i32 x, i32 lane, sim::Site site = sim::Site::here()) { return sim::shuffle(x, lane, site); }

inline i32 uniform(i32 x, sim::Site site = sim::Site::here()) { return sim::uniform(x, site); }

inline bool any(bool predicate, sim::Site site = sim::Site::here()) { return sim::any(predicate, site); }

inline u32 ballot(bool predicate, sim::Site site = sim::Site::here()) { return sim::ballot(predicate, site); }

inline i32 popcount(u32 bits) { return __builtin_popcount(bits); }

template <i32 kLanes>
inline float max_over_lanes(float x, sim::Site site = sim::Site::here()) {
  for (i32 mask = kLanes / 2; mask > 0; mask /= 2) x = fmaxf(x, ptx::shuffle_xor(x, mask, site));
  return x;
}

template <i32 kLanes, class T>
inline T sum_over_lanes(T x, sim::Site site = sim::Site::here()) {
  for (i32 mask = kLanes / 2; mask > 0; mask /= 2) x += ptx::shuffle_xor(x, mask, site);
  return x;
}

}  // namespace sage::ptx
