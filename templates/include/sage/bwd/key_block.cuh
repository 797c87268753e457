// A block's keys, the queries that see them, and the tiles of Q and dO that it goes over: of the kernels of dK and dV.
#pragma once

#include "sage/bwd/columns.cuh"
#include "sage/bwd/entry.cuh"
#include "sage/bwd/half_rows.cuh"
#include "sage/ptx/shared.cuh"
#include "sage/ptx/special.cuh"
#include "sage/ptx/warp.cuh"
#include "sage/quant/source.cuh"
#include "sage/tile/copy.cuh"

namespace sage {

constexpr i32 kKeysOfWarp = 16;

// blockIdx.x: keys of a head fastest, whose blocks then share its queries in the L2 cache. The first keys come first:
// under a causal mask the most queries see them. kSideBySide: blocks of params.heads_side_by_side heads come in turn,
// so that blocks of one head, which wait for each other, begin apart.
template <bool kPacked, i32 kBlockRows, bool kSideBySide = false>
struct KeyBlock {
  static constexpr bool kIsPacked = kPacked;

  i32 head_of_all;  // KV head, of all batch entries, or of all sequences
  BwdEntry<kPacked> entry;
  i32 first_key;  // of the block
  i32 of_block;   // of the block's keys, the warp's first

  __device__ __forceinline__ KeyBlock(const BwdParams& params, i32 warp)
      : KeyBlock(params, warp, kSideBySide ? index_by_heads(params) : static_cast<i32>(ptx::block_index())) {}
  __device__ __forceinline__ i32 batch(const BwdParams& params) const { return head_of_all / params.num_kv_heads; }
  __device__ __forceinline__ i32 head(const BwdParams& params) const { return head_of_all % params.num_kv_heads; }
  __device__ __forceinline__ i32 key() const { return first_key + of_block; }
  // Whether a block of packed keys has any.
  __device__ __forceinline__ bool has_keys() const { return !kPacked || first_key < entry.keys().count; }
  // Whether the block is of a head that there is: not all of those side by side are.
  __device__ __forceinline__ static bool has_head(const BwdParams& params) {
    return !kSideBySide || index_by_heads(params) / params.kv_blocks_of_head < params.kv_heads;
  }

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
  // The block's index in an order with the keys of a head fastest.
  __device__ __forceinline__ static i32 index_by_heads(const BwdParams& params) {
    const FastDivmod &heads = params.heads_side_by_side, &blocks = params.kv_blocks_of_head;
    const i32 index = ptx::block_index(), round = index / heads;  // a round: one block of each of these heads
    const i32 head = round / blocks * heads.divisor + index % heads;
    return head * blocks.divisor + round % blocks;
  }

  __device__ __forceinline__ KeyBlock(const BwdParams& params, i32 warp, i32 block)
      : head_of_all(block / params.kv_blocks_of_head),
        entry(params, batch(params), params.cu_seqlens_k, kBlockRows, block % params.kv_blocks_of_head),
        first_key(entry.block_in_it(params.cu_seqlens_k, kBlockRows, block % params.kv_blocks_of_head) * kBlockRows),
        of_block(warp * kKeysOfWarp) {}
};

// The columns of a tile of queries that see a warp's keys under a causal mask. seen_from: the first that sees the
// warp's first key; each key behind it is seen from one column further.
template <class Block>
struct EqualColumns {
  const Block& own;

  __device__ __forceinline__ EqualColumns(const Block& own_, i32 /*lane*/) : own(own_) {}
  __device__ __forceinline__ i32 first_query() const { return first_seeing(own.entry, own.key()); }
  __device__ __forceinline__ i32 of_first_key(i32 seen_from) const { return seen_from; }
  __device__ __forceinline__ i32 of_last_key(i32 seen_from) const { return seen_from + kKeysOfWarp - 1; }
  // Of this thread's two keys, which are eight apart.
  __device__ __forceinline__ i32 of_key(i32 r, i32 lane, i32 seen_from) const { return seen_from + lane / 4 + 8 * r; }
};

// Likewise of packed keys, between which others are missing. seen_from: the first that sees this thread's first key.
// Call with all lanes of a warp.
template <class Block>
struct PackedColumns {
  i32 of_first, behind;  // the first query that sees that key, and how many queries behind it sees the second

