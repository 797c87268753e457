// The rows of a gradient on their way from accumulators to the caller's tensor: through shared memory, so that each
// lane stores 16 bytes, where the caller's rows have whole vectors.
#pragma once

#include "sage/bwd/gradient.cuh"
#include "sage/ptx/global.cuh"
#include "sage/ptx/shared.cuh"
#include "sage/tile/layout.cuh"

namespace sage {

// Config: kHeadDim. The rows of a warp, 16 of a warpgroup's 64.
template <class Config>
struct StoreGradient {
  using Rows = SwizzledRows<16, 2 * Config::kHeadDim>;
  static constexpr i32 kBytes = 16 * Rows::kRowBytes;  // of shared memory, for a warp

  u32 shared;  // a multiple of 128
  i32 lane;

  // Stores the sums times a factor as rows from the batch entry's `first_row` on, in the caller's dtype. Call with all
  // lanes of a warp.
  template <Dtype kDtype>
  __device__ __forceinline__ void run(const Gradient<Config, 1>& gradient, const Tensor& to, i32 batch, i32 head,
                                      const CallerRows& rows, i32 first_row, i32 headdim, float factor) const {
    __syncwarp();  // all lanes have read the rows of the gradient before
    put<kDtype>(gradient, factor);
    __syncwarp();
    u16* const of_head = static_cast<u16*>(to.data) + batch * to.stride.batch + head * to.stride.head;
    constexpr i32 kChunks = Rows::kRowBytes / 16;
#pragma unroll
    for (i32 i = 0; i < 16 * kChunks / kWarpSize; ++i) {
      const i32 row = (i * kWarpSize + lane) / kChunks, chunk = lane % kChunks;
      if (first_row + row >= rows.count) continue;
      u16* const channels = of_head + rows.at(first_row + row) * to.stride.row + chunk * kVector;
      store_vector(channels, ptx::load_shared_u32x4(shared + Rows::offset(row, chunk)), headdim - chunk * kVector);
    }
  }

 private:
  static constexpr i32 kVector = 8;  // channels in 16 bytes

  template <Dtype kDtype>
  __device__ __forceinline__ void put(const Gradient<Config, 1>& gradient, float factor) const {
#pragma unroll
    for (i32 n = 0; n < Config::kHeadDim / 8; ++n) {
#pragma unroll
      for (i32 r = 0; r < 2; ++r) {
        const float x = gradient.sum(n, 2 * r) * factor, y = gradient.sum(n, 2 * r + 1) * factor;
        const u32 pair = kDtype == Dtype::kBf16 ? ptx::bf16x2(x, y) : ptx::f16x2(x, y);
        ptx::store_shared_u32(shared + Rows::offset(lane / 4 + 8 * r, n) + lane % 4 * sizeof(u32), pair);
      }
    }
  }

  // Stores the first `count` of eight channels.
  __device__ __forceinline__ static void store_vector(u16* to, const ptx::U32x4& x, i32 count) {
    if (count >= kVector && reinterpret_cast<u64>(to) % 16 == 0) {
      ptx::store_global_u32x4(to, {x.x, x.y, x.z, x.w});
      return;
    }
    const u32 words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (i32 c = 0; c < kVector; ++c) {
      if (c < count) to[c] = static_cast<u16>(words[c / 2] >> 16 * (c % 2));
    }
  }
};

}  // namespace sage
