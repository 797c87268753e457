// The gradient of Q: dQ = softmax_scale · Σ dS · K over the tiles of K and V, dS = P ∘ (dO·Vᵀ - D). dS is multiplied by
// the scales of its keys, and rounded to s8 with a scale per query and tile. P is recomputed from the forward pass's
// own Q̂ and K̂, so that it is the same P. A kernel of its own, so that no sum depends on the order of blocks.
// Source: SageAttention3, Algorithm 3.
#pragma once

#include "sage/bwd/products.cuh"
#include "sage/bwd/stream.cuh"
#include "sage/ptx/special.cuh"
#include "sage/quant/source.cuh"

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

  // blockIdx.x: queries of a head fastest, whose blocks then share its keys in the L2 cache. The last queries come
  // first: under a causal mask they see the most keys.
  template <Dtype kDtype>
  __device__ __forceinline__ static void run(const BwdParams& params, u8* shared) {
    const i32 block = ptx::block_index(), head_of_all = block / params.q_blocks;
    const i32 first_row = (params.q_blocks - 1 - block % params.q_blocks) * kBlockRows;
    const i32 warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
    const i64 kv_head = head_of_all / params.q_heads_per_kv_head;
    const u8* kv_tile = params.kv_side + kv_head * params.kv_side_tiles * Tile::kKvBytes;
    const i32 last_row = min(first_row + kBlockRows, params.seqlen_q) - 1;
    const i32 tiles = ceil_div(visible_end(params, last_row), kTileRows);
    const Stream stream(ptx::shared_address(shared));
    if (tiles > 0) stream.load(0, kv_tile);

    const i32 row = first_row + warp * kWarpRows;  // the warp's first
    const i64 q_tile = static_cast<i64>(head_of_all) * params.q_side_tiles + row / kTileRows;
    const Queries queries(params, params.q_side + q_tile * Tile::kQBytes, row, lane);
    Gradient<Config, kM> gradient;
    const auto step = [&](i32 tile, auto masked) {
      kv_tile += Tile::kKvBytes;
      const u8* next = tile + 1 < tiles ? kv_tile : nullptr;
      const u32 keys = stream.wait(tile, next);
      RoundedRows<kM> rounded;
      grad_scores<kDtype, decltype(masked)::kValue>(rounded, queries, keys, lane, tile * kTileRows);
      gradient.template add<S8>(rounded, keys + Tile::kTransposed, lane);
      stream.finish(tile, next);
    };
    const i32 full = visible_end(params, first_row) / kTileRows;  // tiles that all of the block's queries see whole
    i32 tile = 0;
#pragma unroll 1
    for (; tile < full; ++tile) step(tile, Constant<false>{});
#pragma unroll 1
    for (; tile < tiles; ++tile) step(tile, Constant<true>{});
    gradient.template store<kDtype>(params.grad_q, head_of_all / params.num_q_heads, head_of_all % params.num_q_heads,
                                    row, params.seqlen_q, params.headdim, lane, params.softmax_scale);
  }

 private:
  static constexpr i32 kBlockRows = kThreads / kWarpSize * kWarpRows;
  using Stream = TileStream<Tile::kKvBytes, Tile::kKvBytes,
                            kMinBlocks * 2 * Tile::kKvBytes <= Config::kSharedBytes ? 2 : 1, kThreads>;

  template <bool kOwn>
  struct Constant {
    static constexpr bool kValue = kOwn;
  };

  // What a warp holds of its queries.
  struct Queries {
    HeldOperand<typename Tile::Codes, kM> q;
    HeldOperand<typename Tile::Halves, kM> grad;
    float q_scale[kM][2], minus_lse[kM][2], minus_delta[kM][2];  // of the rows 16m + g and 16m + g + 8
    i32 end[kM][2];                                              // of the keys that they see

    // tile: in global memory. row: the first of the warp's rows.
    __device__ __forceinline__ Queries(const BwdParams& params, const u8* tile, i32 row, i32 lane)
        : q(0, tile + Tile::kCodes, row % kTileRows, lane), grad(0, tile + Tile::kHalves, row % kTileRows, lane) {
#pragma unroll
      for (i32 r = 0; r < 2 * kM; ++r) {
        const i32 own = row + lane / 4 + 8 * r;
        const auto load = [&](i32 array) { return reinterpret_cast<const float*>(tile + array)[own % kTileRows]; };
        q_scale[r / 2][r % 2] = load(Tile::kQueryScales);
        minus_lse[r / 2][r % 2] = load(Tile::kMinusLse);
        minus_delta[r / 2][r % 2] = load(Tile::kMinusDelta);
        end[r / 2][r % 2] = visible_end(params, own);
      }
    }
  };

  // dS times the scales of the keys of a tile in shared memory, rounded.
  template <Dtype kDtype, bool kMasked>
  __device__ __forceinline__ static void grad_scores(RoundedRows<kM>& rounded, const Queries& queries, u32 keys,
                                                     i32 lane, i32 first_key) {
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
          const float score = static_cast<float>(scores[m][n][c]);
          x[m][n][c] *= ptx::ex2(fmaf(score, scale[c / 2], queries.minus_lse[m][c / 2]));
        }
      }
    }
    if constexpr (kMasked) {
      i32 hidden_from[kM][2];
#pragma unroll
      for (i32 r = 0; r < 2 * kM; ++r) hidden_from[r / 2][r % 2] = queries.end[r / 2][r % 2] - first_key;
      hide<false, kM>(x, hidden_from, lane);
    }
    round_rows<127>(rounded, x, {k_scale, k_scale});
  }
};

}  // namespace sage