  __device__ __forceinline__ PackedColumns(const Block& own, i32 lane)
      : of_first(first_seeing(own.entry, own.key() + lane / 4)),
        behind(first_seeing(own.entry, own.key() + lane / 4 + 8) - of_first) {}
  __device__ __forceinline__ i32 first_query() const { return of_first; }
  __device__ __forceinline__ i32 of_first_key(i32 seen_from) const { return ptx::shuffle(seen_from, 0); }
  __device__ __forceinline__ i32 of_last_key(i32 seen_from) const {
    return ptx::shuffle(seen_from + behind, kWarpSize - 1);
  }
  __device__ __forceinline__ i32 of_key(i32 r, i32 /*lane*/, i32 seen_from) const { return seen_from + r * behind; }
};

template <class Block, bool kPacked = Block::kIsPacked>
struct SelectColumns {
  using Type = EqualColumns<Block>;
};
template <class Block>
struct SelectColumns<Block, true> {
  using Type = PackedColumns<Block>;
};
template <class Block>
using CausalColumns = typename SelectColumns<Block>::Type;

// The tiles of Q and dO that see any of the block's keys: of each query head that reads the KV head, the last ones.
// kThreads: that copy them.
template <class Config, class Block, i32 kThreads>
class QueryTiles {
  using Tile = BwdTile<Config>;
  using Copies = HalfTiles<typename Tile::Halves, kTileRows, kThreads>;

 public:
  i32 count;

  __device__ __forceinline__ QueryTiles(const BwdParams& params, const Block& own)
      : params_(params),
        entry_(own.entry),
        first_tile_(own.entry.first_q_tile()),
        head_(own.head_of_all * params.q_heads_per_kv_head),
        begin_((has_diagonal(params) ? max(0, first_seeing(own.entry, own.first_key)) : 0) / kTileRows),
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
    const u32 own = threadIdx.x * 16;
    constexpr i32 kSideBytes = Tile::kQWritten - Tile::kSide;
    sage::copy_async<Tile::kCodeBytes, kThreads>(stage + Tile::kCodes, Tile::q_codes(params_, tile_of_all()) + own);
    grad_.copy_async(stage + Tile::kHalves);
    sage::copy_async<kSideBytes, kThreads>(stage + Tile::kSide, Tile::q_side(params_, tile_of_all()) + own);
  }

 private:
  __device__ __forceinline__ i32 tile_of_all() const { return head_ * params_.q_side_tiles + first_tile_ + tile_; }
  __device__ __forceinline__ i32 end() const { return ceil_div(entry_.queries().count, kTileRows); }
  __device__ __forceinline__ Copies of_head() const {
    return Copies({params_.grad_out, head_ / params_.num_q_heads, head_ % params_.num_q_heads, entry_.queries(),
                   first_query(), params_.headdim});
  }

  const BwdParams& params_;
  const BwdEntry<Block::kIsPacked>& entry_;
  i32 first_tile_;           // of the batch entry, in the run of a head
  i32 head_, begin_, tile_;  // head_: of all batch entries; tile_: of one
  Copies grad_;
};

// Begins to copy the codes and values of a tile of the block's keys, of which `row` of the block is the first. With
// kThreads threads.
template <class Config, i32 kThreads, class Block>
__device__ __forceinline__ void copy_keys_async(const BwdParams& params, const Block& own, i32 row, u32 tile) {
  using Tile = BwdTile<Config>;
  const i32 key = own.first_key + row;
  copy_async<Tile::kCodeBytes, kThreads>(tile + Tile::kCodes,
                                         Tile::k_codes(params, own.tile_of(params, key)) + threadIdx.x * 16);
  HalfTiles<typename Tile::Halves, kTileRows, kThreads>(own.values(params, key)).copy_async(tile + Tile::kHalves);
}

// The scales of K̂ of this thread's keys, g and g + 8 of a warp's. tile: of all heads; row: the warp's first, in it.
template <class Config>
__device__ __forceinline__ void load_key_scales(float (&scale)[2], const BwdParams& params, i32 tile, i32 row,
                                                i32 lane) {
  using Tile = BwdTile<Config>;
  const u8* const side = Tile::kv_side(params, tile);
#pragma unroll
  for (i32 r = 0; r < 2; ++r) {
    scale[r] = reinterpret_cast<const float*>(side + (Tile::kKeyScales - Tile::kSide))[row + lane / 4 + 8 * r];
  }
}

// The constants of the queries of a tile in shared memory, for a thread's columns 8n + 2t and 8n + 2t + 1.
template <class Config>
struct QueryColumns {
  using Tile = BwdTile<Config>;

  u32 queries;  // the tile
  i32 lane;

