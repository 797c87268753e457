// Attention on Hopper: a persistent, warp-specialized kernel of wgmma and TMA bulk copies.
//
// A dynamic tile scheduler hands query tiles to the blocks. Warpgroup 0 is the producer: one of its threads issues the TMA
// loads, of Q into one of two buffers and of KV tiles into a pipeline of kStages stages, and runs ahead into the next query
// tile. The other warpgroups are consumers of 64 query rows each.
// A consumer's step at KV tile t:
//   issue P·V of tile t - 1, then Q·K of tile t;
//   promote: O = alpha · O + R, while Q·K runs;
//   softmax of tile t, with no product of its own in flight: beside a product of FP8 that reads or writes its registers, other
//   instructions run at a quarter of their rate.
// R is the accumulator of P·V. R takes two KV tiles where registers allow, so that every other step promotes.
// Two consumers ping-pong: one issues its products while the other runs its softmax. Products of both at a time would be no
// faster, and would leave both in softmax at a time. Three consumers have no order among themselves: each waits for P·V
// before it issues Q·K, since P and the scores share registers.
// O and R count in v_factor of the last KV tile. A tile with another v_factor, which few have, rescales both.
// V has eight channels of ones behind its own: their output is the sum of P as it was multiplied, rounded; O is divided by
// that. A log-sum-exp, where the call asks for it, takes the sum of P before rounding.
// Source: SageAttention2, Algorithm 1; "FlashAttention-3", sections 3.1 and 3.2.
#pragma once

#include "sage/attn/epilogue.cuh"
#include "sage/attn/kv_facts.cuh"
#include "sage/attn/pv_mma.cuh"
#include "sage/attn/scores.cuh"
#include "sage/attn/softmax_wgmma.cuh"
#include "sage/problem/tile_scheduler.cuh"
#include "sage/ptx/barrier.cuh"
#include "sage/ptx/bulk_copy.cuh"
#include "sage/ptx/grid_dependency.cuh"
#include "sage/ptx/mbarrier.cuh"
#include "sage/ptx/proxy.cuh"
#include "sage/ptx/setmaxnreg.cuh"
#include "sage/ptx/shared.cuh"
#include "sage/ptx/warp.cuh"
#include "sage/ptx/wgmma.cuh"
#include "sage/tile/layout.cuh"
#include "sage/tile/matrix_descriptor.cuh"

namespace sage {

constexpr i32 kWarpgroup = 4 * kWarpSize;

// Sentinel in WorkTile::kv.tiles: the tile scheduler is exhausted, and the rest of the query buffer is undefined.
constexpr i32 kNoMoreTiles = -1;

// SharedStorage of a block; every matrix starts at a multiple of 1024 bytes.
//   [2] query buffers: sQ [kBlockM] rows of s8; v_scale and v_mean of its KV head, f32, [kHeadDim] each; then q_scale
//     [kBlockM / kWarpM][8] and row_bias [kBlockM] f32; the WorkTile
//   [kStages] stages: K̂ and V̂ of a KV tile (tile/layout.cuh), [8][kBlockN] ones, the KvLine, and where Q is smoothed
//     delta_s of the query tile for these keys
//   for every warp its rows of O, on their way to global memory
//   mbarriers, 8 bytes each: full and empty of every query buffer, then of every stage
//   where Q is smoothed a one, f32: the scale of finished scores, for consumers that ping-pong
template <class Config>
struct WgmmaShared {
  using Layout = TileLayout<Config>;
  static constexpr i32 kChannels = Layout::kQBytes;  // in a query buffer
  static constexpr i32 kChannelBytes = Config::kHeadDim * 4;
  static constexpr i32 kQScales = kChannels + 2 * kChannelBytes;
  static constexpr i32 kQScalesBytes = Config::kBlockM / Config::kWarpM * kRowGroups<Config> * 4;
  static constexpr i32 kRowBias = kQScales + kQScalesBytes, kRowBiasBytes = Config::kBlockM * 4;
  static constexpr i32 kQueryTile = kRowBias + kRowBiasBytes;
  static constexpr i32 kQueryBytes = ceil_div<i32>(kQueryTile + sizeof(WorkTile), 1024) * 1024;
  static constexpr i32 kOnes = Layout::kV + Layout::kVBytes;  // in a stage: as eight more rows of V
  static constexpr i32 kOnesBytes = 8 * Config::kBlockN;
  static constexpr i32 kLine = kOnes + kOnesBytes;
  static constexpr i32 kDelta = kLine + KvLine::kBytes, kDeltaBytes = Config::kSmoothQ ? Config::kBlockN * 4 : 0;
  static constexpr i32 kStageBytes = ceil_div(kDelta + kDeltaBytes, 1024) * 1024;
  static constexpr i32 kKvStages = 2 * kQueryBytes, kOutputRows = kKvStages + Config::kStages * kStageBytes;
  static constexpr i32 kBarriers = kOutputRows + Config::kBlockM / Config::kWarpM * StoreWholeRows<Config>::kBytes;
  static constexpr i32 kOne = kBarriers + 2 * 8 * (2 + Config::kStages);
  static constexpr i32 kBytes = kOne + (Config::kSmoothQ ? 16 : 0);
  static_assert(Layout::kQBytes % 1024 == 0 && Layout::kV % 1024 == 0 && kOnes % 1024 == 0);

