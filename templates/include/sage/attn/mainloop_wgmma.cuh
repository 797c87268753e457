// Attention of query tiles with Hopper's asynchronous instructions, in a grid of as many blocks as the GPU holds at once.
//
// Each block takes query tiles from a queue. One thread of its first warpgroup, the producer, issues TMA bulk copies, of Q
// into one of two buffers and of KV tiles into a ring of kStages slots; it runs ahead into the next query tile while the
// last one ends. The other warpgroups, the consumers, own 64 query rows each. Two of them take turns at the tensor cores:
// products of both side by side would be as slow, and leave both exponentiating side by side. Three meet nowhere.
// What a consumer does at a KV tile: it issues P·V of the tile before, then Q·K of this one, adds the first to O while the
// second runs, and exponentiates with neither of its own in flight: while products of FP8 read and write their registers,
// other instructions run at a quarter of their rate. P·V of two tiles go into the same R, so that O takes every other one.
// Where registers are short it waits for P·V before it issues Q·K (three consumers), or R takes one tile (a smoothed Q).
// O and R count in v_factor of the last tile: a tile with another one, which few have, brings both to it.
// V has eight more channels, of ones: their output is the sum of P as it was multiplied, rounded, by which O is divided. A
// log-sum-exp, where it is wanted, takes the sum of P before that.
// Source: SageAttention2, Algorithm 1; "FlashAttention-3", section 3.1, for warps with roles.
#pragma once

#include "sage/attn/epilogue.cuh"
#include "sage/attn/kv_facts.cuh"
#include "sage/attn/pv_mma.cuh"
#include "sage/attn/scores.cuh"
#include "sage/attn/softmax_wgmma.cuh"
#include "sage/attn/work.cuh"
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

// In place of a query tile's number of KV tiles: there is no query tile any more, nor anything else in the buffer.
constexpr i32 kNoMoreTiles = -1;

// Shared memory of a block; every matrix starts at a multiple of 1024 bytes.
//   [2] query buffers: sQ [kBlockM] rows of s8; v_scale and v_mean of its KV head, f32, [kHeadDim] each; then q_scale
//     [kBlockM / kWarpM][8] and row_bias [kBlockM] f32; where the query tile is
//   [kStages] slots: K̂ and V̂ of a KV tile (tile/layout.cuh), [8][kBlockN] ones, the tile's line, and where Q is smoothed
//     delta_s of the query tile for these keys
//   for every warp its rows of O, on their way to memory
//   barriers, 8 bytes each: full and empty of every query buffer, then of every slot
//   where Q is smoothed a one, f32: the scale of finished scores, for consumers that take turns
template <class Config>
struct WgmmaShared {
  using Layout = TileLayout<Config>;
  static constexpr i32 kChannels = Layout::kQBytes;  // in a query buffer
  static constexpr i32 kChannelBytes = Config::kHeadDim * 4;
  static constexpr i32 kQScales = kChannels + 2 * kChannelBytes;
  static constexpr i32 kQScalesBytes = Config::kBlockM / Config::kWarpM * kRowGroups<Config> * 4;
  static constexpr i32 kRowBias = kQScales + kQScalesBytes, kRowBiasBytes = Config::kBlockM * 4;
  static constexpr i32 kQueryTile = kRowBias + kRowBiasBytes;
  static constexpr i32 kQueryBytes = ceil_div<i32>(kQueryTile + sizeof(Work), 1024) * 1024;
  static constexpr i32 kOnes = Layout::kV + Layout::kVBytes;  // in a slot: as eight more rows of V
  static constexpr i32 kOnesBytes = 8 * Config::kBlockN;
  static constexpr i32 kLine = kOnes + kOnesBytes;
  static constexpr i32 kDelta = kLine + KvLine::kBytes, kDeltaBytes = Config::kSmoothQ ? Config::kBlockN * 4 : 0;
  static constexpr i32 kSlotBytes = ceil_div(kDelta + kDeltaBytes, 1024) * 1024;
  static constexpr i32 kSlots = 2 * kQueryBytes, kOutputRows = kSlots + Config::kStages * kSlotBytes;
  static constexpr i32 kBarriers = kOutputRows + Config::kBlockM / Config::kWarpM * StoreWholeRows<Config>::kBytes;
  static constexpr i32 kOne = kBarriers + 2 * 8 * (2 + Config::kStages);
  static constexpr i32 kBytes = kOne + (Config::kSmoothQ ? 16 : 0);
  static_assert(Layout::kQBytes % 1024 == 0 && Layout::kV % 1024 == 0 && kOnes % 1024 == 0);

