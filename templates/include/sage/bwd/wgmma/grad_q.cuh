// The gradient of Q on Hopper: dQ = softmax_scale · Σ dS · K, as mma/grad_q.cuh has it, but that dS is multiplied in
// bf16, as wgmma/grad_kv.cuh says. Warpgroup 0, the producer, copies tiles of K and V; the others, the consumers, have
// 64 queries each, and go over these tiles.
//
// A step of a consumer, with dS of the tile before in registers:
//   issue S = Q·Kᵀ of this tile, dQ of the tile before, dP - D = dO·Vᵀ - D of this tile;
//   P times the scale of the keys, under dQ and dP; wait for the copies of the next tile; then dS.
// No product is in flight from one step to the next: ptxas serializes products that are (C7514).
// Source: SageAttention3, Algorithm 3; "FlashAttention-3", section 3.1, for the roles of warpgroups.
#pragma once

#include "sage/bwd/query_block.cuh"
#include "sage/bwd/wgmma/pipeline.cuh"
#include "sage/bwd/wgmma/products.cuh"
#include "sage/bwd/wgmma/store_rows.cuh"
#include "sage/ptx/barrier.cuh"
#include "sage/ptx/setmaxnreg.cuh"

namespace sage {

// Config: kHeadDim, kHalves, kSharedBytes that a block can have.
template <class Config>
class BwdQ {
  using Tile = BwdTile<Config>;
  static constexpr i32 kConsumers = Config::kHeadDim <= 64 ? 3 : 2, kBlockRows = kConsumers * kRowsOfWarpgroup;
  static constexpr i32 kStages = 4;
  // Registers hold Q̂ and dO where there are some; else shared memory does, whose reads then bound the products.
  static constexpr bool kHeld = kConsumers == 2;
  // Q̂ and dO of a consumer unless kHeld; then rows of its gradient.
  static constexpr i32 kQueryBytes = kHeld ? Tile::kHalfBytes : Tile::kSide;
  static_assert(4 * StoreGradient<Config>::kBytes <= kQueryBytes);
  using Pipeline = TilePipeline<Tile, Tile::kKvBytes, kStages, kConsumers>;

 public:
  static constexpr i32 kThreads = (1 + kConsumers) * kWarpgroup, kMinBlocks = 1;
  static constexpr i32 kSharedBytes = kConsumers * kQueryBytes + Pipeline::kBytes;
  static_assert(kSharedBytes <= Config::kSharedBytes);

  static constexpr auto facts() {
    return sage::facts(Fact{"threads", kThreads}, Fact{"shared_bytes", kSharedBytes}, Fact{"block_rows", kBlockRows},
                       Fact{"halves", 1});
  }

  template <Dtype kDtype, bool kPacked>
  __device__ __forceinline__ static void run(const BwdParams& params, u8* shared) {
    const u32 queries = ptx::shared_address(shared);
    const Pipeline pipeline(queries + kConsumers * kQueryBytes);
    const Block<kPacked> own(params, 0);
    if (!own.has_queries()) return;
    if (threadIdx.x == 0) pipeline.init();
    __syncthreads();
    const i32 tiles = tiles_of(params, own, own.first_row, kBlockRows);
    const i32 warpgroup = ptx::uniform(static_cast<i32>(threadIdx.x / kWarpgroup));
    if (warpgroup == 0) {
      ptx::setmaxnreg_dec<kProducerRegisters>();
      produce(params, pipeline, own, queries, tiles);
    } else {
      ptx::setmaxnreg_inc<kConsumerRegisters>();
      consume<kDtype, kPacked>(params, pipeline, warpgroup - 1, queries + (warpgroup - 1) * kQueryBytes, tiles);
    }
  }

 private:
  static constexpr i32 kProducerRegisters = kConsumers == 3 ? 32 : 40, kConsumerRegisters = kConsumers == 3 ? 160 : 232;
  static constexpr i32 kStoreBarrier = 1;  // of the first consumer
  using Stage = typename Pipeline::Stage;
  template <bool kPacked>
  using Block = QueryBlock<kPacked, kBlockRows>;

  template <class Own>
  __device__ __forceinline__ static void produce(const BwdParams& params, const Pipeline& pipeline, const Own& own,
                                                 u32 queries, i32 count) {
    if (count == 0) return;
    if constexpr (!kHeld) {
#pragma unroll
      for (i32 i = 0; i < kConsumers; ++i) {
        copy_queries_async<Config, kWarpgroup>(params, own, i * kRowsOfWarpgroup, queries + i * kQueryBytes);
      }
    }
    KeyTiles<Config, kWarpgroup> tiles(params, own);
    pipeline.produce(tiles, count);
  }

  // A consumer: its queries, their gradient, and what one step leaves to the next.
  template <Dtype kDtype, class Own>
  struct Consumer {
    const BwdParams& params;
    const Pipeline& pipeline;
    const Own& own;
    const i32 lane;
    const OwnRows<Config, kHeld> queries;
    const QueryRows<Config, 1> rows;
    Gradient<Config, 1> gradient;
    Stage stage;
    HalfRowsOperand grad_s;
    Accumulator x, y;

    __device__ __forceinline__ Consumer(const BwdParams& params_, const Pipeline& pipeline_, const Own& own_,
                                        u32 queries_)
        : params(params_),
          pipeline(pipeline_),
          own(own_),
          lane(threadIdx.x % kWarpSize),
          queries(queries_, Tile::q_codes(params_, q_tile_of(params_, own_, own_.row)), own_.row % kTileRows,
                  grad_out_of(params_, own_, own_.row), lane),
          rows(params_, own_, lane) {}

