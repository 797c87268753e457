// The gradients of K and V on Hopper: dV = Σ Pᵀ · dO and dK = Σ dSᵀ · Q, as mma/grad_kv.cuh has them, but that P, in
// the type of dO, and dS, in bf16, are multiplied in 16 bits: half the instructions, smaller errors, longer products
// (docs/decisions.md). Warpgroup 0, the producer, copies tiles of Q and dO; the others, the consumers, have 64 keys
// each, and go over these tiles.
//
// A step of a consumer, with dS of the tile before in registers, at head dim 64:
//   issue S = K·Qᵀ of this tile, dK of the tile before, dP = V·dOᵀ of this tile;
//   P, beside dK and dP, then issue dV;
//   dS, beside dV.
// At head dim 128, which has fewer registers:
//   issue dK of the tile before, S, dP;
//   P, beside dP; wait for dP, then issue dV;
//   dS, beside dV.
// No product is in flight from one step to the next: ptxas serializes products that are (C7514).
// Source: SageAttention3, Algorithm 3; "FlashAttention-3", section 3.1, for the roles of warpgroups.
#pragma once

#include "sage/bwd/key_block.cuh"
#include "sage/bwd/wgmma/pipeline.cuh"
#include "sage/bwd/wgmma/products.cuh"
#include "sage/bwd/wgmma/store_rows.cuh"
#include "sage/constants.cuh"
#include "sage/ptx/barrier.cuh"
#include "sage/ptx/setmaxnreg.cuh"

namespace sage {

// Config: kHeadDim, kHalves, kSharedBytes that a block can have.
template <class Config>
class BwdKv {
  using Tile = BwdTile<Config>;
  static_assert(Config::kHalves);
  static constexpr i32 kConsumers = 2, kBlockRows = kConsumers * kRowsOfWarpgroup;
  static constexpr i32 kStages = 4;
  static constexpr i32 kKeyBytes = Tile::kSide;  // K̂ and V of a consumer unless kHeld; then rows of its gradients
  static_assert(4 * StoreGradient<Config>::kBytes <= kKeyBytes);
  using Pipeline = TilePipeline<Tile, Tile::kQBytes, kStages, kConsumers>;

 public:
  static constexpr i32 kThreads = (1 + kConsumers) * kWarpgroup, kMinBlocks = 1;
  static constexpr i32 kSharedBytes = kConsumers * kKeyBytes + Pipeline::kBytes;
  static_assert(kSharedBytes <= Config::kSharedBytes);

  static constexpr auto facts() {
    return sage::facts(Fact{"threads", kThreads}, Fact{"shared_bytes", kSharedBytes}, Fact{"block_rows", kBlockRows},
                       Fact{"halves", 1});
  }

  template <Dtype kDtype, bool kPacked>
  __device__ __forceinline__ static void run(const BwdParams& params, u8* shared) {
    const u32 keys = ptx::shared_address(shared);
    const Pipeline pipeline(keys + kConsumers * kKeyBytes);
    if (!Block<kPacked>(params, 0).has_keys()) return;
    if (threadIdx.x == 0) pipeline.init();
    __syncthreads();
    const i32 warpgroup = ptx::uniform(static_cast<i32>(threadIdx.x / kWarpgroup));
    if (warpgroup == 0) {
      ptx::setmaxnreg_dec<kProducerRegisters>();
      produce<kPacked>(params, pipeline, keys);
    } else {
      ptx::setmaxnreg_inc<kConsumerRegisters>();
      consume<kDtype, kPacked>(params, pipeline, warpgroup - 1, keys + (warpgroup - 1) * kKeyBytes);
    }
  }

 private:
  // kRoomy: registers hold P as an operand while dP is in flight. kHeld: registers hold K̂ and V.
  static constexpr bool kRoomy = Config::kHeadDim <= 64, kHeld = kRoomy;
  static constexpr i32 kProducerRegisters = kRoomy ? 40 : 24, kConsumerRegisters = kRoomy ? 232 : 240;
  static constexpr i32 kProducerBarrier = 1, kStoreBarrier = 2;  // of the first consumer
  using Stage = typename Pipeline::Stage;
  template <bool kPacked>
  using Block = KeyBlock<kPacked, kBlockRows>;

