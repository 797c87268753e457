// The gradients of K and V on Hopper: dV = Σ Pᵀ · dO and dK = Σ dSᵀ · Q, as mma/grad_kv.cuh has them, but that P, in
// the type of dO, and dS, in bf16, are multiplied in 16 bits: half the instructions, smaller errors, longer products
// (docs/decisions.md). Warpgroup 0 is the producer: one of its threads copies tiles of Q and dO. The other warpgroups,
// the consumers, have 64 keys each, and go over these tiles. Where all gradients are asked for, blocks add up dQ, too
// (sums_q.cuh).
//
// A step of a consumer, with dS of the tile before in registers, at head dim 64:
//   issue S = K·Qᵀ of this tile, dK of the tile before, dP = V·dOᵀ of this tile;
//   P, under dK and dP, then issue dV;
//   dS, under dV.
// At head dim 128, which has fewer registers:
//   issue dK of the tile before, S, dP;
//   P, under dP; wait for dP, then issue dV;
//   dS, under dV.
// With dQ:
//   issue dQ and dK of the tile before, S; wait for dQ, and leave it, under dK and S; then issue dP;
//   P, under dP; dV as above; dS, under dV, also to shared memory.
// No product is in flight from one step to the next: ptxas serializes products that are (C7514).
// Source: SageAttention3, Algorithm 3; "FlashAttention-3", section 3.1, for the roles of warpgroups.
#pragma once

#include "sage/bwd/key_block.cuh"
#include "sage/bwd/wgmma/products.cuh"
#include "sage/bwd/wgmma/query_tiles.cuh"
#include "sage/bwd/wgmma/store_rows.cuh"
#include "sage/bwd/wgmma/sums_q.cuh"
#include "sage/constants.cuh"
#include "sage/ptx/barrier.cuh"
#include "sage/ptx/cp_async.cuh"
#include "sage/ptx/proxy.cuh"
#include "sage/ptx/setmaxnreg.cuh"

namespace sage {

// Config: kHeadDim, kHalves, kSumsQ: whether blocks add up dQ, kSharedBytes that a block can have.
template <class Config>
class BwdKv {
  using Tile = BwdTile<Config>;
  static_assert(Config::kHalves);
  static constexpr i32 kConsumers = 2, kBlockRows = kConsumers * kRowsOfWarpgroup;
  static constexpr bool kSumsQ = Config::kSumsQ;
  static constexpr i32 kStages = kSumsQ && Config::kHeadDim > 64 ? 2 : 4;
  static constexpr i32 kKeyBytes = Tile::kSide;  // K̂ and V of a consumer unless kHeld; then rows of its gradients
  static_assert(4 * StoreGradient<Config>::kBytes <= kKeyBytes && kConsumers * kKeyBytes % 1024 == 0);
  static_assert(QSums<Config>::kConsumers == kConsumers);
  static constexpr i32 kSumBytes = kSumsQ ? QProducts<Config>::kBytes : 0;
  using Pipelines = QueryPipelines<Tile, kStages, kConsumers>;
  using Stage = typename Pipelines::Stage;

 public:
  static constexpr i32 kThreads = (1 + kConsumers) * kWarpgroup, kMinBlocks = 1;
  static constexpr i32 kSharedBytes = kConsumers * kKeyBytes + kSumBytes + Pipelines::kBytes;
  static_assert(kSharedBytes <= Config::kSharedBytes);

  // in_order: whether blocks wait for those of lower index.
  static constexpr auto facts() {
    return sage::facts(Fact{"threads", kThreads}, Fact{"shared_bytes", kSharedBytes}, Fact{"block_rows", kBlockRows},
                       Fact{"halves", 1}, Fact{"in_order", kSumsQ});
  }

  template <Dtype kDtype, bool kPacked>
  __device__ __forceinline__ static void run(const BwdParams& params, u8* shared) {
    const u32 keys = ptx::shared_address(shared);
    const u32 sums = keys + kConsumers * kKeyBytes;
    const Pipelines pipelines(sums + kSumBytes);
    if (!Block<kPacked>::has_head(params) || !Block<kPacked>(params, 0).has_keys()) return;
    if (threadIdx.x == 0) {
      if constexpr (kSumsQ) QProducts<Config>::barriers(sums).init(kConsumers * kWarpgroup);
      pipelines.init();
    }
    __syncthreads();
    const i32 warpgroup = ptx::uniform(static_cast<i32>(threadIdx.x / kWarpgroup));
    if (warpgroup == 0) {
      ptx::setmaxnreg_dec<kProducerRegisters>();
      produce<kPacked>(params, pipelines, keys, sums);
    } else {
      ptx::setmaxnreg_inc<kConsumerRegisters>();
      consume<kDtype, kPacked>(params, pipelines, warpgroup - 1, keys + (warpgroup - 1) * kKeyBytes, sums);
    }
  }