  u8* bytes;
  u32 first;

  __device__ __forceinline__ explicit WgmmaShared(u8* bytes_) : bytes(bytes_), first(ptx::shared_address(bytes_)) {}

  __device__ __forceinline__ WorkTile& query_tile(i32 buffer) const {
    return *reinterpret_cast<WorkTile*>(bytes + buffer * kQueryBytes + kQueryTile);
  }
  __device__ __forceinline__ float& one() const { return *reinterpret_cast<float*>(bytes + kOne); }
  __device__ __forceinline__ StoreWholeRows<Config> rows(i32 warp) const {
    return {bytes + kOutputRows + warp * StoreWholeRows<Config>::kBytes};
  }
  __device__ __forceinline__ u32 query(i32 buffer) const { return first + buffer * kQueryBytes; }
  __device__ __forceinline__ u32 kv_stage(i32 stage) const { return first + kKvStages + stage * kStageBytes; }
  // The producer arrives, with the buffer's bytes; consumers wait.
  __device__ __forceinline__ u32 query_full(i32 buffer) const { return first + kBarriers + buffer * 16; }
  // Every consumer thread arrives when it has read Q and the rest of the buffer; the producer waits.
  __device__ __forceinline__ u32 query_empty(i32 buffer) const { return query_full(buffer) + 8; }
  // The producer arrives, with the stage's bytes; consumers wait.
  __device__ __forceinline__ u32 full(i32 stage) const { return query_full(2) + stage * 16; }
  // Every consumer thread arrives when it and its products have read the stage; the producer waits.
  __device__ __forceinline__ u32 empty(i32 stage) const { return full(stage) + 8; }
};

// A stage of a pipeline of kSize buffers, and the parity of the phase of its mbarriers.
template <i32 kSize>
struct PipelineState {
  i32 index = 0;
  u32 phase = 0;

  __device__ __forceinline__ void advance() {
    if (++index == kSize) index = 0, phase ^= 1;
  }
};

// What store_output() needs of a query tile, from a query buffer.
template <class Shared>
struct ConstantsInShared {
  u32 query;

  __device__ __forceinline__ float row_bias(i32 row) const {
    return ptx::load_shared_f32(query + Shared::kRowBias + row * 4);
  }
  __device__ __forceinline__ ptx::F32x2 v_scale(i32 channel) const {
    return ptx::load_shared_f32x2(query + Shared::kChannels + channel * 4);
  }
  __device__ __forceinline__ ptx::F32x2 v_mean(i32 channel) const {
    return ptx::load_shared_f32x2(query + Shared::kChannels + Shared::kChannelBytes + channel * 4);
  }
};

// Config: kHeadDim, kQkBits, kPv, kPvAccum, kCausal, kSmoothQ, kSmoothV, kBlockM, kBlockN, kWarpM, kStages.
template <class Config>
class AttentionWgmma {
 public:
  static constexpr i32 kConsumers = Config::kBlockM / 64;  // warpgroups
  static constexpr i32 kThreads = (1 + kConsumers) * kWarpgroup;
  static_assert(kConsumers == 2 || kConsumers == 3, "that many have the registers");
  static_assert(Config::kWarpM == 16 && Config::kQkBits == 8 && Config::kPv == Pv::kE4m3 && Config::kBlockN == 128);