  __device__ __forceinline__ ptx::F32x2 minus_lse(i32 n) const { return of(Tile::kMinusLse, n); }
  // Queries 8 apart, of 16 in a row, are of one scale group: n and n + 1 have the same, n even.
  __device__ __forceinline__ ptx::F32x2 q_scale(i32 n) const { return of(Tile::kQueryScales, n); }
  __device__ __forceinline__ ptx::F32x2 minus_delta(i32 n) const { return of(Tile::kMinusDelta, n); }
  __device__ __forceinline__ ptx::F32x2 minus_scaled_delta(i32 n) const { return of(Tile::kMinusScaledDelta, n); }
  // The scales of dÔ, of all n.
  __device__ __forceinline__ ptx::F32x2 grad_scale() const {
    return ptx::load_shared_f32x2(queries + Tile::kGradScales + lane % 4 * sizeof(ptx::F32x2));
  }

 private:
  __device__ __forceinline__ ptx::F32x2 of(i32 array, i32 n) const {
    return ptx::load_shared_f32x2(queries + array + (4 * n + lane % 4) * sizeof(ptx::F32x2));
  }
};

// P of a warp's keys. Columns: QueryColumns, or what registers hold of them.
template <class Columns>
__device__ __forceinline__ void exponentiate(ColumnTiles<float, 1>& p, const ColumnTiles<i32, 1>& scores,
                                             const float (&key_scale)[2], Columns& columns) {
  float scale[4];
#pragma unroll
  for (i32 n = 0; n < kColumnTiles; ++n) {
    const ptx::F32x2 minus_lse = columns.minus_lse(n);
    if (n % 2 == 0) {
      const ptx::F32x2 q_scale = columns.q_scale(n);
#pragma unroll
      for (i32 c = 0; c < 4; ++c) scale[c] = (c % 2 == 0 ? q_scale.x : q_scale.y) * key_scale[c / 2];
    }
#pragma unroll
    for (i32 c = 0; c < 4; ++c) {
      p[0][n][c] = probability(scores[0][n][c], scale[c], c % 2 == 0 ? minus_lse.x : minus_lse.y);
    }
  }
}

// dS of a warp's keys, times the scale of Q̂, to where P was: P · (dP · q_scale - D · q_scale). Of kN column tiles from
// `first` on.
template <i32 kN, class Columns>
__device__ __forceinline__ void multiply_by_grad(ColumnTiles<float, 1>& p, const float (&grad_p)[1][kN][4],
                                                 Columns& columns, i32 first = 0) {
  ptx::F32x2 q_scale;
#pragma unroll
  for (i32 n = 0; n < kN; ++n) {
    if (n % 2 == 0) q_scale = columns.q_scale(first + n);
    const ptx::F32x2 scaled = columns.minus_scaled_delta(first + n);
#pragma unroll
    for (i32 c = 0; c < 4; ++c) {
      const bool is_first = c % 2 == 0;
      p[0][first + n][c] *= fmaf(grad_p[0][n][c], is_first ? q_scale.x : q_scale.y, is_first ? scaled.x : scaled.y);
    }
  }
}

// dS of a warp's keys, to where P was: P · (dP - D).
template <class Columns>
__device__ __forceinline__ void multiply_by_unscaled_grad(ColumnTiles<float, 1>& p, const ColumnTiles<float, 1>& grad_p,
                                                          Columns& columns) {
#pragma unroll
  for (i32 n = 0; n < kColumnTiles; ++n) {
    const ptx::F32x2 minus_delta = columns.minus_delta(n);
#pragma unroll
    for (i32 c = 0; c < 4; ++c) p[0][n][c] *= grad_p[0][n][c] + (c % 2 == 0 ? minus_delta.x : minus_delta.y);
  }
}

// dS times the scales of the keys.
__device__ __forceinline__ void multiply_by_key_scales(
    ColumnTiles<float, 1>& scaled, const ColumnTiles<float, 1>& grad_s, const float (&key_scale)[2]) {
#pragma unroll
  for (i32 n = 0; n < kColumnTiles; ++n) {
#pragma unroll
    for (i32 c = 0; c < 4; ++c) scaled[0][n][c] = grad_s[0][n][c] * key_scale[c / 2];
  }
}

// dS times the scales of Q̂, in its place.
template <class Columns>
__device__ __forceinline__ void multiply_by_q_scales(ColumnTiles<float, 1>& grad_s, Columns& columns) {
#pragma unroll
  for (i32 n = 0; n < kColumnTiles; n += 2) {
    const ptx::F32x2 q_scale = columns.q_scale(n);
#pragma unroll
    for (i32 i = n; i < n + 2; ++i) {
#pragma unroll
      for (i32 c = 0; c < 4; ++c) grad_s[0][i][c] *= c % 2 == 0 ? q_scale.x : q_scale.y;
    }
  }
}

}  // namespace sage