    // The first `tiles` tiles of keys, at least one. Of these, all rows of the consumer see the first `full` whole.
    __device__ __forceinline__ void add_tiles(i32 tiles, i32 full) {
      u32 keys = pipeline.wait(stage);
      issue_scores(keys);
      issue_grad(keys);
      find_tile<true, true>(keys, 0, tiles);
      i32 tile = 1;
#pragma unroll 1
      for (; tile < min(full, tiles); ++tile) step<false>(keys, tile, tiles);
#pragma unroll 1
      for (; tile < tiles; ++tile) step<true>(keys, tile, tiles);
      issue_gradient<Dtype::kBf16>(gradient, grad_s, keys + Tile::kHalfCodes);
      ptx::wgmma_wait<0>();  // dQ is read behind a barrier, which no read passes
      pipeline.release(stage);
    }

   private:
    // Adds dQ of the tile before, in `keys`, and finds dS of this tile, in the next stage. tiles: how many there are.
    template <bool kMasked>
    __device__ __forceinline__ void step(u32& keys, i32 tile, i32 tiles) {
      Stage next = stage;
      next.advance();
      const u32 next_keys = pipeline.tile(next);
      issue_scores(next_keys);
      issue_gradient<Dtype::kBf16>(gradient, grad_s, keys + Tile::kHalfCodes);
      issue_grad(next_keys);
      keys = next_keys;
      find_tile<kMasked, false>(keys, tile, tiles);
    }

    __device__ __forceinline__ void issue_scores(u32 keys) {
      issue_product<WgmmaS8, typename Tile::Codes, false>(x, queries.codes(), keys + Tile::kCodes);
    }
    // The sums of dP begin with -D.
    __device__ __forceinline__ void issue_grad(u32 keys) {
#pragma unroll
      for (i32 n = 0; n < kColumnTiles; ++n) {
#pragma unroll
        for (i32 c = 0; c < 4; ++c) y[0][n][c] = __float_as_int(rows.minus_delta[0][c / 2]);
      }
      issue_product<WgmmaHalf<kDtype>, typename Tile::Halves, true>(y, queries.halves(), keys + Tile::kHalves);
    }

    // dS of a tile times the scales of its keys. kFirst: no product of dQ is in flight between S and dP.
    template <bool kMasked, bool kFirst>
    __device__ __forceinline__ void find_tile(u32 tile_keys, i32 tile, i32 tiles) {
      const float k_scale = load_key_scale<Config>(tile_keys, lane);
      wait_for<kFirst ? 1 : 2>(x);
      ColumnTiles<float, 1> found, grad_p;  // P times the scales, then dS; dP - D
      rows.template exponentiate<true>(x, k_scale, [&](i32 /*m*/, i32 n, i32 c, float p) { found[0][n][c] = p; });
      if (tile + 1 < tiles) pipeline.wait(behind<kFirst>());
      wait_for<0>(y);
      if constexpr (!kFirst) pipeline.release(stage);
      as_floats(grad_p, y);
#pragma unroll
      for (i32 n = 0; n < kColumnTiles; ++n) {
#pragma unroll
        for (i32 c = 0; c < 4; ++c) found[0][n][c] *= grad_p[0][n][c];
      }
      if constexpr (kMasked) hide_unseen(found, params, own, tile * kTileRows, lane);
      halve<Dtype::kBf16>(grad_s, found);
    }

    // The stage behind that of the current tile. Its tile is waited for between P and dS: in steps without a mask ptxas
    // moves little of P behind the loop of that wait. Without the loop it finds most of P behind the wait for dP, where
    // the warpgroup multiplies nothing.
    template <bool kFirst>
    __device__ __forceinline__ Stage behind() const {
      Stage next = stage;
      next.advance();
      if constexpr (!kFirst) next.advance();
      return next;
    }
  };

  template <Dtype kDtype, bool kPacked>
  __device__ __forceinline__ static void consume(const BwdParams& params, const Pipeline& pipeline, i32 consumer,
                                                 u32 queries, i32 tiles) {
    const Block<kPacked> own(params, row_of_block());
    Consumer<kDtype, Block<kPacked>> work(params, pipeline, own, queries);
    const i32 first_row = own.first_row + consumer * kRowsOfWarpgroup;  // the same for all warps of the consumer
    const i32 own_tiles = tiles_of(params, own, first_row, kRowsOfWarpgroup);
    const i32 full = max(0, visible_end(params, own.entry, first_row)) / kTileRows;
    if (own_tiles > 0) work.add_tiles(own_tiles, full);
    pipeline.pass(work.stage, tiles - own_tiles);
    ptx::barrier_sync(kStoreBarrier + consumer, kWarpgroup);  // all warps' products have read the consumer's queries
    const Block<kPacked> again(params, row_of_block());       // takes no registers before
    const StoreGradient<Config> store{queries + threadIdx.x / kWarpSize % 4 * StoreGradient<Config>::kBytes,
                                      static_cast<i32>(threadIdx.x % kWarpSize)};
    store.template run<kDtype>(work.gradient, params.grad_q, again.batch, again.head, again.entry.queries(), again.row,
                               params.headdim, params.softmax_scale);
  }

  // The tiles of keys that any of some rows sees, from the row `first` on.
  template <class Own>
  __device__ __forceinline__ static i32 tiles_of(const BwdParams& params, const Own& own, i32 first, i32 rows) {
    const i32 last = min(first + rows, own.entry.queries().count) - 1;
    return first <= last ? max(0, ceil_div(visible_end(params, own.entry, last), kTileRows)) : 0;
  }

  // The row of the block at which a warp of the consumers begins.
  __device__ __forceinline__ static i32 row_of_block() { return threadIdx.x / kWarpSize * 16 - kRowsOfWarpgroup; }
};

}  // namespace sage