  u8* bytes;
  u32 first;

  __device__ __forceinline__ explicit WgmmaShared(u8* bytes_) : bytes(bytes_), first(ptx::shared_address(bytes_)) {}

  __device__ __forceinline__ Work& query_tile(i32 buffer) const {
    return *reinterpret_cast<Work*>(bytes + buffer * kQueryBytes + kQueryTile);
  }
  __device__ __forceinline__ float& one() const { return *reinterpret_cast<float*>(bytes + kOne); }
  __device__ __forceinline__ StoreWholeRows<Config> rows(i32 warp) const {
    return {bytes + kOutputRows + warp * StoreWholeRows<Config>::kBytes};
  }
  __device__ __forceinline__ u32 query(i32 buffer) const { return first + buffer * kQueryBytes; }
  __device__ __forceinline__ u32 slot(i32 stage) const { return first + kSlots + stage * kSlotBytes; }
  // The producer arrives, with the buffer's bytes; consumers wait.
  __device__ __forceinline__ u32 query_full(i32 buffer) const { return first + kBarriers + buffer * 16; }
  // Every consumer thread arrives when it has read Q and the rest of the buffer; the producer waits.
  __device__ __forceinline__ u32 query_empty(i32 buffer) const { return query_full(buffer) + 8; }
  // The producer arrives, with the slot's bytes; consumers wait.
  __device__ __forceinline__ u32 full(i32 stage) const { return query_full(2) + stage * 16; }
  // Every consumer thread arrives when it and its products have read the slot; the producer waits.
  __device__ __forceinline__ u32 empty(i32 stage) const { return full(stage) + 8; }
};

// A place in a ring of kSize buffers, and the parity of the phase of its barriers.
template <i32 kSize>
struct RingPlace {
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
  using Place = RingPlace<Config::kStages>;
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

