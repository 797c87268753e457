// The gradient of Q: dQ = softmax_scale · Σ dS · K over the tiles of K and V, dS = P ∘ (dO·Vᵀ - D). dS is multiplied by
// the scales of its keys, and rounded to s8 with a scale per query and tile. P is recomputed from the forward pass's
// own Q̂ and K̂, so that it is the same P. A kernel of its own, so that no sum depends on the order of blocks.
// Source: SageAttention3, Algorithm 3.
#pragma once

#include "sage/bwd/mma/products.cuh"
#include "sage/bwd/mma/stream.cuh"
#include "sage/bwd/query_block.cuh"

namespace sage {

// Config: kHeadDim, kSharedBytes that a block can have.
template <class Config>
class BwdQ {
  using Tile = BwdTile<Config>;
  // Two m16 tiles a warp, where there are registers for them, halve what products read of shared memory.
  static constexpr i32 kM = Config::kHeadDim <= 64 ? 2 : 1, kWarpRows = 16 * kM;

 public:
  static constexpr i32 kMinBlocks = 2, kThreads = 128;  // of two blocks, one multiplies while the other rounds

  static constexpr auto facts() {
    return sage::facts(Fact{"threads", kThreads}, Fact{"shared_bytes", Stream::kBytes}, Fact{"block_rows", kBlockRows},
                       Fact{"halves", 0});
  }

  template <Dtype kDtype, bool kPacked>
  __device__ __forceinline__ static void run(const BwdParams& params, u8* shared) {
    const Block<kPacked> own = own_block<kPacked>(params);
    if (!own.has_queries()) return;
    const i32 lane = threadIdx.x % kWarpSize, row = own.row;
    const i32 last_row = min(own.first_row + kBlockRows, own.entry.queries().count) - 1;
    const i32 tiles = ceil_div(visible_end(params, own.entry, last_row), kTileRows);
    KeyTiles<Config, kThreads> key_tiles(params, own);
    const Stream stream(ptx::shared_address(shared));
    if (tiles > 0) stream.load(0, key_tiles);

    const Queries queries(params, own, lane);
    Gradient<Config, kM> gradient;
    const auto step = [&](i32 tile, auto masked) {
      const u32 keys = stream.wait(tile, tile + 1 < tiles, key_tiles);
      // Under a causal mask the first warps see nothing of the block's last tiles.
      if (!decltype(masked)::kValue || tile * kTileRows < visible_end(params, own.entry, row + kWarpRows - 1)) {
        RoundedRows<kM> rounded;
        grad_scores<kDtype, decltype(masked)::kValue>(rounded, queries, keys, params, own, lane, tile * kTileRows);
        add_product<Config, S8>(gradient, rounded, keys + Tile::kTransposed, lane);
      }
      stream.finish(tile, tile + 1 < tiles, key_tiles);
    };
    // Tiles that all of the block's queries see whole.
    const i32 full = visible_end(params, own.entry, own.first_row) / kTileRows;
    i32 tile = 0;
#pragma unroll 1
    for (; tile < full; ++tile) step(tile, Constant<false>{});
#pragma unroll 1
    for (; tile < tiles; ++tile) step(tile, Constant<true>{});
    const Block<kPacked> again = own_block<kPacked>(params);  // takes no registers over the loops
    gradient.template store<kDtype>(params.grad_q, again.batch, again.head, again.entry.queries(), again.row,
                                    params.headdim, lane, params.softmax_scale);
  }

 private:
  static constexpr i32 kBlockRows = kThreads / kWarpSize * kWarpRows;
  using Stream = TileStream<Tile::kKvBytes, kMinBlocks * 2 * Tile::kKvBytes <= Config::kSharedBytes ? 2 : 1>;
  template <bool kPacked>
  using Block = QueryBlock<kPacked, kBlockRows>;

  template <bool kPacked>
  __device__ __forceinline__ static Block<kPacked> own_block(const BwdParams& params) {
    return {params, static_cast<i32>(threadIdx.x / kWarpSize) * kWarpRows};
  }

  // Q̂, dO and constants of a warp's queries.
  struct Queries {
    HeldOperand<Config::kHeadDim, kM> q;
    HeldOperand<2 * Config::kHeadDim, kM> grad;
    QueryRows<Config, kM> rows;

    template <bool kPacked>
    __device__ __forceinline__ Queries(const BwdParams& params, const Block<kPacked>& own, i32 lane)
        : q(CodeRows<typename Tile::Codes>{Tile::q_codes(params, q_tile_of(params, own, own.row)), own.row % kTileRows},
            lane),
          grad(grad_out_of(params, own, own.row), lane),
          rows(params, own, lane) {}
  };

  template <bool kOwn>
  struct Constant {
    static constexpr bool kValue = kOwn;
  };

  // dS times the scales of the keys of a tile in shared memory, rounded.
  template <Dtype kDtype, bool kMasked, bool kPacked>
  __device__ __forceinline__ static void grad_scores(RoundedRows<kM>& rounded, const Queries& queries, u32 keys,
                                                     const BwdParams& params, const Block<kPacked>& own, i32 lane,
                                                     i32 first_key) {
    ColumnTiles<i32, kM> scores = {};
    multiply_rows<typename Tile::Codes>(scores, queries.q, keys + Tile::kCodes, lane, S8{});
    ColumnTiles<float, kM> x;  // dP - D, then dS
#pragma unroll
    for (i32 m = 0; m < kM; ++m) {
#pragma unroll
      for (i32 n = 0; n < kColumnTiles; ++n) {
#pragma unroll
        for (i32 c = 0; c < 4; ++c) x[m][n][c] = queries.rows.minus_delta[m][c / 2];
      }
    }
    multiply_rows<typename Tile::Halves>(x, queries.grad, keys + Tile::kHalves, lane, Half<kDtype>{});
    const float k_scale = load_key_scale<Config>(keys, lane);
    queries.rows.template exponentiate<false>(scores, k_scale, [&](i32 m, i32 n, i32 c, float p) { x[m][n][c] *= p; });
    if constexpr (kMasked) hide_unseen(x, params, own, first_key, lane);
    round_rows<127>(rounded, x, {k_scale, k_scale});
  }
};

}  // namespace sage
