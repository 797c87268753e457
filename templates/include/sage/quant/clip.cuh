// The clip of a scale group of s4: the share of the group's largest magnitude that the largest integer stands for. s4
// has few steps, and smaller steps can be worth cutting off a group's largest values. The best clip depends on the
// spread of the values, so each group takes the candidate with the least squared error.
#pragma once

#include "sage/numerics/integers.cuh"
#include "sage/ptx/warp.cuh"
#include "sage/quant/rows.cuh"

namespace sage {

// Candidates. The 127 steps of s8 are fine enough without.
template <class Config>
constexpr i32 kClips = Config::kQk == Qk::kInt4 ? 6 : 1;

template <class Config>
class ClipSearch {
 public:
  static constexpr float kStep = 0.9f;  // from candidate to candidate, the first of which cuts off nothing

  // 1.5 · 2^7 or 1.5 · 2^8. A square below 64, added to kErrorBias, stands in the low bits of the sum, in units of
  // 2^-16 or 2^-15. The coarser unit is for groups whose errors would not fit into 32 bits in the finer.
  static constexpr i32 kMostValues = Config::kBlockN / kKeyGroups * Config::kHeadDim;  // of a group
  static constexpr float kErrorBias = kMostValues <= 2048 ? 192.0f : 384.0f;

  // scale: of the group's largest magnitude.
  __device__ __forceinline__ explicit ClipSearch(const Scale& scale) : whole_(scale) {}

  __device__ __forceinline__ void add(const float (&x)[kVector]) {
#pragma unroll
    for (i32 c = 0; c < kClips<Config>; ++c) {
      const float inv_scale = clipped(c).inv_scale;
#pragma unroll
      for (i32 i = 0; i < kVector; ++i) {
        const float rounded = QuantizedRows<Config>::rounded(x[i], inv_scale) - kIntegerBias;
        const float lost = fmaf(x[i], inv_scale, -rounded);
        error_[c] += __float_as_uint(fmaf(lost, lost, kErrorBias)) - __float_as_uint(kErrorBias);
      }
    }
  }

  template <i32 kLanes>
  __device__ __forceinline__ void sum_over_lanes() {
#pragma unroll
    for (u32& of_candidate : error_) of_candidate = ptx::sum_over_lanes<kLanes>(of_candidate);
  }

  // The scale with the least error; of equal ones the largest.
  __device__ __forceinline__ Scale best() const {
    Scale scale = whole_;
    float least = cost(0);
#pragma unroll
    for (i32 c = 1; c < kClips<Config>; ++c) {
      if (cost(c) < least) scale = clipped(c), least = cost(c);
    }
    return scale;
  }

 private:
  // The last candidate takes the largest value to 11.9 steps, 4.9 of which are cut off: 2048 · 4.9² · 2^16 < 2^32,
  // and as much for 4096 values in units of 2^-15.
  static_assert(kClips<Config> == 1 || kMostValues <= 4096, "the errors of a group fit into 32 bits");

  const Scale whole_;
  // Squared errors of a thread's values, later of a group's, in steps of a candidate, in units of the last bit of
  // kErrorBias. Integers, so that their sum depends on no order.
  u32 error_[kClips<Config>] = {};

  __device__ constexpr static float share(i32 candidate) {
    float share = 1.0f;
    for (i32 c = 0; c < candidate; ++c) share *= kStep;
    return share;
  }
  __device__ __forceinline__ Scale clipped(i32 c) const {
    return {whole_.scale * share(c), whole_.inv_scale * (1.0f / share(c))};
  }
  __device__ __forceinline__ float cost(i32 c) const { return static_cast<float>(error_[c]) * (share(c) * share(c)); }
};

}  // namespace sage
