// Attention of one query tile with Hopper's asynchronous instructions.
//
// One thread of the first warpgroup, the producer, has the copy engine bring Q and then the KV tiles into a ring of kStages
// slots. The other warpgroups own 64 query rows each. One of them has in flight, at most, the product of the tile whose
// softmax it has finished with V, and that of the next tile with Q: while it exponentiates, the others use the tensor cores.
// Two consumers take turns at issuing their products, which keeps their softmaxes apart.
// Source: SageAttention2, Algorithm 1; "FlashAttention-3", section 3.1, for the turns.
#pragma once

#include "sage/attn/epilogue.cuh"
#include "sage/attn/pv_mma.cuh"
#include "sage/attn/scores.cuh"
#include "sage/attn/work.cuh"
#include "sage/ptx/barrier.cuh"
#include "sage/ptx/bulk_copy.cuh"
#include "sage/ptx/mbarrier.cuh"
#include "sage/ptx/setmaxnreg.cuh"
#include "sage/ptx/shared.cuh"
#include "sage/ptx/wgmma.cuh"
#include "sage/tile/layout.cuh"
#include "sage/tile/matrix_descriptor.cuh"

namespace sage {

constexpr i32 kWarpgroup = 4 * kWarpSize;

// Shared memory of a block, by 32-bit address; every matrix starts at a multiple of 1024 bytes.
//   sQ [kBlockM] rows of s8
//   [kStages] slots of a KV tile (tile/layout.cuh), and delta_s of the query tile for its keys where Q is smoothed
//   barriers: q_full, then full and empty of every slot
template <class Config>
struct WgmmaShared {
  using Layout = TileLayout<Config>;
  static constexpr i32 kDeltaBytes = Config::kSmoothQ ? Config::kBlockN * 4 : 0;
  static constexpr i32 kDelta = Layout::kKvBytes;  // in a slot
  static constexpr i32 kSlotBytes = ceil_div(kDelta + kDeltaBytes, 1024) * 1024;
  static constexpr i32 kBarriers = Layout::kQBytes + Config::kStages * kSlotBytes;
  static_assert(Layout::kQBytes % 1024 == 0 && Layout::kV % 1024 == 0);

  u32 first;

  __device__ __forceinline__ u32 q() const { return first; }
  __device__ __forceinline__ u32 slot(i32 stage) const { return first + Layout::kQBytes + stage * kSlotBytes; }
  // The producer arrives, with Q's bytes; consumers wait.
  __device__ __forceinline__ u32 q_full() const { return first + kBarriers; }
  // The producer arrives, with the slot's bytes; consumers wait.
  __device__ __forceinline__ u32 full(i32 stage) const { return q_full() + 8 + stage * 16; }
  // Every consumer warp arrives when it and its products have read the slot; the producer waits.
  __device__ __forceinline__ u32 empty(i32 stage) const { return q_full() + 16 + stage * 16; }
};

// A place in the ring of slots, and the parity of the phase of its barriers.
template <i32 kStages>
struct RingPlace {
  i32 stage = 0;
  u32 phase = 0;

  __device__ __forceinline__ void advance() {
    if (++stage == kStages) stage = 0, phase ^= 1;
  }
};

// Config: kHeadDim, kQkBits, kPv, kPvAccum, kCausal, kSmoothQ, kSmoothV, kBlockM, kBlockN, kWarpM, kStages.
template <class Config>
class AttentionWgmma {
 public:
  static constexpr i32 kConsumers = Config::kBlockM / 64;  // warpgroups
  static constexpr i32 kThreads = (1 + kConsumers) * kWarpgroup;
  static_assert(kConsumers == 2, "that many have the registers, and take turns");
  static_assert(Config::kWarpM == 16 && Config::kQkBits == 8 && Config::kPv == Pv::kE4m3 && Config::kBlockN == 128);

  __device__ __forceinline__ static void run(const AttnParams& params, const u8* shared_bytes) {
    const Shared shared{ptx::shared_address(shared_bytes)};
    if (ptx::thread_index() == 0) {
      ptx::mbarrier_init(shared.q_full(), 1);
#pragma unroll
      for (i32 stage = 0; stage < Config::kStages; ++stage) {
        ptx::mbarrier_init(shared.full(stage), 1);
        ptx::mbarrier_init(shared.empty(stage), kConsumers * kWarpgroup / kWarpSize);
      }
      ptx::fence_mbarrier_init();
    }
    __syncthreads();
    const Work work = locate<Config>(params);
    const i32 warpgroup = ptx::thread_index() / kWarpgroup;
    if (warpgroup == 0) {
      ptx::setmaxnreg_dec<kProducerRegisters>();
      if (ptx::thread_index() == 0 && work.tiles > 0) produce(params, shared, work);
    } else {
      ptx::setmaxnreg_inc<kConsumerRegisters>();
      consume(params, shared, work, warpgroup - 1);
    }
  }

