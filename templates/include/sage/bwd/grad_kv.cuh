// The gradients of K and V: dV = Σ Pᵀ · dO and dK = Σ dSᵀ · Q over the tiles of Q and dO of all query heads that read
// the KV head, dS = P ∘ (dO·Vᵀ - D). A warp has 16 keys. P times the scale of dÔ is rounded to u8, and dS times the
// scale of Q̂ to s8, each with a scale per key and tile. P is recomputed from the forward pass's own Q̂ and K̂, so that
// it is the same P.
// Source: SageAttention3, Algorithm 3.
#pragma once

#include "sage/bwd/products.cuh"
#include "sage/bwd/stream.cuh"
#include "sage/constants.cuh"
#include "sage/ptx/special.cuh"
#include "sage/quant/source.cuh"

namespace sage {

// Config: kHeadDim, kSharedBytes that a block can have.
template <class Config>
class BwdKv {
  using Tile = BwdTile<Config>;
  // Whether registers hold the warp's K̂ and V, and all of dP beside the scores; else shared memory holds K̂ and V.
  static constexpr bool kHeld = Config::kHeadDim <= 64;
  static constexpr i32 kGradTiles = kHeld ? kColumnTiles : kColumnTiles / 2;  // column tiles of dP at once
  static constexpr i32 kKvBytes = kHeld ? 0 : Tile::kRowBytes;                // of 64 keys, in shared memory

 public:
  // Two blocks an SM of four warps, of which one multiplies while the other rounds; or one of eight.
  static constexpr i32 kMinBlocks = 2 * (kKvBytes + Tile::kQBytes) <= Config::kSharedBytes ? 2 : 1;
  static constexpr i32 kThreads = kMinBlocks == 2 ? 128 : 256;

  static constexpr auto facts() {
    return sage::facts(Fact{"threads", kThreads}, Fact{"shared_bytes", kKvTiles * kKvBytes + Stream::kBytes},
                       Fact{"block_rows", kBlockRows});
  }

  // blockIdx.x: keys of a head fastest, whose blocks then share its queries in the L2 cache. The first keys come first:
  // under a causal mask the most queries see them.
  template <Dtype kDtype>
  __device__ __forceinline__ static void run(const BwdParams& params, u8* shared) {
    const i32 block = ptx::block_index(), head_of_all = block / params.kv_blocks_of_head;
    const i32 first_key = block % params.kv_blocks_of_head * kBlockRows;
    const i32 warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
    const i64 kv_tile = static_cast<i64>(head_of_all) * params.kv_side_tiles + first_key / kTileRows;
    const u8* const from = params.kv_side + kv_tile * Tile::kKvBytes;
    const u32 sKv = ptx::shared_address(shared);
    if constexpr (!kHeld) {
#pragma unroll
      for (i32 i = 0; i < kKvTiles; ++i) {
        copy_async<kKvBytes, kThreads>(sKv + i * kKvBytes, from + i * Tile::kKvBytes + threadIdx.x * 16);
      }
    }
    QueryTiles tiles(params, head_of_all, first_key);
    const Stream stream(sKv + kKvTiles * kKvBytes);
    if (tiles.count > 0) stream.load(0, tiles.address);

    const i32 own = warp * kWarpRows, own_tile = own / kTileRows;  // of the block's keys, the warp's first
    const Keys keys(sKv + own_tile * kKvBytes, from + own_tile * Tile::kKvBytes, own % kTileRows, lane);
    Gradients gradients;
#pragma unroll 1
    for (i32 i = 0; i < tiles.count; ++i) {
      // The first of the tile's columns that sees the warp's first key.
      const i32 seen_from = first_key + own + params.seqlen_q - params.seqlen_kv - tiles.tile() * kTileRows;
      tiles.advance();
      const u8* next = i + 1 < tiles.count ? tiles.address : nullptr;
      const u32 queries = stream.wait(i, next);
      // Compiled apart: in a block of instructions without a branch the compiler overlaps products with rounding.
      if (params.is_causal && seen_from + kWarpRows > 0) step<kDtype, true>(gradients, keys, queries, lane, seen_from);
      else step<kDtype, false>(gradients, keys, queries, lane, 0);
      stream.finish(i, next);
    }
    const i32 batch = head_of_all / params.num_kv_heads, head = head_of_all % params.num_kv_heads;
    gradients.k.template store<kDtype>(params.grad_k, batch, head, first_key + own, params.seqlen_kv, params.headdim,
                                       lane, kLn2);  // the scale of Q̂ has softmax_scale · log2 e
    gradients.v.template store<kDtype>(params.grad_v, batch, head, first_key + own, params.seqlen_kv, params.headdim,
                                       lane, 1.0f);
  }