  // Tiles of Q and dO in which rows of dO that are not finite are zeros. P of such a row is NaN where it sees a key,
  // and what it adds where it sees none must stay zero.
  template <class Own>
  class FiniteTiles : public QueryTiles<Config, Own, kWarpgroup> {
    using Tiles = QueryTiles<Config, Own, kWarpgroup>;

   public:
    using Tiles::Tiles;

    // Loads bits that the next call looks at, so that nothing waits for the load.
    __device__ __forceinline__ void begin(i32 stage) {
      end();
      const auto words = reinterpret_cast<const u32*>(this->side() + (Tile::kSpoilt - Tile::kSide));
      low_ = words[0], high_ = words[2], bit_ = 1u << stage;
    }
    __device__ __forceinline__ void end() {
      const u32 own = threadIdx.x < kWarpSize ? low_ : high_;
      tiles_ = (low_ | high_) != 0 ? tiles_ | bit_ : tiles_ & ~bit_;
      own_row_ = (own >> threadIdx.x % kWarpSize & 1) != 0 ? own_row_ | bit_ : own_row_ & ~bit_;
    }
    __device__ __forceinline__ void finish(i32 stage, u32 tile) const {
      const u32 bit = 1u << stage;
      if ((tiles_ & bit) == 0) return;
      ptx::barrier_sync(kProducerBarrier, kWarpgroup);  // the copies of all threads have landed
      if (threadIdx.x >= kTileRows || (own_row_ & bit) == 0) return;
      for (i32 chunk = 0; chunk < Tile::Halves::kRowBytes / 16; ++chunk) {
        const u32 to = tile + Tile::kHalves + Tile::Halves::offset(threadIdx.x, chunk);
        for (i32 word = 0; word < 4; ++word) ptx::store_shared_u32(to + word * sizeof(u32), 0);
      }
    }

   private:
    u32 low_ = 0, high_ = 0, bit_ = 0;  // of the tile whose turn it was: bits of its rows, and the bit of its stage
    u32 tiles_ = 0,
        own_row_ = 0;  // a bit for each stage: whether its tile has such rows, and whether this thread's is one
  };

  template <bool kPacked>
  __device__ __forceinline__ static void produce(const BwdParams& params, const Pipeline& pipeline, u32 keys) {
    const Block<kPacked> own(params, 0);
    FiniteTiles<Block<kPacked>> tiles(params, own);
    if (tiles.count == 0) return;
    if constexpr (!kHeld) {
#pragma unroll
      for (i32 i = 0; i < kConsumers; ++i) {
        copy_keys_async<Config, kWarpgroup>(params, own, i * kRowsOfWarpgroup, keys + i * kKeyBytes);
      }
    }
    pipeline.produce(tiles, tiles.count);
  }

  // Constants of a thread's columns, each loaded kAhead column tiles before it is needed: the first of P in front of
  // the products of a step. A load behind them would share a scoreboard with the products, and wait for them.
  class ColumnsAhead {
   public:
    __device__ __forceinline__ explicit ColumnsAhead(const QueryColumns<Config>& from) : from_(from) {
#pragma unroll
      for (i32 n = 0; n < kAhead; ++n) of_[n] = from_.minus_lse(n);
      begin_scales();
    }
    __device__ __forceinline__ void begin_delta() {
#pragma unroll
      for (i32 n = 0; n < kAhead; ++n) of_[n] = from_.minus_scaled_delta(n);
      begin_scales();
    }
    __device__ __forceinline__ ptx::F32x2 minus_lse(i32 n) {
      const ptx::F32x2 x = of_[n % kAhead];
      if (n + kAhead < kColumnTiles) of_[n % kAhead] = from_.minus_lse(n + kAhead);
      return x;
    }
    __device__ __forceinline__ ptx::F32x2 minus_scaled_delta(i32 n) {
      const ptx::F32x2 x = of_[n % kAhead];
      if (n + kAhead < kColumnTiles) of_[n % kAhead] = from_.minus_scaled_delta(n + kAhead);
      return x;
    }
    __device__ __forceinline__ ptx::F32x2 q_scale(i32 n) {
      const ptx::F32x2 x = scale_[n % kAhead / 2];
      if (n + kAhead < kColumnTiles) scale_[n % kAhead / 2] = from_.q_scale(n + kAhead);
      return x;
    }

