// Attention on Hopper: a persistent, warp-specialized kernel of wgmma and TMA bulk copies.
//
// A dynamic tile scheduler hands work tiles to the blocks. Warpgroup 0 is the producer (producer.cuh): two of its
// threads issue the TMA loads, of Q into one of two buffers and of KV tiles into a pipeline of kStages stages, and
// run ahead into the next query tile. The other warpgroups are consumers of 64 query rows each (mainloop.cuh). Two
// consumers ping-pong (pingpong.cuh): one issues its products while the other runs its softmax. Products of both at a
// time would be no faster, and would leave both in softmax at a time. Three consumers have no order among themselves:
// each waits for P·V before it issues Q·K, since P and the scores share registers.
// Source: "FlashAttention-3", section 3.1.
#pragma once

#include "sage/attn/epilogue.cuh"
#include "sage/attn/spoilt.cuh"
#include "sage/attn/wgmma/mainloop.cuh"
#include "sage/attn/wgmma/producer.cuh"
#include "sage/ptx/grid_dependency.cuh"
#include "sage/ptx/proxy.cuh"
#include "sage/ptx/setmaxnreg.cuh"

namespace sage {

// Config: kHeadDim, kQk, kPv, kPvAccum, kP, kMask, kSmoothQ, kSmoothV, kBlockM, kBlockN, kWarpM, kStages.
template <class Config>
struct AttentionWgmma {
  using Traits = WgmmaTraits<Config>;
  using Shared = SharedStorage<Config>;
  using Product = E4m3Operand<Config>;
  static constexpr i32 kConsumers = Traits::kConsumers, kThreads = Traits::kThreads;
  static constexpr bool kTogether = Traits::kTogether;
  static constexpr i32 kVoteBarrier = 3;  // of the first consumer; 1 and 2 are of PingPong

  const AttnParams& params;
  const Shared shared;

  // Figures for the host: to launch the kernel and to emulate it.
  static constexpr auto facts() {
    return sage::facts(Fact{"threads", kThreads}, Fact{"shared_bytes", Shared::kBytes}, Fact{"p_top", Product::kTop},
                       Fact{"lazy_rise", Product::kLazyRise}, Fact{"whole_reference", Product::kWholeReference},
                       Fact{"room", Traits::kRoom}, Fact{"most_fall", kMostFall}, Fact{"no_reference", kNoReference},
                       Fact{"smallest_scale", kSmallestScale<Config::kQk>}, Fact{"largest_scale", kLargestScale},
                       Fact{"sum_unit", Product::kSumUnit}, Fact{"v_typical", Product::kVTypical},
                       Fact{"v_least", Product::kVLeast}, Fact{"v_limit", Product::kVLimit},
                       Fact{"slices", Traits::kSlices}, Fact{"pairs", Traits::kPairs},
                       Fact{"open_end", Traits::kOpenEnd}, Fact{"rows_of_range", Traits::kRowsOfRange},
                       Fact{"bounds_scores", Traits::kBoundsScores}, Fact{"largest_score", kLargestLinearScore},
                       Fact{"line_shift", kShift}, Fact{"programmatic_launch", 1});
  }

  __device__ __forceinline__ void run() const {
    if (ptx::thread_index() == 0) init_barriers();
    fill_units();
    if (Config::kSmoothQ && kTogether && ptx::thread_index() == 0) shared.one() = 1.0f;
    __syncthreads();
    ptx::grid_dependency_wait();  // the quantizer's end
    const i32 warpgroup = ptx::uniform(ptx::thread_index() / kWarpgroup);
    if (warpgroup == 0) {
      ptx::setmaxnreg_dec<Traits::kProducerRegisters>();
      const Producer<Config> producer{params, shared};
      if (ptx::thread_index() == 0) producer.load_queries();
      if (ptx::thread_index() == kWarpSize) producer.load_tiles();
      if (Traits::kBoundsScores && ptx::thread_index() / kWarpSize == 2) producer.find_norms();
      if (Shared::kListed && ptx::thread_index() / kWarpSize == 3) producer.make_bits();
    } else {
      ptx::setmaxnreg_inc<Traits::kConsumerRegisters>();
      consume(warpgroup - 1);
    }
  }

 private:
  __device__ __forceinline__ void init_barriers() const {
#pragma unroll
    for (i32 buffer = 0; buffer < 2; ++buffer) {
      ptx::mbarrier_init(shared.query_tile_full(buffer), 1);
      ptx::mbarrier_init(shared.query_full(buffer), Traits::kBoundsScores ? 2 : 1);
      ptx::mbarrier_init(shared.query_empty(buffer), kConsumers * kWarpgroup + (Shared::kListed ? 2 : 1));
    }
#pragma unroll
    for (i32 stage = 0; stage < Config::kStages; ++stage) {
      ptx::mbarrier_init(shared.full(stage), Shared::kListed ? 2 : 1);
      ptx::mbarrier_init(shared.empty(stage), kConsumers * kWarpgroup);
    }
    ptx::fence_mbarrier_init();
  }