 private:
  static constexpr i32 kWarpRows = 16, kBlockRows = kThreads / kWarpSize * kWarpRows;
  static constexpr i32 kKvTiles = kBlockRows / kTileRows;
  static constexpr i32 kLeast = kKvTiles * kKvBytes + 2 * Tile::kQBytes;  // of shared memory, with two stages
  using Stream =
      TileStream<Tile::kQBytes, Tile::kQWritten, kMinBlocks * kLeast <= Config::kSharedBytes ? 2 : 1, kThreads>;
  using Probabilities = ColumnTiles<float, 1>;
  using Scores = ColumnTiles<i32, 1>;
  using GradProbabilities = float[1][kGradTiles][4];

  struct Gradients {
    Gradient<Config, 1> k, v;
  };

  // The tiles of Q and dO that see any of the block's keys: of each query head that reads the KV head, the last ones.
  class QueryTiles {
   public:
    i32 count;
    const u8* address;  // of the current tile

    __device__ __forceinline__ QueryTiles(const BwdParams& params, i32 kv_head, i32 first_key) {
      const i32 first_query = params.is_causal ? max(0, first_key + params.seqlen_q - params.seqlen_kv) : 0;
      begin_ = tile_ = first_query / kTileRows;
      end_ = ceil_div(params.seqlen_q, kTileRows);
      count = max(0, end_ - begin_) * params.q_heads_per_kv_head;
      to_next_head_ = static_cast<i64>(params.q_side_tiles - end_ + begin_ + 1) * Tile::kQBytes;
      const i64 head = static_cast<i64>(kv_head) * params.q_heads_per_kv_head;
      address = params.q_side + (head * params.q_side_tiles + begin_) * Tile::kQBytes;
    }

    // The current tile's index in its head.
    __device__ __forceinline__ i32 tile() const { return tile_; }

    __device__ __forceinline__ void advance() {
      const bool last = ++tile_ == end_;
      address += last ? to_next_head_ : Tile::kQBytes;
      if (last) tile_ = begin_;
    }

   private:
    i32 begin_, end_, tile_;
    i64 to_next_head_;  // bytes from a head's last tile to the next head's first
  };

  template <bool kInRegisters, class = void>
  struct SelectOperands {
    using K = SharedOperand<typename Tile::Codes>;
    using V = SharedOperand<typename Tile::Halves>;
  };
  template <class Unused>
  struct SelectOperands<true, Unused> {
    using K = HeldOperand<typename Tile::Codes, 1>;
    using V = HeldOperand<typename Tile::Halves, 1>;
  };

  // What a warp has of its keys.
  struct Keys {
    typename SelectOperands<kHeld>::K k;
    typename SelectOperands<kHeld>::V v;
    float scale[2];  // of the rows g and g + 8

    // The tile with the keys in shared memory, and in global memory. row: the first of the warp's rows in it.
    __device__ __forceinline__ Keys(u32 tile, const u8* from, i32 row, i32 lane)
        : k(tile + Tile::kCodes, from + Tile::kCodes, row, lane),
          v(tile + Tile::kHalves, from + Tile::kHalves, row, lane) {
#pragma unroll
      for (i32 r = 0; r < 2; ++r) {
        scale[r] = reinterpret_cast<const float*>(from + Tile::kKeyScales)[row + lane / 4 + 8 * r];
      }
    }
  };