  // What the host needs to launch the kernel and to emulate it.
  static constexpr auto facts() {
    return sage::facts(Fact{"threads", kThreads}, Fact{"shared_bytes", Shared::kBytes}, Fact{"p_top", Product::kTop},
                       Fact{"lazy_rise", Product::kLazyRise}, Fact{"whole_reference", Product::kWholeReference},
                       Fact{"room", kRoom}, Fact{"most_fall", kMostFall}, Fact{"no_reference", kNoReference},
                       Fact{"smallest_scale", kSmallestScale}, Fact{"v_typical", Product::kVTypical},
                       Fact{"v_least", Product::kVLeast}, Fact{"v_limit", Product::kVLimit}, Fact{"open_end", kOpenEnd},
                       Fact{"programmatic_launch", 1});
  }

  __device__ __forceinline__ static void run(const AttnParams& params, u8* shared_bytes) {
    const Shared shared(shared_bytes);
    if (ptx::thread_index() == 0) init_barriers(shared);
    fill_ones(shared);
    if (Config::kSmoothQ && kTogether && ptx::thread_index() == 0) shared.one() = 1.0f;
    __syncthreads();
    ptx::grid_dependency_wait();  // the quantizer's end
    const i32 warpgroup = ptx::uniform(ptx::thread_index() / kWarpgroup);
    if (warpgroup == 0) {
      ptx::setmaxnreg_dec<kProducerRegisters>();
      if (ptx::thread_index() == 0) produce(params, shared);
    } else {
      ptx::setmaxnreg_inc<kConsumerRegisters>();
      consume(params, shared, warpgroup - 1);
    }
  }

 private:
  using Layout = TileLayout<Config>;
  using Shared = WgmmaShared<Config>;
  using Product = PvE4m3<Config>;
  using KvStage = PipelineState<Config::kStages>;
  static constexpr i32 kProducerRegisters = 24, kConsumerRegisters = kConsumers == 2 ? 240 : 160;
  static constexpr i32 kRows = Config::kWarpM / 8;  // of a thread
  static constexpr i32 kNTiles = Config::kBlockN / 8;
  static constexpr i32 kOutputs = Config::kHeadDim / 2;  // registers of a thread for O
  static constexpr u32 kFourOnes = 0x38383838;           // e4m3
  static constexpr i32 kSignallingNan = 0x7fa00000;

  // Which P·V a step issues: one that R takes alone, or in a masked step the second of two where R is open; the first of two;
  // the second. A smoothed Q leaves no registers for two.
  enum Sum { kAlone, kOpens, kCloses };
  static constexpr bool kPairs = !Config::kSmoothQ;
  static constexpr i32 kRoom = kPairs ? 3 : 0;  // of the first tile's P, for the second
  using Softmax = TileSoftmax<Config, Product, kRoom>;

  // Enough registers to keep P·V and Q·K in flight at once: products are one phase of a step, and consumers ping-pong.
  // Otherwise P and the scores share registers.
  static constexpr bool kTogether = kConsumers == 2;

  // Whether the last full tile may open R: the masked step or the last P·V then closes it. A call whose keys are whole tiles
  // executes no masked step then. Three consumers would pay for that with a dozen moves in the loop.
  static constexpr bool kOpenEnd = kPairs && kTogether;
  static constexpr i32 kFullBehindPair = kOpenEnd ? 0 : 1;  // full tiles behind the first of two that the loop asks for

  __device__ __forceinline__ static void init_barriers(const Shared& shared) {
#pragma unroll
    for (i32 buffer = 0; buffer < 2; ++buffer) {
      ptx::mbarrier_init(shared.query_full(buffer), 1);
      ptx::mbarrier_init(shared.query_empty(buffer), kConsumers * kWarpgroup);
    }
#pragma unroll
    for (i32 stage = 0; stage < Config::kStages; ++stage) {
      ptx::mbarrier_init(shared.full(stage), 1);
      ptx::mbarrier_init(shared.empty(stage), kConsumers * kWarpgroup);
    }
    ptx::fence_mbarrier_init();
  }

