// A gradient of the rows that a warp has, as sums over tiles of the other side.
#pragma once

#include "sage/bwd/entry.cuh"
#include "sage/ptx/math.cuh"

namespace sage {

// Config: kHeadDim. kM: the warp's m16 tiles of rows.
template <class Config, i32 kM>
class Gradient {
 public:
  // Adds a tile's integers of the channels 8n to 8n + 7, times the scales of the rows 16m + g and 16m + g + 8.
  __device__ __forceinline__ void add(i32 m, i32 n, const i32 (&sum)[4], const float (&scale)[2]) {
#pragma unroll
    for (i32 c = 0; c < 4; ++c) sums_[m][n][c] = fmaf(static_cast<float>(sum[c]), scale[c / 2], sums_[m][n][c]);
  }

  // Element c of this thread's fragment of the channels 8n to 8n + 7, of the first m16 tile.
  __device__ __forceinline__ float sum(i32 n, i32 c) const { return sums_[0][n][c]; }

  // The sums of a thread's 64 channels from 64 · slice on, for products that add to them.
  __device__ __forceinline__ float (&slice(i32 slice))[32] {
    static_assert(kM == 1);
    using Slices = float[Config::kHeadDim / 64][32];
    return reinterpret_cast<Slices&>(sums_)[slice];
  }

  // Stores the sums times a factor as rows of a gradient, from the batch entry's `first_row` on, in the caller's dtype.
  template <Dtype kDtype>
  __device__ __forceinline__ void store(const Tensor& to, i32 batch, i32 head, const CallerRows& rows, i32 first_row,
                                        i32 headdim, i32 lane, float factor) const {
#pragma unroll
    for (i32 r = 0; r < 2 * kM; ++r) {
      const i32 row = first_row + lane / 4 + 8 * r;
      if (row >= rows.count) continue;
      u16* const channels =
          static_cast<u16*>(to.data) + batch * to.stride.batch + head * to.stride.head + rows.at(row) * to.stride.row;
#pragma unroll
      for (i32 n = 0; n < Config::kHeadDim / 8; ++n) {
        const i32 channel = 8 * n + 2 * (lane % 4);
        const float (&sums)[4] = sums_[r / 2][n];
        const float x = sums[r % 2 * 2] * factor, y = sums[r % 2 * 2 + 1] * factor;
        const u32 pair = kDtype == Dtype::kBf16 ? ptx::bf16x2(x, y) : ptx::f16x2(x, y);
        if (channel < headdim) channels[channel] = static_cast<u16>(pair);
        if (channel + 1 < headdim) channels[channel + 1] = static_cast<u16>(pair >> 16);
      }
    }
  }

 private:
  float sums_[kM][Config::kHeadDim / 8][4] = {};
};

}  // namespace sage
