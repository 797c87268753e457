// The gradients of K and V: dV = Σ Pᵀ · dO and dK = Σ dSᵀ · Q over the tiles of Q and dO of all query heads that read
// the KV head, dS = P ∘ (dO·Vᵀ - D). A warp has 16 keys. P times the scale of dÔ is rounded to u8, and dS times the
// scale of Q̂ to s8, each with a scale per key and tile. P is recomputed from the forward pass's own Q̂ and K̂, so that
// it is the same P.
// Source: SageAttention3, Algorithm 3.
#pragma once

#include "sage/bwd/entry.cuh"
#include "sage/bwd/half_rows.cuh"
#include "sage/bwd/products.cuh"
#include "sage/bwd/stream.cuh"
#include "sage/constants.cuh"
#include "sage/ptx/special.cuh"
#include "sage/ptx/warp.cuh"
#include "sage/quant/source.cuh"
#include "sage/tile/copy.cuh"

namespace sage {

// Config: kHeadDim, kSharedBytes that a block can have.
template <class Config>
class BwdKv {
  using Tile = BwdTile<Config>;
  // Whether registers hold the warp's K̂ and V, and all of dP beside the scores; else shared memory holds K̂ and V.
  static constexpr bool kHeld = Config::kHeadDim <= 64;
  static constexpr i32 kGradTiles = kHeld ? kColumnTiles : kColumnTiles / 2;  // column tiles of dP at once
  static constexpr i32 kKvBytes = kHeld ? 0 : Tile::kSide;                    // of 64 keys, in shared memory

 public:
  // Two blocks an SM of four warps, of which one multiplies while the other rounds; or one of eight.
  static constexpr i32 kMinBlocks = 2 * (kKvBytes + Tile::kQBytes) <= Config::kSharedBytes ? 2 : 1;
  static constexpr i32 kThreads = kMinBlocks == 2 ? 128 : 256;

  static constexpr auto facts() {
    return sage::facts(Fact{"threads", kThreads}, Fact{"shared_bytes", kKvTiles * kKvBytes + Stream::kBytes},
                       Fact{"block_rows", kBlockRows});
  }

  template <Dtype kDtype, bool kPacked>
  __device__ __forceinline__ static void run(const BwdParams& params, u8* shared) {
    const Position<kPacked> own(params);
    if (kPacked && own.first_key >= own.entry.keys().count) return;
    const i32 lane = threadIdx.x % kWarpSize;
    const u32 sKv = ptx::shared_address(shared);
    if constexpr (!kHeld) {
#pragma unroll
      for (i32 i = 0; i < kKvTiles; ++i) load_keys(params, own, i * kTileRows, sKv + i * kKvBytes);
    }
    QueryTiles<kPacked> tiles(params, own);
    const Stream stream(sKv + kKvTiles * kKvBytes);
    if (tiles.count > 0) stream.load(0, tiles);

    const Keys keys(params, own, sKv + own.of_block / kTileRows * kKvBytes, lane);
    const CausalColumns<kPacked> columns(own, lane);
    Gradients gradients;
#pragma unroll 1
    for (i32 i = 0; i < tiles.count; ++i) {
      const i32 seen_from = columns.first_query() - tiles.first_query();
      tiles.advance();
      const bool more = i + 1 < tiles.count;
      const u32 queries = stream.wait(i, more, tiles);
      // Compiled apart: in a block of instructions without a branch the compiler overlaps products with rounding.
      if (!params.is_causal || columns.of_last_key(seen_from) < 0) {
        step<kDtype, false>(gradients, keys, queries, lane, columns, 0);
      } else if (columns.of_first_key(seen_from) < kTileRows) {
        step<kDtype, true>(gradients, keys, queries, lane, columns, seen_from);
      }
      stream.finish(i, more, tiles);
    }
    const Position<kPacked> again(params);  // takes no registers over the loop
    const CallerRows rows = again.entry.keys();
    gradients.k.template store<kDtype>(params.grad_k, again.batch(params), again.head(params), rows, again.key(),
                                       params.headdim, lane, kLn2);  // the scale of Q̂ has log2 e
    gradients.v.template store<kDtype>(params.grad_v, again.batch(params), again.head(params), rows, again.key(),
                                       params.headdim, lane, 1.0f);
  }

 private:
  static constexpr i32 kWarpRows = 16, kBlockRows = kThreads / kWarpSize * kWarpRows;
  static constexpr i32 kKvTiles = kBlockRows / kTileRows;
  static constexpr i32 kLeast = kKvTiles * kKvBytes + 2 * Tile::kQBytes;  // of shared memory, with two stages
  using Stream = TileStream<Tile::kQBytes, kMinBlocks * kLeast <= Config::kSharedBytes ? 2 : 1>;
  using Copies = HalfTiles<typename Tile::Halves, kTileRows, kThreads>;
  using Probabilities = ColumnTiles<float, 1>;
  using Scores = ColumnTiles<i32, 1>;
  using GradProbabilities = float[1][kGradTiles][4];

