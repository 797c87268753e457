// dQ from the sums that all blocks of keys have added, sums_q.cuh: times softmax_scale, in the caller's dtype and rows.
#pragma once

#include "sage/bwd/entry.cuh"
#include "sage/bwd/wgmma/store_rows.cuh"
#include "sage/bwd/wgmma/sums_q.cuh"
#include "sage/ptx/global.cuh"
#include "sage/quant/source.cuh"

namespace sage {

// Config: kHeadDim, kHalves. A block has a tile of queries, each of its warps 16 of them.
template <class Config>
struct StoreQSums {
  using Sums = QSums<Config>;
  static constexpr i32 kThreads = kWarpgroup, kWarps = kThreads / kWarpSize;
  static constexpr i32 kSharedBytes = kWarps * StoreGradient<Config>::kBytes;

  // q_sum_bytes: of a tile's sums.
  static constexpr auto facts() {
    return sage::facts(Fact{"threads", kThreads}, Fact{"shared_bytes", kSharedBytes},
                       Fact{"q_sum_bytes", Sums::kTileBytes});
  }

  // blockIdx.x: tiles of queries, of a head fastest.
  template <Dtype kDtype, bool kPacked>
  __device__ __forceinline__ static void run(const BwdParams& params, u8* shared) {
    const i32 q_tile = ptx::block_index(), head_of_all = q_tile / params.q_side_tiles;
    const i32 tile = q_tile % params.q_side_tiles;
    const i32 batch = head_of_all / params.num_q_heads, head = head_of_all % params.num_q_heads;
    const BwdEntry<kPacked> entry(params, batch, params.cu_seqlens_q, params.block_m,
                                  tile / (params.block_m / kTileRows));
    const CallerRows rows = entry.queries();
    const i32 first_row = (tile - entry.first_q_tile()) * kTileRows;
    if (first_row >= rows.count) return;
    const i32 warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
    Gradient<Config, 1> gradient;
    load(gradient, params, q_tile, warp, lane);
    const StoreGradient<Config> store{ptx::shared_address(shared) + warp * StoreGradient<Config>::kBytes, lane};
    store.template run<kDtype>(gradient, params.grad_q, batch, head, rows, first_row + 16 * warp, params.headdim,
                               params.softmax_scale);
  }

 private:
  __device__ __forceinline__ static void load(Gradient<Config, 1>& gradient, const BwdParams& params, i32 q_tile,
                                              i32 warp, i32 lane) {
    const u8* const sums_of_tile = Sums::of_tile(params, q_tile);
    const bool has_sums = *q_count(params, q_tile) != 0;  // no block adds to a tile whose queries see no key
#pragma unroll
    for (i32 n = 0; n < Config::kHeadDim / 8; ++n) {
      const i32 of_consumers = n / Sums::kParts * kWarps + warp;
      const i32 part = Sums::part(of_consumers, n % Sums::kParts, lane);
      const ptx::U32x4 four = ptx::load_global_u32x4(sums_of_tile + part, has_sums);
      float* const sums = gradient.slice(n / 8) + n % 8 * 4;
      sums[0] = __uint_as_float(four.x), sums[1] = __uint_as_float(four.y);
      sums[2] = __uint_as_float(four.z), sums[3] = __uint_as_float(four.w);
    }
  }
};

}  // namespace sage