 private:
  // kRoomy: registers hold P as an operand while dP is in flight. kHeld: registers hold K̂ and V.
  static constexpr bool kRoomy = Config::kHeadDim <= 64, kHeld = kRoomy;
  static constexpr bool kScoresFirst = kRoomy && !kSumsQ;  // S in front of dK
  static constexpr i32 kProducerRegisters = kRoomy ? 40 : 24, kConsumerRegisters = kRoomy ? 232 : 240;
  static constexpr i32 kKeyBarrier = 1, kStoreBarrier = 2;  // kStoreBarrier: of the first consumer
  static constexpr bool kCopiesKeys = !kHeld || kSumsQ;
  template <bool kPacked>
  using Block = KeyBlock<kPacked, kBlockRows, kSumsQ>;

  template <bool kPacked>
  using Tiles = QueryTilesBackwards<Block<kPacked>>;

  // The producer: all threads copy the keys. Then one copies tiles of queries, and one of each of the last two warps
  // adds to the sums of dQ.
  template <bool kPacked>
  __device__ __forceinline__ static void produce(const BwdParams& params, const Pipelines& pipelines, u32 keys,
                                                 u32 sums) {
    const Block<kPacked> own(params, 0);
    Tiles<kPacked> tiles(params, own);
    if (!tiles.any()) return;
    if constexpr (kCopiesKeys) {
      copy_keys(params, own, keys, sums);
      ptx::cp_async_commit();
    }
    Stage next;
    if (threadIdx.x == 0) pipelines.copy(next, params, tiles.of_all());  // with the copies of the keys
    if constexpr (kCopiesKeys) {
      ptx::cp_async_wait<0>();
      ptx::fence_proxy_async();
      __syncwarp();
      ptx::barrier_arrive(kKeyBarrier, kThreads);
    }
    if (threadIdx.x == 0) {
#pragma unroll 1
      for (tiles.advance(); tiles.any(); tiles.advance()) pipelines.copy(next, params, tiles.of_all());
    }
    if constexpr (kSumsQ) add_to_sums(params, own, tiles, sums);  // by other threads, whose `tiles` is at the first
  }

  // Begins to copy what the products read of the block's keys.
  template <class Own>
  __device__ __forceinline__ static void copy_keys(const BwdParams& params, const Own& own, u32 keys, u32 sums) {
#pragma unroll
    for (i32 i = 0; i < kConsumers; ++i) {
      const i32 row = i * kRowsOfWarpgroup;
      if constexpr (!kHeld) copy_keys_async<Config, kWarpgroup>(params, own, row, keys + i * kKeyBytes);
      if constexpr (kSumsQ) {
        const u8* const half_codes = Tile::kv_side(params, own.tile_of(params, own.first_key + row));
        copy_async<Tile::kHalfBytes, kWarpgroup>(QProducts<Config>::half_codes(sums, i), half_codes + threadIdx.x * 16);
      }
    }
  }

  // Adds the block's products to the sums of dQ.
  template <class Own, class OwnTiles>
  __device__ __forceinline__ static void add_to_sums(const BwdParams& params, const Own& own, OwnTiles& tiles,
                                                     u32 sums) {
    constexpr i32 kAdders = SumBarriers::kAdders, kFirst = kWarpgroup / kWarpSize - kAdders;  // the last warps
    const i32 adder = static_cast<i32>(threadIdx.x / kWarpSize) - kFirst;
    if (adder < 0 || threadIdx.x % kWarpSize != 0) return;
    QSumAdder<Config> work{params, sums, static_cast<u32>(own.first_key / kBlockRows), static_cast<u32>(adder)};
#pragma unroll 1
    for (i32 i = 0; tiles.any(); ++i, tiles.advance()) {
      if (i % kAdders == adder) work.add(tiles.of_all());
    }
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
      for (i32 n = 0; n < kAhead; ++n) of_[n] = load_delta(n);
      begin_scales();
    }
    __device__ __forceinline__ ptx::F32x2 minus_lse(i32 n) {
      const ptx::F32x2 x = of_[n % kAhead];
      if (n + kAhead < kColumnTiles) of_[n % kAhead] = from_.minus_lse(n + kAhead);
      return x;
    }
    __device__ __forceinline__ ptx::F32x2 minus_delta(i32 n) { return delta(n); }
    __device__ __forceinline__ ptx::F32x2 minus_scaled_delta(i32 n) { return delta(n); }
    __device__ __forceinline__ ptx::F32x2 q_scale(i32 n) {
      const ptx::F32x2 x = scale_[n % kAhead / 2];
      if (n + kAhead < kColumnTiles) scale_[n % kAhead / 2] = from_.q_scale(n + kAhead);
      return x;
    }