   private:
    static constexpr i32 kAhead = 4;

    __device__ __forceinline__ void begin_scales() {
#pragma unroll
      for (i32 n = 0; n < kAhead; n += 2) scale_[n / 2] = from_.q_scale(n);
    }

    const QueryColumns<Config> from_;
    ptx::F32x2 of_[kAhead], scale_[kAhead / 2];
  };

  // A consumer: its keys, their gradients, and what one step leaves to the next.
  template <Dtype kDtype, class Own>
  struct Consumer {
    const Pipeline& pipeline;
    const i32 lane;
    const OwnRows<Config, kHeld> keys;
    const CausalColumns<Own> columns;
    float key_scale[2];  // of the rows g and g + 8
    bool is_causal;
    Gradient<Config, 1> grad_k, grad_v;
    Stage stage;
    HalfRowsOperand p, grad_s;
    Accumulator x, y;

    __device__ __forceinline__ Consumer(const BwdParams& params, const Pipeline& pipeline_, const Own& own, u32 keys_)
        : pipeline(pipeline_),
          lane(threadIdx.x % kWarpSize),
          keys(keys_, Tile::k_codes(params, own.tile_of(params, own.key())), own.of_block % kTileRows,
               own.values(params, own.key()), lane),
          columns(own, lane),
          is_causal(params.is_causal) {
      load_key_scales<Config>(key_scale, params, own.tile_of(params, own.key()), own.of_block % kTileRows, lane);
    }

    // The tiles of one query head from `begin` to `end`, which see any of the consumer's keys; those from `whole` on
    // see all of them.
    __device__ __forceinline__ void add_head(i32 begin, i32 whole, i32 end) {
      u32 queries = pipeline.wait(stage);
      ColumnsAhead ahead({queries, lane});
      issue_scores(queries);
      issue_grad(queries);
      find_tile<true, true>(queries, begin, ahead);
      i32 tile = begin + 1;
#pragma unroll 1
      for (; tile < min(whole, end); ++tile) step<true>(queries, tile);
#pragma unroll 1
      for (; tile < end; ++tile) step<false>(queries, tile);
      issue_gradient<Dtype::kBf16>(grad_k, grad_s, queries + Tile::kHalfCodes);
      ptx::wgmma_wait<0>();  // dK and dV are read behind a barrier, which no read passes
      pipeline.release(stage);
    }

   private:
    // Adds dK of the tile before, in `queries`, and finds P and dS of this tile, in the next stage.
    template <bool kMasked>
    __device__ __forceinline__ void step(u32& queries, i32 tile) {
      Stage next = stage;
      next.advance();
      const u32 next_queries = pipeline.wait(next);
      ColumnsAhead ahead({next_queries, lane});
      if constexpr (kRoomy) issue_scores(next_queries);
      issue_gradient<Dtype::kBf16>(grad_k, grad_s, queries + Tile::kHalfCodes);
      if constexpr (!kRoomy) issue_scores(next_queries);
      issue_grad(next_queries);
      queries = next_queries;
      find_tile<kMasked, false>(queries, tile, ahead);
    }

    __device__ __forceinline__ void issue_scores(u32 queries) {
      issue_product<WgmmaS8, typename Tile::Codes, false>(x, keys.codes(), queries + Tile::kCodes);
    }
    __device__ __forceinline__ void issue_grad(u32 queries) {
      issue_product<WgmmaHalf<kDtype>, typename Tile::Halves, false>(y, keys.halves(), queries + Tile::kHalves);
    }

    // Issues Pᵀ · dO.
    __device__ __forceinline__ void add_grad_v(const ColumnTiles<float, 1>& probabilities, u32 queries) {
      halve<kDtype>(p, probabilities);
      issue_gradient<kDtype>(grad_v, p, queries + Tile::kHalves);
    }