 private:
  using Layout = TileLayout<Config>;
  using Shared = WgmmaShared<Config>;
  using Product = PvE4m3<Config>;
  using Place = RingPlace<Config::kStages>;
  static constexpr i32 kProducerRegisters = 24, kConsumerRegisters = 240;
  static constexpr i32 kRows = Config::kWarpM / 8;  // of a thread
  static constexpr i32 kLoadBytes = Layout::kKScales + kKeyGroups * 4;  // of a KV tile: the rest of its last line is empty

  // --- the producer ---------------------------------------------------------------------------------------------------

  __device__ __forceinline__ static void produce(const AttnParams& params, const Shared& shared, const Work& work) {
    const i64 q_tile = static_cast<i64>(work.q_head) * params.q_tiles + work.q_tile;
    ptx::mbarrier_arrive_expect_tx(shared.q_full(), Layout::kQBytes);
    ptx::bulk_copy(shared.q(), params.q_hat + q_tile * Layout::kQBytes, Layout::kQBytes, shared.q_full());

    const u8* tiles = params.kv_hat + static_cast<i64>(work.kv_head) * params.kv_tiles * Layout::kKvBytes;
    const i64 delta_row = static_cast<i64>(work.q_head - params.first_head) * params.q_tiles + work.q_tile;
    Place place;
#pragma unroll 1
    for (i32 tile = 0; tile < work.tiles; ++tile, place.advance()) {
      const u32 slot = shared.slot(place.stage), full = shared.full(place.stage);
      ptx::mbarrier_wait(shared.empty(place.stage), place.phase ^ 1);  // at once in the first round
      ptx::mbarrier_arrive_expect_tx(full, kLoadBytes + Shared::kDeltaBytes);
      ptx::bulk_copy(slot, tiles + static_cast<i64>(tile) * Layout::kKvBytes, kLoadBytes, full);
      if constexpr (Config::kSmoothQ) {
        const float* delta = params.delta_s + (delta_row * params.kv_tiles + tile) * Config::kBlockN;
        ptx::bulk_copy(slot + Shared::kDelta, delta, Shared::kDeltaBytes, full);
      }
    }
  }

  // --- a consumer -----------------------------------------------------------------------------------------------------

  // What a warp carries from tile to tile.
  struct State {
    OnlineSoftmax<Config, Product> softmax;
    OutputAccumulator<Config> acc_o = {};
    float acc_r[Config::kHeadDim / 2];  // of the product in flight, as a wgmma's D
    float alpha[kRows];                 // what O must be multiplied by before that is added
    typename Scores<Config>::Accumulator acc_s;
    typename Product::Operand p;
    Place place;    // of the tile whose scores are next
    i32 previous;   // slot of the tile before
    float q_scale;
  };

  __device__ __forceinline__ static void consume(const AttnParams& params, const Shared& shared, const Work& work,
                                                 i32 consumer) {
    const i32 warp = (ptx::thread_index() - kWarpgroup) / kWarpSize, lane = ptx::thread_index() % kWarpSize;
    const i64 q_tile = static_cast<i64>(work.q_head) * params.q_tiles + work.q_tile;
    State state;
    state.softmax.clear();
    state.q_scale = params.q_scale[(q_tile * (Config::kBlockM / Config::kWarpM) + warp) * kRowGroups + lane / 4];
    if (work.tiles > 0) {
      ptx::mbarrier_wait(shared.q_full(), 0);
      if (consumer == 1) end_turn(consumer);  // the first turn is that of consumer 0
      take_turn(consumer);
      start_scores(shared, consumer, state);
      end_turn(consumer);
      ptx::wgmma_wait<0>();
      exponentiate<true, false>(params, shared, warp, lane, 0, state);
      i32 tile = 1;
#pragma unroll 1
      for (; tile < work.full_tiles; ++tile) step<false>(params, shared, consumer, warp, lane, tile, state);
#pragma unroll 1
      for (; tile < work.tiles; ++tile) step<true>(params, shared, consumer, warp, lane, tile, state);
      take_turn(consumer);
      start_output(shared, state);
      if (consumer == 0) end_turn(consumer);
      finish_output(shared, lane, state);
    }
    state.softmax.finish();
    store_output<Config, Product>(params, locate<Config>(params), warp, lane, state.acc_o, state.softmax);
  }

  // Issues the first product of the next tile.
  __device__ __forceinline__ static void start_scores(const Shared& shared, i32 consumer, State& state) {
    ptx::mbarrier_wait(shared.full(state.place.stage), state.place.phase);
    i32 (&s)[Config::kBlockN / 2] = reinterpret_cast<i32 (&)[Config::kBlockN / 2]>(state.acc_s);
#pragma unroll
    for (i32 i = 0; i < Config::kBlockN / 2; ++i) s[i] = kScoreBiasBits;
    const u64 q = matrix_descriptor<Layout::kQkRowBytes>(shared.q() + consumer * 64 * Layout::kQkRowBytes);
    const u64 k = matrix_descriptor<Layout::kQkRowBytes>(shared.slot(state.place.stage));
    ptx::wgmma_fence();
#pragma unroll
    for (i32 step = 0; step < Layout::kQkRowBytes / 32; ++step) {
      ptx::wgmma_m64n128k32_s8s8s32(s, q + step * kNextK, k + step * kNextK, true);
    }
    ptx::wgmma_commit();
  }