   private:
    static constexpr i32 kAhead = 4;

    // -D; times the scale of Q̂ unless dQ, which needs dS without it, is summed.
    __device__ __forceinline__ ptx::F32x2 load_delta(i32 n) const {
      return kSumsQ ? from_.minus_delta(n) : from_.minus_scaled_delta(n);
    }
    __device__ __forceinline__ ptx::F32x2 delta(i32 n) {
      const ptx::F32x2 x = of_[n % kAhead];
      if (n + kAhead < kColumnTiles) of_[n % kAhead] = load_delta(n + kAhead);
      return x;
    }
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
    const Pipelines& pipelines;
    const i32 lane, warp;  // warp: of all consumers
    const OwnRows<Config, kHeld> keys;
    const CausalColumns<Own> columns;
    float key_scale[2];  // of the rows g and g + 8
    bool with_diagonal;
    const i32 keys_left;  // of the batch entry, from the warp's first on
    QProducts<Config> q_sums;
    Gradient<Config, 1> grad_k, grad_v;
    Stage stage;  // of the tile whose dK is next
    HalfRowsOperand p, grad_s;
    Accumulator x, y;

    __device__ __forceinline__ Consumer(const BwdParams& params, const Pipelines& pipelines_, const Own& own, u32 keys_,
                                        u32 sums)
        : pipelines(pipelines_),
          lane(threadIdx.x % kWarpSize),
          warp(warp_of_consumers()),
          keys(keys_, Tile::k_codes(params, own.tile_of(params, own.key())), own.of_block % kTileRows,
               own.values(params, own.key()), lane),
          columns(own, lane),
          with_diagonal(has_diagonal(params)),
          keys_left(own.entry.keys().count - own.key()),
          q_sums(sums, warp, lane) {
      load_key_scales<Config>(key_scale, params, own.tile_of(params, own.key()), own.of_block % kTileRows, lane);
    }

    // The tiles of one query head from `begin` to `end`, which see any of the consumer's keys, backwards; those from
    // `whole` on see all of them.
    __device__ __forceinline__ void add_head(i32 begin, i32 whole, i32 end) {
      const u32 queries = pipelines.rows.wait(stage);
      ColumnsAhead ahead({queries, lane});
      issue_scores(queries);
      issue_grad(queries);
      i32 tile = end - 1;
      find_tile<true, true>(queries, tile--, ahead);
#pragma unroll 1
      for (; tile >= max(whole, begin); --tile) step<false>(tile);
#pragma unroll 1
      for (; tile >= begin; --tile) step<true>(tile);
      typename QProducts<Config>::Accumulator grad_q;
      if constexpr (kSumsQ) q_sums.issue(grad_q, warp / 4);
      issue_gradient<Dtype::kBf16>(grad_k, grad_s, pipelines.half_codes.wait(stage));
      if constexpr (kSumsQ) leave_grad_q<1>(grad_q);
      ptx::wgmma_wait<0>();  // dK and dV are read behind a barrier, which no read passes
      pipelines.half_codes.release(stage);
      stage.advance();
    }

    // Releases a tile that this consumer does not read.
    __device__ __forceinline__ void pass() {
      pipelines.rows.wait(stage), pipelines.rows.release(stage);
      pipelines.half_codes.wait(stage), pipelines.half_codes.release(stage);
      stage.advance();
    }