  // blockIdx.x: keys of a head fastest, whose blocks then share its queries in the L2 cache. The first keys come first:
  // under a causal mask the most queries see them.
  template <bool kPacked>
  struct Position {
    i32 head_of_all;  // KV head, of all batch entries, or of all sequences
    BwdEntry<kPacked> entry;
    i32 first_key;  // of the block
    i32 of_block;   // of the block's keys, the warp's first

    __device__ __forceinline__ explicit Position(const BwdParams& params)
        : Position(params, static_cast<i32>(ptx::block_index())) {}
    __device__ __forceinline__ i32 batch(const BwdParams& params) const { return head_of_all / params.num_kv_heads; }
    __device__ __forceinline__ i32 head(const BwdParams& params) const { return head_of_all % params.num_kv_heads; }
    __device__ __forceinline__ i32 key() const { return first_key + of_block; }

    // Index of a key's tile among those of all heads: of the head's last tile, for a key behind it.
    __device__ __forceinline__ i32 tile_of(const BwdParams& params, i32 key) const {
      const i32 last = ceil_div(entry.keys().count, kTileRows) - 1;
      return head_of_all * params.kv_side_tiles + entry.first_kv_tile() + min(key / kTileRows, last);
    }
    // V, from a key on.
    __device__ __forceinline__ HalfRows values(const BwdParams& params, i32 key) const {
      return {params.v, batch(params), head(params), entry.keys(), key, params.headdim};
    }

   private:
    __device__ __forceinline__ Position(const BwdParams& params, i32 block)
        : head_of_all(block / params.kv_blocks_of_head),
          entry(params, batch(params), params.cu_seqlens_k, kBlockRows, block % params.kv_blocks_of_head),
          first_key(entry.block_in_it(params.cu_seqlens_k, kBlockRows, block % params.kv_blocks_of_head) * kBlockRows),
          of_block(static_cast<i32>(threadIdx.x / kWarpSize) * kWarpRows) {}
  };

  // The columns of a tile of queries that see a warp's keys under a causal mask. seen_from: the first that sees the
  // warp's first key; each key behind it is seen from one column further.
  struct EqualColumns {
    const Position<false>& own;

    __device__ __forceinline__ EqualColumns(const Position<false>& own_, i32 /*lane*/) : own(own_) {}
    __device__ __forceinline__ i32 first_query() const { return first_seeing(own.entry, own.key()); }
    __device__ __forceinline__ i32 of_first_key(i32 seen_from) const { return seen_from; }
    __device__ __forceinline__ i32 of_last_key(i32 seen_from) const { return seen_from + kWarpRows - 1; }
    // Of this thread's two keys, which are eight apart.
    __device__ __forceinline__ i32 of_key(i32 r, i32 lane, i32 seen_from) const { return seen_from + lane / 4 + 8 * r; }
  };

  // Likewise of packed keys, between which others are missing. seen_from: the first that sees this thread's first key.
  // Call with all lanes of a warp.
  struct PackedColumns {
    i32 of_first, behind;  // the first query that sees that key, and how many queries behind it sees the second

    __device__ __forceinline__ PackedColumns(const Position<true>& own, i32 lane)
        : of_first(first_seeing(own.entry, own.key() + lane / 4)),
          behind(first_seeing(own.entry, own.key() + lane / 4 + 8) - of_first) {}
    __device__ __forceinline__ i32 first_query() const { return of_first; }
    __device__ __forceinline__ i32 of_first_key(i32 seen_from) const { return ptx::shuffle(seen_from, 0); }
    __device__ __forceinline__ i32 of_last_key(i32 seen_from) const {
      return ptx::shuffle(seen_from + behind, kWarpSize - 1);
    }
    __device__ __forceinline__ i32 of_key(i32 r, i32 /*lane*/, i32 seen_from) const { return seen_from + r * behind; }
  };

  template <bool kPacked, class = void>
  struct SelectColumns {
    using Type = EqualColumns;
  };
  template <class Unused>
  struct SelectColumns<true, Unused> {
    using Type = PackedColumns;
  };
  template <bool kPacked>
  using CausalColumns = typename SelectColumns<kPacked>::Type;

  struct Gradients {
    Gradient<Config, 1> k, v;
  };

