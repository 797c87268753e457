// The gradients of K and V: dV = Σ Pᵀ · dO and dK = Σ dSᵀ · Q over the tiles of Q and dO of all query heads that read
// the KV head, dS = P ∘ (dO·Vᵀ - D). A warp has 16 keys. P times the scale of dÔ is rounded to u8, and dS times the
// scale of Q̂ to s8, each with a scale per key and tile. P is recomputed from the forward pass's own Q̂ and K̂, so that
// it is the same P.
// Source: SageAttention3, Algorithm 3.
#pragma once

#include "sage/bwd/key_block.cuh"
#include "sage/bwd/mma/products.cuh"
#include "sage/bwd/mma/stream.cuh"
#include "sage/constants.cuh"

namespace sage {

// Config: kHeadDim, kSharedBytes that a block can have.
template <class Config>
class BwdKv {
  using Tile = BwdTile<Config>;
  // Whether registers hold the warp's K̂ and V, and all of dP next to the scores; else shared memory holds K̂ and V.
  static constexpr bool kHeld = Config::kHeadDim <= 64;
  static constexpr i32 kGradTiles = kHeld ? kColumnTiles : kColumnTiles / 2;  // column tiles of dP at once
  static constexpr i32 kKvBytes = kHeld ? 0 : Tile::kSide;                    // of 64 keys, in shared memory

 public:
  // Two blocks an SM of four warps, of which one multiplies while the other rounds; or one of eight.
  static constexpr i32 kMinBlocks = 2 * (kKvBytes + Tile::kQBytes) <= Config::kSharedBytes ? 2 : 1;
  static constexpr i32 kThreads = kMinBlocks == 2 ? 128 : 256;

  static constexpr auto facts() {
    return sage::facts(Fact{"threads", kThreads}, Fact{"shared_bytes", kKvTiles * kKvBytes + Stream::kBytes},
                       Fact{"block_rows", kBlockRows}, Fact{"halves", 0});
  }

  template <Dtype kDtype, bool kPacked>
  __device__ __forceinline__ static void run(const BwdParams& params, u8* shared) {
    const Block<kPacked> own = own_block<kPacked>(params);
    if (!own.has_keys()) return;
    const i32 lane = threadIdx.x % kWarpSize;
    const u32 sKv = ptx::shared_address(shared);
    if constexpr (!kHeld) {
#pragma unroll
      for (i32 i = 0; i < kKvTiles; ++i) {
        copy_keys_async<Config, kThreads>(params, own, i * kTileRows, sKv + i * kKvBytes);
      }
    }
    QueryTiles<Config, Block<kPacked>, kThreads> tiles(params, own);
    const Stream stream(sKv + kKvTiles * kKvBytes);
    if (tiles.count > 0) stream.load(0, tiles);

    const Keys keys(params, own, sKv + own.of_block / kTileRows * kKvBytes, lane);
    const CausalColumns<Block<kPacked>> columns(own, lane);
    Gradients gradients;
#pragma unroll 1
    for (i32 i = 0; i < tiles.count; ++i) {
      const i32 seen_from = columns.first_query() - tiles.first_query();
      tiles.advance();
      const bool more = i + 1 < tiles.count;
      const u32 queries = stream.wait(i, more, tiles);
      // Compiled apart: in a block of instructions without a branch the compiler overlaps products with rounding.
      if (!has_diagonal(params) || columns.of_last_key(seen_from) < 0) {
        step<kDtype, false>(gradients, keys, queries, lane, columns, 0);
      } else if (columns.of_first_key(seen_from) < kTileRows) {
        step<kDtype, true>(gradients, keys, queries, lane, columns, seen_from);
      }
      stream.finish(i, more, tiles);
    }
    const Block<kPacked> again = own_block<kPacked>(params);  // takes no registers over the loop
    const CallerRows rows = again.entry.keys();
    gradients.k.template store<kDtype>(params.grad_k, again.batch(params), again.head(params), rows, again.key(),
                                       params.headdim, lane, kLn2);  // the scale of Q̂ has log2 e
    gradients.v.template store<kDtype>(params.grad_v, again.batch(params), again.head(params), rows, again.key(),
                                       params.headdim, lane, 1.0f);
  }

 private:
  static constexpr i32 kBlockRows = kThreads / kWarpSize * kKeysOfWarp;
  static constexpr i32 kKvTiles = kBlockRows / kTileRows;
  static constexpr i32 kLeast = kKvTiles * kKvBytes + 2 * Tile::kQBytes;  // of shared memory, with two stages
  using Stream = TileStream<Tile::kQBytes, kMinBlocks * kLeast <= Config::kSharedBytes ? 2 : 1>;
  template <bool kPacked>
  using Block = KeyBlock<kPacked, kBlockRows>;
  using Probabilities = ColumnTiles<float, 1>;
  using Scores = ColumnTiles<i32, 1>;
  using GradProbabilities = float[1][kGradTiles][4];