  // Ordinary stores, which products read: each thread's fence and the barrier that follows order them.
  __device__ __forceinline__ static void fill_ones(const Shared& shared) {
#pragma unroll
    for (i32 stage = 0; stage < Config::kStages; ++stage) {
      u8* ones = shared.bytes + Shared::kKvStages + stage * Shared::kStageBytes + Shared::kOnes;
      for (i32 i = 4 * ptx::thread_index(); i < Shared::kOnesBytes; i += 4 * kThreads) {
        *reinterpret_cast<u32*>(ones + i) = kFourOnes;
      }
    }
    ptx::fence_proxy_async();
  }

  // --- the producer ---------------------------------------------------------------------------------------------------

  __device__ __forceinline__ static void produce(const AttnParams& params, const Shared& shared) {
    PipelineState<2> query;
    KvStage stage;
    TileScheduler<Config> scheduler{params};
#pragma unroll 1
    while (!scheduler.ended()) {
      const WorkTile work = work_tile<Config>(params, scheduler.index());
      ptx::mbarrier_wait(shared.query_empty(query.index), query.phase ^ 1);  // at once in the first round
      shared.query_tile(query.index) = work;
      load_query(params, shared, work, query.index);
      query.advance();
      scheduler.advance();
#pragma unroll 1
      for (i32 tile = 0; tile < work.kv.tiles; ++tile, stage.advance()) {
        ptx::mbarrier_wait(shared.empty(stage.index), stage.phase ^ 1);  // at once in the first round
        load_tile(params, shared, work, tile, stage.index);
      }
    }
    scheduler.close();
    ptx::mbarrier_wait(shared.query_empty(query.index), query.phase ^ 1);
    shared.query_tile(query.index).kv.tiles = kNoMoreTiles;
    ptx::mbarrier_arrive(shared.query_full(query.index));
  }

  __device__ __forceinline__ static void load_query(const AttnParams& params, const Shared& shared,
                                                    const WorkTile& work, i32 buffer) {
    const i64 q_tile = q_tile_index(work.q_head, params.q_tiles, work.q_tile);
    const i64 channel = static_cast<i64>(work.kv_head) * Config::kHeadDim;
    const u32 full = shared.query_full(buffer), to = shared.query(buffer), channels = to + Shared::kChannels;
    ptx::mbarrier_arrive_expect_tx(full, Layout::kQBytes + (Config::kSmoothV ? 2 : 1) * Shared::kChannelBytes +
                                             Shared::kQScalesBytes + Shared::kRowBiasBytes);
    ptx::bulk_copy(to, params.q_hat + q_tile * Layout::kQBytes, Layout::kQBytes, full);
    ptx::bulk_copy(channels, params.v_scale + channel, Shared::kChannelBytes, full);
    if constexpr (Config::kSmoothV) {
      ptx::bulk_copy(channels + Shared::kChannelBytes, params.v_mean + channel, Shared::kChannelBytes, full);
    }
    ptx::bulk_copy(to + Shared::kQScales, params.q_scale + q_tile * (Shared::kQScalesBytes / 4), Shared::kQScalesBytes,
                   full);
    ptx::bulk_copy(to + Shared::kRowBias, params.row_bias + q_tile * Config::kBlockM, Shared::kRowBiasBytes, full);
  }

  __device__ __forceinline__ static void load_tile(const AttnParams& params, const Shared& shared, const WorkTile& work,
                                                   i32 tile, i32 stage) {
    const u8* from = work.template kv_tile<Config>(params, tile);
    const u32 slot = shared.kv_stage(stage), full = shared.full(stage);
    ptx::mbarrier_arrive_expect_tx(full, Layout::kLine + KvLine::kLoaded + Shared::kDeltaBytes);
    ptx::bulk_copy(slot, from, Layout::kLine, full);
    ptx::bulk_copy(slot + Shared::kLine, from + Layout::kLine, KvLine::kLoaded, full);
    if constexpr (Config::kSmoothQ) {
      const i64 row = q_tile_index(work.q_head - params.first_head, params.q_tiles, work.q_tile);
      const float* delta = params.delta_s + (row * params.kv_tiles + tile) * Config::kBlockN;
      ptx::bulk_copy(slot + Shared::kDelta, delta, Shared::kDeltaBytes, full);
    }
  }

  // --- a consumer -----------------------------------------------------------------------------------------------------

  // Ping-pong: a consumer waits before it issues the products of a step, and arrives for the other consumer when they are
  // done. Consumer 0 issues first.
  __device__ __forceinline__ static u32 pingpong_barrier(i32 consumer) { return 1 + consumer; }  // 0 is __syncthreads