  // Where registers hold both, P·V and Q·K are in flight together: one piece, and consumers take turns. Else the registers
  // of P and the scores are the same.
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
      u8* ones = shared.bytes + Shared::kSlots + stage * Shared::kSlotBytes + Shared::kOnes;
      for (i32 i = 4 * ptx::thread_index(); i < Shared::kOnesBytes; i += 4 * kThreads) {
        *reinterpret_cast<u32*>(ones + i) = kFourOnes;
      }
    }
    ptx::fence_proxy_async();
  }

  // --- the producer ---------------------------------------------------------------------------------------------------

  __device__ __forceinline__ static void produce(const AttnParams& params, const Shared& shared) {
    RingPlace<2> query;
    Place place;
    TileQueue<Config> queue{params};
#pragma unroll 1
    while (!queue.ended()) {
      const Work work = locate<Config>(params, queue.index());
      ptx::mbarrier_wait(shared.query_empty(query.index), query.phase ^ 1);  // at once in the first round
      shared.query_tile(query.index) = work;
      load_query(params, shared, work, query.index);
      query.advance();
      queue.advance();
#pragma unroll 1
      for (i32 tile = 0; tile < work.tiles; ++tile, place.advance()) {
        ptx::mbarrier_wait(shared.empty(place.index), place.phase ^ 1);  // at once in the first round
        load_tile(params, shared, work, tile, place.index);
      }
    }
    queue.close();
    ptx::mbarrier_wait(shared.query_empty(query.index), query.phase ^ 1);
    shared.query_tile(query.index).tiles = kNoMoreTiles;
    ptx::mbarrier_arrive(shared.query_full(query.index));
  }

  __device__ __forceinline__ static void load_query(const AttnParams& params, const Shared& shared, const Work& work,
                                                    i32 buffer) {
    const i64 q_tile = static_cast<i64>(work.q_head) * params.q_tiles + work.q_tile;
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

  __device__ __forceinline__ static void load_tile(const AttnParams& params, const Shared& shared, const Work& work,
                                                   i32 tile, i32 stage) {
    const u8* from = work.template kv_tile<Config>(params, tile);
    const u32 slot = shared.slot(stage), full = shared.full(stage);
    ptx::mbarrier_arrive_expect_tx(full, Layout::kLine + KvLine::kLoaded + Shared::kDeltaBytes);
    ptx::bulk_copy(slot, from, Layout::kLine, full);
    ptx::bulk_copy(slot + Shared::kLine, from + Layout::kLine, KvLine::kLoaded, full);
    if constexpr (Config::kSmoothQ) {
      const i64 row = static_cast<i64>(work.q_head - params.first_head) * params.q_tiles + work.q_tile;
      const float* delta = params.delta_s + (row * params.kv_tiles + tile) * Config::kBlockN;
      ptx::bulk_copy(slot + Shared::kDelta, delta, Shared::kDeltaBytes, full);
    }
  }

  // --- a consumer -----------------------------------------------------------------------------------------------------

  // A consumer's turn at the tensor cores, for the products of a step: it waits for its turn before it issues them, and gives
  // the turn to the other consumer when they are done. The first turn is that of consumer 0.
  __device__ __forceinline__ static u32 turn_of(i32 consumer) { return 1 + consumer; }  // 0 is __syncthreads

  __device__ __forceinline__ static void await_turn(i32 consumer) {
    if constexpr (kTogether) ptx::barrier_sync(turn_of(consumer), 2 * kWarpgroup);
  }
  __device__ __forceinline__ static void give_turn(i32 consumer, u32 never = 0) {
    if constexpr (kTogether) ptx::barrier_arrive(turn_of(1 - consumer) + never, 2 * kWarpgroup);
  }
  // Ends it behind the largest scores and in front of the exponentials: sooner or later is slower (docs/decisions.md), and
  // the compiler would move the arrival to either. The largest scores decide which barrier it is, though never another: no
  // arithmetic makes a signalling NaN. The exponentials wait for a load behind the arrival (exponentiate()).
  __device__ __forceinline__ static void end_turn(i32 consumer, const float (&own_largest)[kRows]) {
    bool never = false;
#pragma unroll
    for (i32 r = 0; r < kRows; ++r) never |= __float_as_int(own_largest[r]) == kSignallingNan;
    give_turn(consumer, never);
  }

  // What was written in front of this is executed in front of it: a wait for a slot that is full already is a loop, and the
  // compiler moves no arithmetic behind one. It would move the additions to O behind the scores' wait, from where the tensor
  // cores work to where they wait. Only where it does: the loop itself costs 2 % where consumers take turns.
  __device__ __forceinline__ static void keep_in_front(const Shared& shared, const Place& place) {
    ptx::mbarrier_wait(shared.full(place.index), place.phase);
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
    i32 previous;    // slot of the tile whose P this is
    float v_factor;  // of that tile
    float o_factor;  // in which O counts: v_factor when R is added
    u32 signs = 0;   // of the tiles' facts, in the sign bit: whether one held what is not finite
  };

  __device__ __forceinline__ static void consume(const AttnParams& params, const Shared& shared, i32 consumer) {
    const i32 warp = ptx::thread_index() / kWarpSize - kWarpgroup / kWarpSize, lane = ptx::thread_index() % kWarpSize;
    RingPlace<2> query;
    Place place;
    if (consumer == 1) give_turn(consumer);
#pragma unroll 1
    while (true) {
      ptx::mbarrier_wait(shared.query_full(query.index), query.phase);
      const Work& work = shared.query_tile(query.index);
      if (work.tiles == kNoMoreTiles) break;
      const u32 from = shared.query(query.index);
      State state;
      state.consumer = consumer;
      state.softmax.clear();
      state.q = from + consumer * 64 * Layout::kQkRowBytes;
      state.q_scale = ptx::load_shared_f32(from + Shared::kQScales + (warp * kRowGroups<Config> + lane / 4) * 4);
      if (work.tiles > 0) {
        if (params.lse != nullptr) attend<true>(params, shared, work, warp, lane, place, state);
        else attend<false>(params, shared, work, warp, lane, place, state);
      }
      float lse_sum[kRows];  // of whole rows
#pragma unroll
      for (i32 r = 0; r < kRows; ++r) lse_sum[r] = ptx::sum_over_lanes<4>(state.exact_sum[r]);
      // Read anew: no register holds what follows from it till here.
      const i32 thread = ptx::thread_index() - kWarpgroup;
      store_output<Config>(params, work, thread / kWarpSize, thread % kWarpSize, static_cast<i32>(state.signs) < 0,
                           state.acc_o, state.softmax, lse_sum, ConstantsInShared<Shared>{from},
                           shared.rows(thread / kWarpSize));
      ptx::mbarrier_arrive(shared.query_empty(query.index));
      query.advance();
    }
    if (consumer == 0) await_turn(consumer);  // the last that consumer 1 gave
  }

  // All KV tiles of a query tile. `place`: of the next KV tile in the ring.
  template <bool kLse>
  __device__ __forceinline__ static void attend(const AttnParams& params, const Shared& shared, const Work& work,
                                                i32 warp, i32 lane, Place& place, State& state) {
    start_scores(shared, place, state);
    const Place here = place;
    place.advance();
    const float scale = score_scale(facts_of(shared, lane, here), state);
    ptx::wgmma_wait<0>();
    float own_largest[kRows];
    if (work.full_tiles > 0) {
      finish_scores<false>(params, shared, work, warp, lane, 0, scale, here, state, own_largest);
      exponentiate<kLse, false, true>(shared, lane, scale, own_largest, here, state);
    } else {
      finish_scores<true>(params, shared, work, warp, lane, 0, scale, here, state, own_largest);
      exponentiate<kLse, true, true>(shared, lane, scale, own_largest, here, state);
    }
    state.o_factor = state.v_factor;
    const i32 full_tiles = ptx::uniform(work.full_tiles), tiles = ptx::uniform(work.tiles);
    i32 tile = 1;
    bool open = false;  // R holds P·V of one tile of two
    if constexpr (kPairs) {
#pragma unroll 1
      for (; tile + kFullBehindPair < full_tiles; tile += 2) {
        step<kLse, false, kOpens>(params, shared, work, warp, lane, tile, place, false, state);
        if (kOpenEnd && tile + 1 == full_tiles) {
          ++tile, open = true;
          __syncwarp();  // an instruction on this exit alone: the exit's moves then stand here, and not in the loop
          break;
        }
        step<kLse, false, kCloses>(params, shared, work, warp, lane, tile + 1, place, true, state);
      }
      change_factor(state);
    } else {
#pragma unroll 1
      for (; tile < full_tiles; ++tile) {
        step<kLse, false, kAlone>(params, shared, work, warp, lane, tile, place, false, state);
      }
    }
#pragma unroll 1
    for (; tile < tiles; ++tile, open = false) {
      step<kLse, true, kAlone>(params, shared, work, warp, lane, tile, place, open, state);
    }
    start_output(shared, open, state);
    finish_output<0>(shared, state);
    add_output(state);
    scale_output(state.o_factor, state);
  }

  // The output of the tile before, and P of this one. `open`: R holds P·V of one tile of two.
  template <bool kLse, bool kMasked, Sum kSum>
  __device__ __forceinline__ static void step(const AttnParams& params, const Shared& shared, const Work& work,
                                              i32 warp, i32 lane, i32 tile, Place& place, bool open, State& state) {
    await_turn(state.consumer);
    start_output(shared, open, state);
    if constexpr (!kTogether) finish_output<0>(shared, state);
    start_scores(shared, place, state);
    const Place here = place;
    place.advance();
    const float scale = score_scale(facts_of(shared, lane, here), state);
    if constexpr (kTogether) finish_output<1>(shared, state);
    const float r_factor = state.v_factor;
    float pending[kRows];
#pragma unroll
    for (i32 r = 0; r < kRows; ++r) pending[r] = state.alpha[r];
    if constexpr (kSum != kOpens) add_output(state);
    if constexpr (kSum == kCloses && !kTogether && !kLse) keep_in_front(shared, here);
    ptx::wgmma_wait<0>();
    float own_largest[kRows];
    finish_scores<kMasked>(params, shared, work, warp, lane, tile, scale, here, state, own_largest);
    end_turn(state.consumer, own_largest);
    // Where the P·V above opened R, R takes this tile too: references may rise, and do not restart.
    exponentiate<kLse, kMasked, kSum != kOpens>(shared, lane, scale, own_largest, here, state);
    if constexpr (kSum == kOpens) rescale_sum(pending, r_factor, state);
    if constexpr (kSum == kAlone) change_factor(state);
  }

  // Issues Q·K of the next tile.
  __device__ __forceinline__ static void start_scores(const Shared& shared, const Place& place, State& state) {
    ptx::mbarrier_wait(shared.full(place.index), place.phase);
    i32 (&s)[Config::kBlockN / 2] = reinterpret_cast<i32 (&)[Config::kBlockN / 2]>(state.acc_s);
    const u64 q = matrix_descriptor<Layout::kQkRowBytes>(state.q);
    const u64 k = matrix_descriptor<Layout::kQkRowBytes>(shared.slot(place.index));
    ptx::wgmma_fence();
#pragma unroll
    for (i32 step = 0; step < Layout::kQkRowBytes / 32; ++step) {
      ptx::wgmma_m64n128k32_s8s8s32(s, q + step * kNextK, k + step * kNextK, step > 0);
    }
    ptx::wgmma_commit();
  }

  // What the line of the next tile says. Read twice, since no register holds it over a turn.
  __device__ __forceinline__ static KvTileFacts facts_of(const Shared& shared, i32 lane, const Place& place) {
    return {shared.slot(place.index) + Shared::kLine, lane};
  }

  // The scale of this thread's scores in that tile.
  __device__ __forceinline__ static float score_scale(const KvTileFacts& facts, const State& state) {
    return fmaxf(state.q_scale * fabsf(facts.k_scale), kSmallestScale);
  }

  // R outlives the next tile: brings it to the references that the softmax of that tile raised, and with O to the factor of
  // its V; both seldom change. r_factor: in which R counts.
  __device__ __forceinline__ static void rescale_sum(const float (&pending)[kRows], float r_factor, State& state) {
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

  // Issues P·V, ones included, which R takes beside what it holds where it is open.
  __device__ __forceinline__ static void start_output(const Shared& shared, bool open, State& state) {
    const u64 v = matrix_descriptor<Config::kBlockN>(shared.slot(state.previous) + Layout::kV);
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

  // Waits for P·V, kPending products later than it, and gives its slot back.
  template <i32 kPending>
  __device__ __forceinline__ static void finish_output(const Shared& shared, const State& state) {
    ptx::wgmma_wait<kPending>();
    ptx::mbarrier_arrive(shared.empty(state.previous));
  }

  // O = alpha · O + R, and so the sums of P.
  __device__ __forceinline__ static void add_output(State& state) {
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
  __device__ __forceinline__ static void finish_scores(const AttnParams& params, const Shared& shared, const Work& work,
                                                       i32 warp, i32 lane, i32 tile, float scale, const Place& place,
                                                       State& state, float (&own_largest)[kRows]) {
    constexpr bool kFinished = kMasked || Config::kSmoothQ;
    if constexpr (kFinished) convert_scores(shared.slot(place.index), lane, scale, state.acc_s);
    if constexpr (kMasked) mask(params, work, warp, lane, tile, state.acc_s);
    Softmax::template find_largest<kFinished>(state.acc_s, own_largest);
  }

  // References and P of the tile whose scores are finished. Reads their scale again, even if it is one: a load does not move
  // in front of the end of the turn, and so no exponential does.
  template <bool kLse, bool kMasked, bool kRestart>
  __device__ __forceinline__ static void exponentiate(const Shared& shared, i32 lane, float scale,
                                                      const float (&own_largest)[kRows], const Place& place,
                                                      State& state) {
    constexpr bool kFinished = kMasked || Config::kSmoothQ;
    state.softmax.template move_references<kRestart>(own_largest, Config::kSmoothQ ? 1.0f : scale, state.alpha);
    const KvTileFacts facts = facts_of(shared, lane, place);
    state.v_factor = fabsf(facts.v_factor);
    state.signs |= facts.signs();
    if constexpr (!Config::kSmoothQ) scale = score_scale(facts, state);
    else if constexpr (kTogether) scale = ptx::load_shared_f32(shared.first + Shared::kOne);
    else scale = 1.0f;
    state.softmax.template exponentiate<kFinished>(state.acc_s, scale);
    if constexpr (kLse) state.softmax.add(state.acc_s, state.alpha, state.exact_sum);
    state.softmax.pack(state.acc_s, state.p);
    state.previous = place.index;
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

  __device__ __forceinline__ static void mask(const AttnParams& params, const Work& work, i32 warp, i32 lane, i32 tile,
                                              typename Softmax::Scores& acc_s) {
    const i32 row = work.first_row + warp * Config::kWarpM + lane / 4;
    const i32 first_key = tile * Config::kBlockN + lane % 4 * 2;
    i32 limit[kRows];
#pragma unroll
    for (i32 r = 0; r < kRows; ++r) limit[r] = Work::key_limit<Config::kCausal>(params, row + 8 * r) - first_key;
    Scores<Config>::mask(acc_s, limit);
  }
};

}  // namespace sage