   private:
    // Adds dK, and dQ, of the tile before, and finds P and dS of this tile.
    template <bool kMasked>
    __device__ __forceinline__ void step(i32 tile) {
      Stage next = stage;
      next.advance();
      const u32 queries = pipelines.rows.wait(next), half_codes = pipelines.half_codes.wait(stage);
      ColumnsAhead ahead({queries, lane});
      typename QProducts<Config>::Accumulator grad_q;
      if constexpr (kSumsQ) q_sums.issue(grad_q, warp / 4);
      if constexpr (kScoresFirst) issue_scores(queries);
      issue_gradient<Dtype::kBf16>(grad_k, grad_s, half_codes);
      if constexpr (!kScoresFirst) issue_scores(queries);
      if constexpr (kSumsQ) leave_grad_q<2>(grad_q);
      issue_grad(queries);
      find_tile<kMasked, false>(queries, tile, ahead);
    }

    __device__ __forceinline__ void issue_scores(u32 queries) {
      issue_product<WgmmaS8, typename Tile::Codes, false>(x, keys.codes(), queries + Tile::kCodes);
    }
    __device__ __forceinline__ void issue_grad(u32 queries) {
      issue_product<WgmmaHalf<kDtype>, typename Tile::Halves, false>(y, keys.halves(), queries + Tile::kHalves);
    }

    // Waits until at most kPending products are in flight, and leaves dQ, whose product has ended then.
    template <i32 kPending>
    __device__ __forceinline__ void leave_grad_q(typename QProducts<Config>::Accumulator& grad_q) {
      wait_for<kPending>(grad_q);
      q_sums.leave(grad_q, warp, lane);
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
      for (i32 r = 0; r < 2; ++r) {
        seen[0][r] = kMasked && with_diagonal ? columns.of_key(r, lane, seen_from) : 0;
        // A key that does not exist has no part in dQ. Its dK and dV are not stored.
        if (kMasked && kSumsQ && lane / 4 + 8 * r >= keys_left) seen[0][r] = kTileRows;
      }
      wait_for<kScoresFirst && !kFirst ? 2 : 1>(x);
      ColumnTiles<float, 1> found, grad_p;  // P, then dS
      exponentiate(found, x, key_scale, ahead);
      if constexpr (kMasked) hide<true, 1>(found, seen, lane);
      if constexpr (kRoomy) add_grad_v(found, queries);
      ahead.begin_delta();
      wait_for<kRoomy ? 1 : 0>(y);
      if constexpr (!kFirst) {
        pipelines.half_codes.release(stage);
        stage.advance();
      }
      if constexpr (!kRoomy) add_grad_v(found, queries);
      as_floats(grad_p, y);
      if constexpr (kSumsQ) multiply_by_unscaled_grad(found, grad_p, ahead);
      else multiply_by_grad(found, grad_p, ahead);
      if constexpr (kMasked) hide<true, 1>(found, seen, lane);  // again: dP may be NaN where P is zero
      if constexpr (kSumsQ) {
        ColumnTiles<float, 1> scaled;
        multiply_by_key_scales(scaled, found, key_scale);
        halve<Dtype::kBf16>(grad_s, scaled);
        q_sums.put(grad_s);
        multiply_by_q_scales(found, ahead);
      }
      halve<Dtype::kBf16>(grad_s, found);
      ptx::wgmma_wait<0>();
      pipelines.rows.release(stage);
    }
  };

  template <Dtype kDtype, bool kPacked>
  __device__ __forceinline__ static void consume(const BwdParams& params, const Pipelines& pipelines, i32 consumer,
                                                 u32 keys, u32 sums) {
    const Block<kPacked> own(params, warp_of_consumers());
    Consumer<kDtype, Block<kPacked>> work(params, pipelines, own, keys, sums);
    const Tiles<kPacked> tiles(params, own);
    const i32 first_key = own.first_key + consumer * kRowsOfWarpgroup;
    // A consumer has a part of dQ of all tiles of the block.
    const i32 begin = kSumsQ ? tiles.begin : Tiles<kPacked>::first_tile(params, own, first_key);
    const bool has_all = !kSumsQ || first_key + kRowsOfWarpgroup <= own.entry.keys().count;
    const i32 whole = has_all ? Tiles<kPacked>::whole_from(params, own, first_key + kRowsOfWarpgroup - 1) : tiles.end;
    if (kCopiesKeys && tiles.any()) ptx::barrier_sync(kKeyBarrier, kThreads);
#pragma unroll 1
    for (i32 head = 0; head < params.q_heads_per_kv_head; ++head) {
      if (begin < tiles.end) work.add_head(begin, whole, tiles.end);
#pragma unroll 1
      for (i32 tile = min(begin, tiles.end); tile > tiles.begin; --tile) work.pass();
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
};

}  // namespace sage