  __device__ __forceinline__ static void pingpong_wait(i32 consumer) {
    if constexpr (kTogether) ptx::barrier_sync(pingpong_barrier(consumer), 2 * kWarpgroup);
  }
  __device__ __forceinline__ static void pingpong_arrive(i32 consumer, u32 never = 0) {
    if constexpr (kTogether) ptx::barrier_arrive(pingpong_barrier(1 - consumer) + never, 2 * kWarpgroup);
  }
  // Arrives behind the row maxima and in front of the exponentials: sooner or later is slower (docs/decisions.md), and the
  // compiler would move the arrival to either place. Behind the maxima: they select the barrier, though always the same
  // one, for no arithmetic makes a signalling NaN. In front of the exponentials: these wait for a load that is issued behind
  // the arrival (exponentiate()).
  __device__ __forceinline__ static void pingpong_arrive_behind(i32 consumer, const float (&own_largest)[kRows]) {
    bool never = false;
#pragma unroll
    for (i32 r = 0; r < kRows; ++r) never |= __float_as_int(own_largest[r]) == kSignallingNan;
    pingpong_arrive(consumer, never);
  }

  // A fence for the compiler, which moves no arithmetic across a loop: this loop waits for a stage that is full already.
  // Without it the compiler moves the promotion behind the wait for the scores, where the tensor cores idle. Called only
  // where the compiler does that: the loop costs 2 % where consumers ping-pong.
  __device__ __forceinline__ static void keep_in_front(const Shared& shared, const KvStage& stage) {
    ptx::mbarrier_wait(shared.full(stage.index), stage.phase);
  }

  // What a warp carries from KV tile to KV tile.
  struct State {
    i32 consumer;
    u32 q;  // shared address of the warpgroup's rows of Q
    float q_scale;
    Softmax softmax = {};
    OutputAccumulator<Config> acc_o = {};
    float acc_r[kOutputs + 4];    // P·V and the sums of P of one tile or two, as a wgmma's D
    float alpha[kRows] = {};      // what O must be multiplied by before that is added
    float exact_sum[kRows] = {};  // of this thread's P before it is rounded; only where a log-sum-exp is wanted
    typename Softmax::Scores acc_s;
    typename Product::Operand p;
    i32 previous;    // stage of the tile whose P this is
    float v_factor;  // of that tile
    float o_factor;  // in which O counts: v_factor when R is added
    u32 signs = 0;   // of the tiles' facts, in the sign bit: whether one held what is not finite
  };

  __device__ __forceinline__ static void consume(const AttnParams& params, const Shared& shared, i32 consumer) {
    const i32 warp = ptx::thread_index() / kWarpSize - kWarpgroup / kWarpSize, lane = ptx::thread_index() % kWarpSize;
    PipelineState<2> query;
    KvStage stage;
    if (consumer == 1) pingpong_arrive(consumer);
#pragma unroll 1
    while (true) {
      ptx::mbarrier_wait(shared.query_full(query.index), query.phase);
      const WorkTile& work = shared.query_tile(query.index);
      if (work.kv.tiles == kNoMoreTiles) break;
      const u32 from = shared.query(query.index);
      State state;
      state.consumer = consumer;
      state.softmax.clear();
      state.q = from + consumer * 64 * Layout::kQkRowBytes;
      state.q_scale = ptx::load_shared_f32(from + Shared::kQScales + (warp * kRowGroups<Config> + lane / 4) * 4);
      if (work.kv.tiles > 0) {
        if (params.lse != nullptr) attend<true>(params, shared, work, warp, lane, stage, state);
        else attend<false>(params, shared, work, warp, lane, stage, state);
      }
      float lse_sum[kRows];  // of whole rows
#pragma unroll
      for (i32 r = 0; r < kRows; ++r) lse_sum[r] = ptx::sum_over_lanes<4>(state.exact_sum[r]);
      // Read again: keeping warp and lane across the main loop would cost registers.
      const i32 thread = ptx::thread_index() - kWarpgroup;
      store_output<Config>(params, work, thread / kWarpSize, thread % kWarpSize, static_cast<i32>(state.signs) < 0,
                           state.acc_o, state.softmax, lse_sum, ConstantsInShared<Shared>{from},
                           shared.rows(thread / kWarpSize));
      ptx::mbarrier_arrive(shared.query_empty(query.index));
      query.advance();
    }
    if (consumer == 0) pingpong_wait(consumer);  // the last arrival of consumer 1
  }