    // P and dS of a tile, and dV. kFirst: no product of dK is in flight between S and dP.
    template <bool kMasked, bool kFirst>
    __device__ __forceinline__ void find_tile(u32 queries, i32 tile, ColumnsAhead& ahead) {
      i32 seen[1][2];
      const i32 seen_from = columns.first_query() - tile * kTileRows;
#pragma unroll
      for (i32 r = 0; r < 2; ++r) seen[0][r] = kMasked && is_causal ? columns.of_key(r, lane, seen_from) : 0;
      wait_for<kRoomy && !kFirst ? 2 : 1>(x);
      ColumnTiles<float, 1> found, grad_p;  // P, then dS
      exponentiate(found, x, key_scale, ahead);
      if constexpr (kMasked) hide<true, 1>(found, seen, lane);
      if constexpr (kRoomy) add_grad_v(found, queries);
      ahead.begin_delta();
      wait_for<kRoomy ? 1 : 0>(y);
      if constexpr (!kFirst) pipeline.release(stage);
      if constexpr (!kRoomy) add_grad_v(found, queries);
      as_floats(grad_p, y);
      multiply_by_grad(found, grad_p, ahead);
      if constexpr (kMasked) hide<true, 1>(found, seen, lane);  // again: dP may be NaN where P is zero
      halve<Dtype::kBf16>(grad_s, found);
      ptx::wgmma_wait<0>();
    }
  };

  template <Dtype kDtype, bool kPacked>
  __device__ __forceinline__ static void consume(const BwdParams& params, const Pipeline& pipeline, i32 consumer,
                                                 u32 keys) {
    const Block<kPacked> own(params, warp_of_consumers());
    Consumer<kDtype, Block<kPacked>> work(params, pipeline, own, keys);
    const i32 end = ceil_div(own.entry.queries().count, kTileRows);
    const i32 first_key = own.first_key + consumer * kRowsOfWarpgroup;
    const i32 first = first_tile(params, own, own.first_key, end), begin = first_tile(params, own, first_key, end);
    const i32 whole = whole_from(params, own, first_key + kRowsOfWarpgroup - 1);
#pragma unroll 1
    for (i32 head = 0; head < params.q_heads_per_kv_head; ++head) {
      pipeline.pass(work.stage, begin - first);
      if (begin < end) work.add_head(begin, whole, end);
    }
    ptx::barrier_sync(kStoreBarrier + consumer, kWarpgroup);  // all warps' products have read the consumer's keys
    const Block<kPacked> again(params, warp_of_consumers());  // takes no registers before
    const CallerRows rows = again.entry.keys();
    const StoreGradient<Config> store{keys + warp_of_consumers() % 4 * StoreGradient<Config>::kBytes,
                                      static_cast<i32>(threadIdx.x % kWarpSize)};
    store.template run<kDtype>(work.grad_k, params.grad_k, again.batch(params), again.head(params), rows, again.key(),
                               params.headdim, kLn2);  // the scale of Q̂ has log2 e
    store.template run<kDtype>(work.grad_v, params.grad_v, again.batch(params), again.head(params), rows, again.key(),
                               params.headdim, 1.0f);
  }

  __device__ __forceinline__ static i32 warp_of_consumers() { return threadIdx.x / kWarpSize - kWarpgroup / kWarpSize; }
  // The first tile of queries that sees a key, at most `end`.
  template <class Own>
  __device__ __forceinline__ static i32 first_tile(const BwdParams& params, const Own& own, i32 key, i32 end) {
    return params.is_causal ? min(max(0, first_seeing(own.entry, key)) / kTileRows, end) : 0;
  }
  // The first tile of queries of which all see a key.
  template <class Own>
  __device__ __forceinline__ static i32 whole_from(const BwdParams& params, const Own& own, i32 key) {
    return params.is_causal ? ceil_div(max(0, first_seeing(own.entry, key)), kTileRows) : 0;
  }
};

}  // namespace sage