  // Adds what a tile of Q and dO in shared memory contributes. seen_from: the first column that sees the warp's first
  // key; each key behind it is seen from one column further.
  template <Dtype kDtype, bool kMasked>
  __device__ __forceinline__ static void step(Gradients& gradients, const Keys& keys, u32 queries, i32 lane,
                                              i32 seen_from) {
    i32 seen[1][2];
#pragma unroll
    for (i32 r = 0; r < 2; ++r) seen[0][r] = seen_from + lane / 4 + 8 * r;
    Scores scores = {};
    multiply_rows<typename Tile::Codes>(scores, keys.k, queries + Tile::kCodes, lane, S8{});
    GradProbabilities grad_p;
    if constexpr (kHeld) multiply_grad<kDtype>(grad_p, keys, queries, lane, 0);

    Probabilities p;
    exponentiate(p, scores, keys, queries, lane);
    if constexpr (kMasked) hide<true, 1>(p, seen, lane);
    RoundedRows<1> rounded;
    const ptx::F32x2 grad_scale = ptx::load_shared_f32x2(queries + Tile::kGradScales + lane % 4 * sizeof(ptx::F32x2));
    round_rows<255>(rounded, p, {grad_scale.x, grad_scale.y});
    gradients.v.template add<U8>(rounded, queries + Tile::kGrad, lane);

#pragma unroll
    for (i32 first = 0; first < kColumnTiles; first += kGradTiles) {
      if constexpr (!kHeld) multiply_grad<kDtype>(grad_p, keys, queries, lane, first);
      multiply_by_grad(p, grad_p, queries, lane, first);
    }
    if constexpr (kMasked) hide<true, 1>(p, seen, lane);  // again: dP may be NaN where P is zero
    round_rows<127>(rounded, p, {1.0f, 1.0f});
    gradients.k.template add<S8>(rounded, queries + Tile::kTransposed, lane);
  }

  // P = 2^(scores - log-sum-exp).
  __device__ __forceinline__ static void exponentiate(Probabilities& p, const Scores& scores, const Keys& keys,
                                                      u32 queries, i32 lane) {
    float scale[4];
#pragma unroll
    for (i32 n = 0; n < kColumnTiles; ++n) {
      const ptx::F32x2 minus_lse = of_columns(queries + Tile::kMinusLse, n, lane);
      if (n % 2 == 0) {  // queries 8 apart, of 16 in a row, are of one scale group
        const ptx::F32x2 q_scale = of_columns(queries + Tile::kQueryScales, n, lane);
#pragma unroll
        for (i32 c = 0; c < 4; ++c) scale[c] = (c % 2 == 0 ? q_scale.x : q_scale.y) * keys.scale[c / 2];
      }
#pragma unroll
      for (i32 c = 0; c < 4; ++c) {
        p[0][n][c] =
            ptx::ex2(fmaf(static_cast<float>(scores[0][n][c]), scale[c], c % 2 == 0 ? minus_lse.x : minus_lse.y));
      }
    }
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

  // dS times the scale of Q̂, in place of P: P · (dP · q_scale - D · q_scale).
  __device__ __forceinline__ static void multiply_by_grad(Probabilities& p, const GradProbabilities& grad_p,
                                                          u32 queries, i32 lane, i32 first) {
    ptx::F32x2 q_scale;
#pragma unroll
    for (i32 n = 0; n < kGradTiles; ++n) {
      if (n % 2 == 0) q_scale = of_columns(queries + Tile::kQueryScales, first + n, lane);
      const ptx::F32x2 scaled = of_columns(queries + Tile::kMinusScaledDelta, first + n, lane);
#pragma unroll
      for (i32 c = 0; c < 4; ++c) {
        const bool is_first = c % 2 == 0;
        p[0][first + n][c] *= fmaf(grad_p[0][n][c], is_first ? q_scale.x : q_scale.y, is_first ? scaled.x : scaled.y);
      }
    }
  }

  // What an array of every query in shared memory has for this thread's columns.
  __device__ __forceinline__ static ptx::F32x2 of_columns(u32 array, i32 n, i32 lane) {
    return ptx::load_shared_f32x2(array + (4 * n + lane % 4) * sizeof(ptx::F32x2));
  }
};

}  // namespace sage