  // The tiles of Q and dO that see any of the block's keys: of each query head that reads the KV head, the last ones.
  template <bool kPacked>
  class QueryTiles {
   public:
    i32 count;

    __device__ __forceinline__ QueryTiles(const BwdParams& params, const Position<kPacked>& own)
        : params_(params),
          entry_(own.entry),
          first_tile_(own.entry.first_q_tile()),
          head_(own.head_of_all * params.q_heads_per_kv_head),
          begin_((params.is_causal ? max(0, first_seeing(own.entry, own.first_key)) : 0) / kTileRows),
          tile_(begin_),
          grad_(of_head()) {
      count = max(0, end() - begin_) * params.q_heads_per_kv_head;
    }

    // The first query of the current tile, in its batch entry.
    __device__ __forceinline__ i32 first_query() const { return tile_ * kTileRows; }

    __device__ __forceinline__ void advance() {
      grad_.advance();
      if (++tile_ < end()) return;
      tile_ = begin_, ++head_;
      grad_ = of_head();
    }

    __device__ __forceinline__ void copy_async(u32 stage) const {
      const i32 tile = head_ * params_.q_side_tiles + first_tile_ + tile_;  // of all heads
      const u32 own = threadIdx.x * 16;
      sage::copy_async<Tile::kCodeBytes, kThreads>(stage + Tile::kCodes, Tile::q_codes(params_, tile) + own);
      grad_.copy_async(stage + Tile::kHalves);
      sage::copy_async<Tile::kQWritten - Tile::kSide, kThreads>(stage + Tile::kSide, Tile::q_side(params_, tile) + own);
    }

   private:
    __device__ __forceinline__ i32 end() const { return ceil_div(entry_.queries().count, kTileRows); }
    __device__ __forceinline__ Copies of_head() const {
      return Copies({params_.grad_out, head_ / params_.num_q_heads, head_ % params_.num_q_heads, entry_.queries(),
                     first_query(), params_.headdim});
    }

    const BwdParams& params_;
    const BwdEntry<kPacked>& entry_;
    i32 first_tile_;           // of the batch entry, in the run of a head
    i32 head_, begin_, tile_;  // head_: of all batch entries; tile_: of one
    Copies grad_;
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

  // Begins to copy the tile of K and V that is `row` keys behind the block's first.
  template <bool kPacked>
  __device__ __forceinline__ static void load_keys(const BwdParams& params, const Position<kPacked>& own, i32 row,
                                                   u32 tile) {
    const i32 key = own.first_key + row;
    copy_async<Tile::kCodeBytes, kThreads>(tile + Tile::kCodes,
                                           Tile::k_codes(params, own.tile_of(params, key)) + threadIdx.x * 16);
    Copies(own.values(params, key)).copy_async(tile + Tile::kHalves);
  }

  // K̂ and V of a warp's keys, and the scales of K̂.
  struct Keys {
    typename SelectOperands<kHeld>::K k;
    typename SelectOperands<kHeld>::V v;
    float scale[2];  // of the rows g and g + 8

    // shared: the tile in shared memory that has them, where one has.
    template <bool kPacked>
    __device__ __forceinline__ Keys(const BwdParams& params, const Position<kPacked>& own, u32 shared, i32 lane)
        : Keys(params, own.tile_of(params, own.key()), own.of_block % kTileRows, own.values(params, own.key()), shared,
               lane) {}

   private:
    // tile: of all heads. row: the warp's first, in it.
    __device__ __forceinline__ Keys(const BwdParams& params, i32 tile, i32 row, const HalfRows& values, u32 shared,
                                    i32 lane)
        : k(operand<typename SelectOperands<kHeld>::K>(CodeRows<typename Tile::Codes>{Tile::k_codes(params, tile), row},
                                                       shared + Tile::kCodes, row, lane)),
          v(operand<typename SelectOperands<kHeld>::V>(values, shared + Tile::kHalves, row, lane)) {
      const u8* const side = Tile::kv_side(params, tile);
#pragma unroll
      for (i32 r = 0; r < 2; ++r) {
        scale[r] = reinterpret_cast<const float*>(side + (Tile::kKeyScales - Tile::kSide))[row + lane / 4 + 8 * r];
      }
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
        p[0][n][c] = probability(scores[0][n][c], scale[c], c % 2 == 0 ? minus_lse.x : minus_lse.y);
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

  // The values of an array of every query in shared memory, for this thread's columns.
  __device__ __forceinline__ static ptx::F32x2 of_columns(u32 array, i32 n, i32 lane) {
    return ptx::load_shared_f32x2(array + (4 * n + lane % 4) * sizeof(ptx::F32x2));
  }
};

}  // namespace sage