  // Ordinary stores of the sum units that wgmma reads: the fence of each thread and the barrier behind this call order
  // the two.
  __device__ __forceinline__ void fill_units() const {
#pragma unroll
    for (i32 stage = 0; stage < Config::kStages; ++stage) {
      u8* units = shared.bytes + Shared::kKvStages + stage * Shared::kStageBytes + Shared::kUnits;
      for (i32 i = 4 * ptx::thread_index(); i < Shared::kUnitBytes; i += 4 * kThreads) {
        *reinterpret_cast<u32*>(units + i) = Product::kSumUnits;
      }
    }
    ptx::fence_proxy_async();
  }

  // Whether the scores of the warpgroup's rows are small enough for a linear P, by the Cauchy-Schwarz inequality. All
  // warps of a warpgroup get one answer, since they issue their products together. NaN, of zeros by infinity, is in
  // range: all scores are zero then.
  __device__ __forceinline__ bool scores_in_range(const Mainloop<Config>& loop, i32 buffer, i32 consumer) const {
    const bool fits = !ptx::any(loop.q_norm() * shared.k_norm(buffer) > kLargestLinearScore);
    const u32 votes = shared.votes(buffer, consumer);
    if (loop.lane == 0) ptx::store_shared_u8(votes + loop.warp % 4, fits);
    ptx::barrier_sync(kVoteBarrier + consumer, kWarpgroup);
    return ptx::load_shared_u32(votes) == 0x01010101;
  }

  // A log-sum-exp is of exponentials. The weight of a split is the sum of P, which is exact where P has exponentials,
  // so that outputs have the same bits with and without a log-sum-exp.
  __device__ __forceinline__ bool takes_exact_sums() const {
    return Config::kP == P::kExp2 ? params.lse != nullptr : params.returns_lse;
  }

  __device__ __forceinline__ void consume(i32 consumer) const {
    const i32 warp = ptx::thread_index() / kWarpSize - kWarpgroup / kWarpSize, lane = ptx::thread_index() % kWarpSize;
    PipelineState<2> query;
    PipelineState<Config::kStages> stage;
    const PingPong<kTogether> pingpong{consumer};
    if (consumer == 1) pingpong.arrive();
#pragma unroll 1
    while (true) {
      ptx::mbarrier_wait(shared.query_full(query.index), query.phase);
      const WorkTile& work = shared.query_tile(query.index);
      if (work.kv.end == kNoMoreTiles) break;
      const u32 from = shared.query(query.index);
      const u32 q_rows = from + consumer * kWarpgroupRows * TileLayout<Config>::QRows::kPitch;
      const float q_scale = ptx::load_shared_f32(from + Shared::kQScales + (warp * kRowGroups<Config> + lane / 4) * 4);
      Mainloop<Config> loop(params, shared, work, warp, lane, q_rows, q_scale, consumer, stage);
      // Two ways to say kv_end(): at head dim 256 ptxas serializes the products (C7511) of a dense mask with the first,
      // and of a sparse one with the second.
      if (Traits::kPasses ? loop.find_first()
                          : (Shared::kListed ? loop.kv_end() : (kTogether ? work.kv : loop.own_kv).end) > 0) {
        if constexpr (Traits::kBoundsScores) loop.issue_qk();  // the bound's instructions run under the product
        if (takes_exact_sums()) {
          loop.template attend<true, P::kExp2>();
        } else if constexpr (Traits::kBoundsScores) {
          if (scores_in_range(loop, query.index, consumer)) loop.template attend<false, P::kLinear>();
          else loop.template attend<false, P::kExp2>();
        } else {
          loop.template attend<false, Config::kP>();
        }
      }
      if constexpr (!kTogether) loop.skip_unseen();
      stage = loop.stage;
      float lse_sum[Mainloop<Config>::kRows];  // of whole rows
#pragma unroll
      for (i32 r = 0; r < Mainloop<Config>::kRows; ++r) {
        lse_sum[r] = ptx::sum_over_lanes<4>(loop.exact_sum[r]);
        if (Config::kP == P::kLinear && !params.returns_lse) lse_sum[r] = ptx::infinity();
      }
      // Read again: keeping warp and lane across the main loop would cost registers.
      const i32 thread = ptx::thread_index() - kWarpgroup, own_warp = thread / kWarpSize, own_lane = thread % kWarpSize;
      store_output<Config>(params, work, own_warp, own_lane, loop.acc_o, loop.output_factor(), loop.softmax, lse_sum,
                           ConstantsInShared<Shared>{from}, shared.rows(own_warp));
      SpoilRows<Config>(params, work, own_warp, own_lane).run(static_cast<i32>(loop.signs) < 0);
      ptx::mbarrier_arrive(shared.query_empty(query.index));
      query.advance();
    }
    if (consumer == 0) pingpong.wait();  // the last arrival of consumer 1
  }
};

}  // namespace sage