  // All KV tiles of a query tile. `stage`: of the next KV tile.
  template <bool kLse>
  __device__ __forceinline__ static void attend(const AttnParams& params, const Shared& shared, const WorkTile& work,
                                                i32 warp, i32 lane, KvStage& stage, State& state) {
    issue_qk(shared, stage, state);
    const KvStage here = stage;
    stage.advance();
    const float scale = score_scale(facts_of(shared, lane, here), state);
    ptx::wgmma_wait<0>();
    float own_largest[kRows];
    if (work.kv.full_tiles > 0) {
      finish_scores<false>(params, shared, work, warp, lane, 0, scale, here, state, own_largest);
      exponentiate<kLse, false, true>(shared, lane, scale, own_largest, here, state);
    } else {
      finish_scores<true>(params, shared, work, warp, lane, 0, scale, here, state, own_largest);
      exponentiate<kLse, true, true>(shared, lane, scale, own_largest, here, state);
    }
    state.o_factor = state.v_factor;
    const i32 full_tiles = ptx::uniform(work.kv.full_tiles), tiles = ptx::uniform(work.kv.tiles);
    i32 tile = 1;
    bool open = false;  // R holds P·V of one tile of two
    if constexpr (kPairs) {
#pragma unroll 1
      for (; tile + kFullBehindPair < full_tiles; tile += 2) {
        step<kLse, false, kOpens>(params, shared, work, warp, lane, tile, stage, false, state);
        if (kOpenEnd && tile + 1 == full_tiles) {
          ++tile, open = true;
          __syncwarp();  // an instruction on this exit alone: the exit's moves then stand here, and not in the loop
          break;
        }
        step<kLse, false, kCloses>(params, shared, work, warp, lane, tile + 1, stage, true, state);
      }
      change_factor(state);
    } else {
#pragma unroll 1
      for (; tile < full_tiles; ++tile) {
        step<kLse, false, kAlone>(params, shared, work, warp, lane, tile, stage, false, state);
      }
    }
#pragma unroll 1
    for (; tile < tiles; ++tile, open = false) {
      step<kLse, true, kAlone>(params, shared, work, warp, lane, tile, stage, open, state);
    }
    issue_pv(shared, open, state);
    wait_pv<0>(shared, state);
    promote(state);
    scale_output(state.o_factor, state);
  }

  // P·V of the tile before, and P of this one. `open`: R holds P·V of one tile of two.
  template <bool kLse, bool kMasked, Sum kSum>
  __device__ __forceinline__ static void step(const AttnParams& params, const Shared& shared, const WorkTile& work,
                                              i32 warp, i32 lane, i32 tile, KvStage& stage, bool open, State& state) {
    pingpong_wait(state.consumer);
    issue_pv(shared, open, state);
    if constexpr (!kTogether) wait_pv<0>(shared, state);
    issue_qk(shared, stage, state);
    const KvStage here = stage;
    stage.advance();
    const float scale = score_scale(facts_of(shared, lane, here), state);
    if constexpr (kTogether) wait_pv<1>(shared, state);
    const float r_factor = state.v_factor;
    float pending[kRows];
#pragma unroll
    for (i32 r = 0; r < kRows; ++r) pending[r] = state.alpha[r];
    if constexpr (kSum != kOpens) promote(state);
    if constexpr (kSum == kCloses && !kTogether && !kLse) keep_in_front(shared, here);
    ptx::wgmma_wait<0>();
    float own_largest[kRows];
    finish_scores<kMasked>(params, shared, work, warp, lane, tile, scale, here, state, own_largest);
    pingpong_arrive_behind(state.consumer, own_largest);
    // Where the P·V above opened R, R takes this tile too: references may rise, and do not restart.
    exponentiate<kLse, kMasked, kSum != kOpens>(shared, lane, scale, own_largest, here, state);
    if constexpr (kSum == kOpens) rescale_r(pending, r_factor, state);
    if constexpr (kSum == kAlone) change_factor(state);
  }