  template <bool kPacked>
  __device__ __forceinline__ static Block<kPacked> own_block(const BwdParams& params) {
    return {params, static_cast<i32>(threadIdx.x / kWarpSize)};
  }

  struct Gradients {
    Gradient<Config, 1> k, v;
  };

  template <bool kInRegisters, class = void>
  struct SelectOperands {
    using K = SharedOperand<typename Tile::Codes>;
    using V = SharedOperand<typename Tile::Halves>;
  };
  template <class Unused>
  struct SelectOperands<true, Unused> {
    using K = HeldOperand<Config::kHeadDim, 1>;
    using V = HeldOperand<2 * Config::kHeadDim, 1>;
  };

  // K̂ and V of a warp's keys, and the scales of K̂.
  struct Keys {
    typename SelectOperands<kHeld>::K k;
    typename SelectOperands<kHeld>::V v;
    float scale[2];  // of the rows g and g + 8

    // shared: the tile in shared memory that has them, where one has.
    template <bool kPacked>
    __device__ __forceinline__ Keys(const BwdParams& params, const Block<kPacked>& own, u32 shared, i32 lane)
        : Keys(params, own.tile_of(params, own.key()), own.of_block % kTileRows, own.values(params, own.key()), shared,
               lane) {}

   private:
    // tile: of all heads. row: the warp's first, in it.
    __device__ __forceinline__ Keys(const BwdParams& params, i32 tile, i32 row, const HalfRows& values, u32 shared,
                                    i32 lane)
        : k(operand<typename SelectOperands<kHeld>::K>(CodeRows<typename Tile::Codes>{Tile::k_codes(params, tile), row},
                                                       shared + Tile::kCodes, row, lane)),
          v(operand<typename SelectOperands<kHeld>::V>(values, shared + Tile::kHalves, row, lane)) {
      load_key_scales<Config>(scale, params, tile, row, lane);
    }

    template <class Operand, class Source>
    __device__ __forceinline__ static Operand operand(const Source& source, u32 tile, i32 row, i32 lane) {
      if constexpr (kHeld) return Operand(source, lane);
      else return Operand(tile, row, lane);
    }
  };

  // Adds what a tile of Q and dO in shared memory contributes. seen_from: as the columns have it.
  template <Dtype kDtype, bool kMasked, class Columns>
  __device__ __forceinline__ static void step(Gradients& gradients, const Keys& keys, u32 queries, i32 lane,
                                              const Columns& columns, i32 seen_from) {
    i32 seen[1][2];
#pragma unroll
    for (i32 r = 0; r < 2; ++r) seen[0][r] = kMasked ? columns.of_key(r, lane, seen_from) : 0;
    Scores scores = {};
    multiply_rows<typename Tile::Codes>(scores, keys.k, queries + Tile::kCodes, lane, S8{});
    GradProbabilities grad_p;
    if constexpr (kHeld) multiply_grad<kDtype>(grad_p, keys, queries, lane, 0);

    QueryColumns<Config> constants{queries, lane};
    Probabilities p;
    exponentiate(p, scores, keys.scale, constants);
    if constexpr (kMasked) hide<true, 1>(p, seen, lane);
    RoundedRows<1> rounded;
    const ptx::F32x2 grad_scale = constants.grad_scale();
    round_rows<255>(rounded, p, {grad_scale.x, grad_scale.y});
    add_product<Config, U8>(gradients.v, rounded, queries + Tile::kGrad, lane);

#pragma unroll
    for (i32 first = 0; first < kColumnTiles; first += kGradTiles) {
      if constexpr (!kHeld) multiply_grad<kDtype>(grad_p, keys, queries, lane, first);
      multiply_by_grad(p, grad_p, constants, first);
    }
    if constexpr (kMasked) hide<true, 1>(p, seen, lane);  // again: dP may be NaN where P is zero
    round_rows<127>(rounded, p, {1.0f, 1.0f});
    add_product<Config, S8>(gradients.k, rounded, queries + Tile::kTransposed, lane);
  }

  // dP, of kGradTiles column tiles from `first` on.
  template <Dtype kDtype>
  __device__ __forceinline__ static void multiply_grad(GradProbabilities& grad_p, const Keys& keys, u32 queries,
                                                       i32 lane, i32 first) {
#pragma unroll
    for (i32 n = 0; n < kGradTiles; ++n) {
#pragma unroll
      for (i32 c = 0; c < 4; ++c) grad_p[0][n][c] = 0.0f;
    }
    multiply_rows<typename Tile::Halves>(grad_p, keys.v, queries + Tile::kHalves, lane, Half<kDtype>{}, first);
  }
};

}  // namespace sage