  // Issues the second product of the tile before.
  __device__ __forceinline__ static void start_output(const Shared& shared, State& state) {
    const u64 v = matrix_descriptor<Config::kBlockN>(shared.slot(state.previous) + Layout::kV);
    ptx::wgmma_fence();
#pragma unroll
    for (i32 step = 0; step < Config::kBlockN / 32; ++step) {
      if constexpr (Config::kHeadDim == 128) ptx::wgmma_m64n128k32_e4m3e4m3f32(state.acc_r, state.p[0][step], v + step * kNextK, step > 0);
      else ptx::wgmma_m64n64k32_e4m3e4m3f32(state.acc_r, state.p[0][step], v + step * kNextK, step > 0);
    }
    ptx::wgmma_commit();
  }

  // O = alpha · O + R, once all products are done, and the slot that they read is free.
  __device__ __forceinline__ static void finish_output(const Shared& shared, i32 lane, State& state) {
    ptx::wgmma_wait<0>();
    // What the other lanes read themselves of the slot, scales and delta_s, is ordered before by the turn taken since.
    if (lane == 0) ptx::mbarrier_arrive(shared.empty(state.previous));
#pragma unroll
    for (i32 n = 0; n < Config::kHeadDim / 8; ++n) {
#pragma unroll
      for (i32 c = 0; c < 4; ++c) {
        state.acc_o[0][n][c] = fmaf(state.acc_o[0][n][c], state.alpha[c / 2], state.acc_r[4 * n + c]);
      }
    }
  }

  // The scores of a tile and the output of the one before: both in flight, then the maxima of the first under the second.
  template <bool kMasked>
  __device__ __forceinline__ static void step(const AttnParams& params, const Shared& shared, i32 consumer, i32 warp, i32 lane,
                                              i32 tile, State& state) {
    take_turn(consumer);
    start_scores(shared, consumer, state);
    start_output(shared, state);
    end_turn(consumer);
    ptx::wgmma_wait<1>();
    exponentiate<kMasked, true>(params, shared, warp, lane, tile, state);
  }

  // P of the tile whose scores are there. kOutput: the output of the tile before is in flight, and needs P's registers.
  template <bool kMasked, bool kOutput>
  __device__ __forceinline__ static void exponentiate(const AttnParams& params, const Shared& shared, i32 warp, i32 lane,
                                                      i32 tile, State& state) {
    const u32 slot = shared.slot(state.place.stage);
    float scale = score_scale(state.q_scale, ptx::load_shared_f32(slot + Layout::kKScales + lane % 4 * 4));
    if constexpr (Config::kSmoothQ) {
      Scores<Config>::add_delta(state.acc_s, scale, slot + Shared::kDelta, lane);
      scale = 1.0f;
    }
    if constexpr (kMasked) mask(params, warp, lane, tile, state.acc_s);
    // References follow the maxima at every tile: O is multiplied by alpha where R is added anyway.
    float offset[kRows], alpha[kRows];
    state.softmax.raise(state.acc_s, scale, offset, alpha);
    if constexpr (kOutput) finish_output(shared, lane, state);
#pragma unroll
    for (i32 r = 0; r < kRows; ++r) state.alpha[r] = alpha[r];
    if (state.softmax.fold(scale, offset)) state.softmax.template exponentiate<true>(state.acc_s, scale, offset, state.p);
    else state.softmax.template exponentiate<false>(state.acc_s, scale, offset, state.p);
    state.previous = state.place.stage;
    state.place.advance();
  }

  __device__ __forceinline__ static void mask(const AttnParams& params, i32 warp, i32 lane, i32 tile,
                                              typename Scores<Config>::Accumulator& acc_s) {
    const i32 row = locate<Config>(params).first_row + warp * Config::kWarpM + lane / 4;
    const i32 first_key = tile * Config::kBlockN + lane % 4 * 2;
    i32 limit[kRows];
#pragma unroll
    for (i32 r = 0; r < kRows; ++r) limit[r] = Work::key_limit<Config::kCausal>(params, row + 8 * r) - first_key;
    Scores<Config>::mask(acc_s, limit);
  }

  // Turns at issuing products: a barrier for each consumer, at which it waits and to which the other one arrives.
  __device__ __forceinline__ static u32 turn_of(i32 consumer) { return 1 + consumer; }
  __device__ __forceinline__ static void take_turn(i32 consumer) {
    ptx::barrier_sync(turn_of(consumer), 2 * kWarpgroup);
  }
  __device__ __forceinline__ static void end_turn(i32 consumer) {
    ptx::barrier_arrive(turn_of(1 - consumer), 2 * kWarpgroup);
  }
};

}  // namespace sage