  // Issues Q·K of the tile that the stage holds.
  __device__ __forceinline__ static void issue_qk(const Shared& shared, const KvStage& stage, State& state) {
    ptx::mbarrier_wait(shared.full(stage.index), stage.phase);
    i32 (&s)[Config::kBlockN / 2] = reinterpret_cast<i32 (&)[Config::kBlockN / 2]>(state.acc_s);
    const u64 q = matrix_descriptor<Layout::kQkRowBytes>(state.q);
    const u64 k = matrix_descriptor<Layout::kQkRowBytes>(shared.kv_stage(stage.index));
    ptx::wgmma_fence();
#pragma unroll
    for (i32 step = 0; step < Layout::kQkRowBytes / 32; ++step) {
      ptx::wgmma_m64n128k32_s8s8s32(s, q + step * kNextK, k + step * kNextK, step > 0);
    }
    ptx::wgmma_commit();
  }

  // The KvLine's facts for this thread. Read twice a step: keeping them across the ping-pong would cost registers.
  __device__ __forceinline__ static KvTileFacts facts_of(const Shared& shared, i32 lane, const KvStage& stage) {
    return {shared.kv_stage(stage.index) + Shared::kLine, lane};
  }

  // The scale of this thread's scores in that tile.
  __device__ __forceinline__ static float score_scale(const KvTileFacts& facts, const State& state) {
    return fmaxf(state.q_scale * fabsf(facts.k_scale), kSmallestScale);
  }

  // R also takes the next tile's P·V. If that tile's softmax raised a row's reference, or its V has another v_factor, both
  // rare, rescale R, and O for the latter. r_factor: in which R counts.
  __device__ __forceinline__ static void rescale_r(const float (&pending)[kRows], float r_factor, State& state) {
    bool moved = state.v_factor != r_factor || state.v_factor != state.o_factor;
#pragma unroll
    for (i32 r = 0; r < kRows; ++r) moved |= state.alpha[r] != 1.0f;
    if (ptx::any(moved)) {
      const float ratio = r_factor * reciprocal_of_power_of_two(state.v_factor);
#pragma unroll
      for (i32 i = 0; i < kOutputs; ++i) state.acc_r[i] *= state.alpha[i % 4 / 2] * ratio;
#pragma unroll
      for (i32 i = kOutputs; i < kOutputs + 4; ++i) state.acc_r[i] *= state.alpha[i % 4 / 2];
      change_factor(state);
    }
#pragma unroll
    for (i32 r = 0; r < kRows; ++r) state.alpha[r] *= pending[r];
  }

  // Brings O to the factor of the tile whose P this is.
  __device__ __forceinline__ static void change_factor(State& state) {
    if (state.o_factor == state.v_factor) return;
    scale_output(state.o_factor * reciprocal_of_power_of_two(state.v_factor), state);
    state.o_factor = state.v_factor;
  }

  __device__ __forceinline__ static void scale_output(float factor, State& state) {
#pragma unroll
    for (i32 n = 0; n < Config::kHeadDim / 8; ++n) {
#pragma unroll
      for (i32 c = 0; c < 4; ++c) state.acc_o[0][n][c] *= factor;
    }
  }

  // Issues P·V, ones included: R += P·V where R is open, else R = P·V.
  __device__ __forceinline__ static void issue_pv(const Shared& shared, bool open, State& state) {
    const u64 v = matrix_descriptor<Config::kBlockN>(shared.kv_stage(state.previous) + Layout::kV);
    ptx::wgmma_fence();
#pragma unroll
    for (i32 step = 0; step < Config::kBlockN / 32; ++step) {
      const u64 keys = v + step * kNextK;
      const bool accumulate = open || step > 0;
      if constexpr (Config::kHeadDim == 128) {
        ptx::wgmma_m64n136k32_e4m3e4m3f32(state.acc_r, state.p[0][step], keys, accumulate);
      } else {
        ptx::wgmma_m64n72k32_e4m3e4m3f32(state.acc_r, state.p[0][step], keys, accumulate);
      }
    }
    ptx::wgmma_commit();
  }

  // Waits until no more than kPending groups of products are in flight, P·V not among them, and frees its stage.
  template <i32 kPending>
  __device__ __forceinline__ static void wait_pv(const Shared& shared, const State& state) {
    ptx::wgmma_wait<kPending>();
    ptx::mbarrier_arrive(shared.empty(state.previous));
  }

