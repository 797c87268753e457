// The gradient of Q: dQ = softmax_scale · Σ dS · K over the tiles of K and V, dS = P ∘ (dO·Vᵀ - D). dS is multiplied by
// the scales of its keys, and rounded to s8 with a scale per query and tile. P is recomputed from the forward pass's
// own Q̂ and K̂, so that it is the same P. A kernel of its own, so that no sum depends on the order of blocks.
// Source: SageAttention3, Algorithm 3.
#pragma once

#include "sage/bwd/entry.cuh"
#include "sage/bwd/half_rows.cuh"
#include "sage/bwd/products.cuh"
#include "sage/bwd/stream.cuh"
#include "sage/problem/heads.cuh"
#include "sage/ptx/special.cuh"
#include "sage/quant/source.cuh"
#include "sage/tile/copy.cuh"

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
    return sage::facts(Fact{"threads", kThreads}, Fact{"shared_bytes", Stream::kBytes}, Fact{"block_rows", kBlockRows});
  }

  template <Dtype kDtype, bool kPacked>
  __device__ __forceinline__ static void run(const BwdParams& params, u8* shared) {
    const Position<kPacked> own(params);
    if (kPacked && own.first_row >= own.entry.queries().count) return;
    const i32 lane = threadIdx.x % kWarpSize, row = own.row;
    const i32 last_row = min(own.first_row + kBlockRows, own.entry.queries().count) - 1;
    const i32 tiles = ceil_div(visible_end(params, own.entry, last_row), kTileRows);
    KeyTiles key_tiles(params, own);
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
        gradient.template add<S8>(rounded, keys + Tile::kTransposed, lane);
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
    const Position<kPacked> again(params);  // takes no registers over the loops
    gradient.template store<kDtype>(params.grad_q, again.batch, again.head, again.entry.queries(), again.row,
                                    params.headdim, lane, params.softmax_scale);
  }

 private:
  static constexpr i32 kBlockRows = kThreads / kWarpSize * kWarpRows;
  using Stream = TileStream<Tile::kKvBytes, kMinBlocks * 2 * Tile::kKvBytes <= Config::kSharedBytes ? 2 : 1>;

  // blockIdx.x: queries of a head fastest, whose blocks then share its keys in the L2 cache. The last queries come
  // first: under a causal mask they see the most keys.
  template <bool kPacked>
  struct Position {
    i32 batch, head;  // of sequences the batch is 0
    BwdEntry<kPacked> entry;
    i32 first_row, row;  // of the block and of the warp

    __device__ __forceinline__ explicit Position(const BwdParams& params)
        : Position(params, static_cast<i32>(ptx::block_index())) {}

   private:
    __device__ __forceinline__ Position(const BwdParams& params, i32 block)
        : Position(params, block / params.q_blocks, params.q_blocks - 1 - block % params.q_blocks) {}
    __device__ __forceinline__ Position(const BwdParams& params, i32 head_of_all, i32 slot)
        : batch(head_of_all / params.num_q_heads),
          head(head_of_all % params.num_q_heads),
          entry(params, batch, params.cu_seqlens_q, kBlockRows, slot),
          first_row(entry.block_in_it(params.cu_seqlens_q, kBlockRows, slot) * kBlockRows),
          row(first_row + static_cast<i32>(threadIdx.x / kWarpSize) * kWarpRows) {}
  };

  // The tiles of K and V of a KV head, from the first on.
  class KeyTiles {
   public:
    template <bool kPacked>
    __device__ __forceinline__ KeyTiles(const BwdParams& params, const Position<kPacked>& own)
        : params_(params),
          tile_(kv_head_of(params, own.batch, own.head) * params.kv_side_tiles + own.entry.first_kv_tile()),
          v_({params.v, own.batch, own.head / params.q_heads_per_kv_head, own.entry.keys(), 0, params.headdim}) {}

    __device__ __forceinline__ void copy_async(u32 stage) {
      const u32 own = threadIdx.x * 16;
      sage::copy_async<Tile::kCodeBytes, kThreads>(stage + Tile::kCodes, Tile::k_codes(params_, tile_) + own);
      v_.copy_async(stage + Tile::kHalves);
      sage::copy_async<Tile::kKvSideBytes, kThreads>(stage + Tile::kSide, Tile::kv_side(params_, tile_) + own);
      ++tile_;
      v_.advance();
    }

   private:
    const BwdParams& params_;
    i32 tile_;  // of all heads
    HalfTiles<typename Tile::Halves, kTileRows, kThreads> v_;
  };

  template <bool kOwn>
  struct Constant {
    static constexpr bool kValue = kOwn;
  };

  // Q̂, dO and constants of a warp's queries.
  struct Queries {
    HeldOperand<Config::kHeadDim, kM> q;
    HeldOperand<2 * Config::kHeadDim, kM> grad;
    float q_scale[kM][2], minus_lse[kM][2], minus_delta[kM][2];  // of the rows 16m + g and 16m + g + 8

    // Rows behind the last query's tile are those of that tile, and not stored.
    template <bool kPacked>
    __device__ __forceinline__ Queries(const BwdParams& params, const Position<kPacked>& own, i32 lane)
        : Queries(params, tile_of(params, own), own.row,
                  HalfRows(params.grad_out, own.batch, own.head, own.entry.queries(), own.row, params.headdim), lane) {}

   private:
    // The index of the tile among those of all heads.
    template <bool kPacked>
    __device__ __forceinline__ static i32 tile_of(const BwdParams& params, const Position<kPacked>& own) {
      const i32 last = ceil_div(own.entry.queries().count, kTileRows) - 1;
      return (own.batch * params.num_q_heads + own.head) * params.q_side_tiles + own.entry.first_q_tile() +
             min(own.row / kTileRows, last);
    }

    __device__ __forceinline__ Queries(const BwdParams& params, i32 tile, i32 row, const HalfRows& grad_out, i32 lane)
        : q(CodeRows<typename Tile::Codes>{Tile::q_codes(params, tile), row % kTileRows}, lane), grad(grad_out, lane) {
      const u8* const side = Tile::q_side(params, tile);
#pragma unroll
      for (i32 r = 0; r < 2 * kM; ++r) {
        const i32 own = row + lane / 4 + 8 * r;
        const auto load = [&](i32 array) {
          return reinterpret_cast<const float*>(side + (array - Tile::kSide))[own % kTileRows];
        };
        q_scale[r / 2][r % 2] = load(Tile::kQueryScales);
        minus_lse[r / 2][r % 2] = load(Tile::kMinusLse);
        minus_delta[r / 2][r % 2] = load(Tile::kMinusDelta);
      }
    }
  };

  // dS times the scales of the keys of a tile in shared memory, rounded.
  template <Dtype kDtype, bool kMasked, bool kPacked>
  __device__ __forceinline__ static void grad_scores(RoundedRows<kM>& rounded, const Queries& queries, u32 keys,
                                                     const BwdParams& params, const Position<kPacked>& own, i32 lane,
                                                     i32 first_key) {
    ColumnTiles<i32, kM> scores = {};
    multiply_rows<typename Tile::Codes>(scores, queries.q, keys + Tile::kCodes, lane, S8{});
    ColumnTiles<float, kM> x;  // dP - D, then dS
#pragma unroll
    for (i32 m = 0; m < kM; ++m) {
#pragma unroll
      for (i32 n = 0; n < kColumnTiles; ++n) {
#pragma unroll
        for (i32 c = 0; c < 4; ++c) x[m][n][c] = queries.minus_delta[m][c / 2];
      }
    }
    multiply_rows<typename Tile::Halves>(x, queries.grad, keys + Tile::kHalves, lane, Half<kDtype>{});

    // All columns of a thread are keys of one scale group.
    const float k_scale = ptx::load_shared_f32(keys + Tile::kKeyScales + lane % 4 * 2 * sizeof(float));
#pragma unroll
    for (i32 m = 0; m < kM; ++m) {
      const float scale[2] = {k_scale * queries.q_scale[m][0], k_scale * queries.q_scale[m][1]};
#pragma unroll
      for (i32 n = 0; n < kColumnTiles; ++n) {
#pragma unroll
        for (i32 c = 0; c < 4; ++c) {
          x[m][n][c] *= probability(scores[m][n][c], scale[c / 2], queries.minus_lse[m][c / 2]);
        }
      }
    }
    if constexpr (kMasked) {
      i32 hidden_from[kM][2];
#pragma unroll
      for (i32 r = 0; r < 2 * kM; ++r) {
        hidden_from[r / 2][r % 2] = visible_end(params, own.entry, own.row + lane / 4 + 8 * r) - first_key;
      }
      hide<false, kM>(x, hidden_from, lane);
    }
    round_rows<127>(rounded, x, {k_scale, k_scale});
  }
};

}  // namespace sage