  // Promotion: O = alpha · O + R, and the row sums likewise.
  __device__ __forceinline__ static void promote(State& state) {
#pragma unroll
    for (i32 n = 0; n < Config::kHeadDim / 8; ++n) {
#pragma unroll
      for (i32 c = 0; c < 4; ++c) {
        state.acc_o[0][n][c] = fmaf(state.acc_o[0][n][c], state.alpha[c / 2], state.acc_r[4 * n + c]);
      }
    }
#pragma unroll
    for (i32 r = 0; r < kRows; ++r) {
      state.softmax.row_sum[r] = fmaf(state.softmax.row_sum[r], state.alpha[r], state.acc_r[kOutputs + 2 * r]);
    }
  }

  // The scores that are there, with all terms added and masked, and the largest of them.
  template <bool kMasked>
  __device__ __forceinline__ static void finish_scores(const AttnParams& params, const Shared& shared,
                                                       const WorkTile& work, i32 warp, i32 lane, i32 tile, float scale,
                                                       const KvStage& stage, State& state,
                                                       float (&own_largest)[kRows]) {
    constexpr bool kFinished = kMasked || Config::kSmoothQ;
    if constexpr (kFinished) convert_scores(shared.kv_stage(stage.index), lane, scale, state.acc_s);
    if constexpr (kMasked) mask(params, work, warp, lane, tile, state.acc_s);
    Softmax::template find_largest<kFinished>(state.acc_s, own_largest);
  }

  // Row references and P of the tile whose scores are finished. Loads the scale of the scores again, even where it is one: a
  // load does not move across the ping-pong arrival, and so no exponential does.
  template <bool kLse, bool kMasked, bool kRestart>
  __device__ __forceinline__ static void exponentiate(const Shared& shared, i32 lane, float scale,
                                                      const float (&own_largest)[kRows], const KvStage& stage,
                                                      State& state) {
    constexpr bool kFinished = kMasked || Config::kSmoothQ;
    state.softmax.template move_references<kRestart>(own_largest, Config::kSmoothQ ? 1.0f : scale, state.alpha);
    const KvTileFacts facts = facts_of(shared, lane, stage);
    state.v_factor = fabsf(facts.v_factor);
    state.signs |= facts.signs();
    if constexpr (!Config::kSmoothQ) scale = score_scale(facts, state);
    else if constexpr (kTogether) scale = ptx::load_shared_f32(shared.first + Shared::kOne);
    else scale = 1.0f;
    state.softmax.template exponentiate<kFinished>(state.acc_s, scale);
    if constexpr (kLse) state.softmax.add(state.acc_s, state.alpha, state.exact_sum);
    state.softmax.pack(state.acc_s, state.p);
    state.previous = stage.index;
  }

  // Scores as f32: where Q is smoothed, with delta_s added and in log2 units, so that their scale is one from there on.
  __device__ __forceinline__ static void convert_scores(u32 slot, i32 lane, float scale,
                                                        typename Softmax::Scores& acc_s) {
#pragma unroll
    for (i32 n = 0; n < kNTiles; ++n) {
      ptx::F32x2 delta;
      if constexpr (Config::kSmoothQ)
        delta = ptx::load_shared_f32x2(slot + Shared::kDelta + (8 * n + lane % 4 * 2) * 4);
#pragma unroll
      for (i32 c = 0; c < 4; ++c) {
        float score = static_cast<float>(acc_s[0][n][c]);
        if constexpr (Config::kSmoothQ) score = fmaf(score, scale, c % 2 ? delta.y : delta.x);
        acc_s[0][n][c] = __float_as_int(score);
      }
    }
  }

  __device__ __forceinline__ static void mask(const AttnParams& params, const WorkTile& work, i32 warp, i32 lane,
                                              i32 tile, typename Softmax::Scores& acc_s) {
    const i32 row = work.first_row + warp * Config::kWarpM + lane / 4;
    const i32 first_key = tile * Config::kBlockN + lane % 4 * 2;
    i32 limit[kRows];
#pragma unroll
    for (i32 r = 0; r < kRows; ++r)
      limit[r] = visible_keys<Config::kCausal>(seqlen_of(params), row + 8 * r) - first_key;
    Scores<Config>::mask(acc_s, limit);
  }
};

}  // namespace sage
