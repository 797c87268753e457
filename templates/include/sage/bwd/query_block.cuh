// A block's queries, and the tiles of K and V that it goes over: of the kernels of dQ.
#pragma once

#include "sage/bwd/columns.cuh"
#include "sage/bwd/entry.cuh"
#include "sage/bwd/half_rows.cuh"
#include "sage/problem/heads.cuh"
#include "sage/ptx/shared.cuh"
#include "sage/ptx/special.cuh"
#include "sage/quant/source.cuh"
#include "sage/tile/copy.cuh"

namespace sage {

// blockIdx.x: queries of a head fastest, whose blocks then share its keys in the L2 cache. The last queries come first:
// under a causal mask they see the most keys.
template <bool kPacked, i32 kBlockRows>
struct QueryBlock {
  static constexpr bool kIsPacked = kPacked;

  i32 batch, head;  // of sequences the batch is 0
  BwdEntry<kPacked> entry;
  i32 first_row, row;  // of the block and of the warp

  __device__ __forceinline__ QueryBlock(const BwdParams& params, i32 row_of_block)
      : QueryBlock(params, row_of_block, static_cast<i32>(ptx::block_index())) {}
  // Whether a block of a sequence has any.
  __device__ __forceinline__ bool has_queries() const { return !kPacked || first_row < entry.queries().count; }

 private:
  __device__ __forceinline__ QueryBlock(const BwdParams& params, i32 row_of_block, i32 block)
      : QueryBlock(params, row_of_block, block / params.q_blocks, params.q_blocks - 1 - block % params.q_blocks) {}
  __device__ __forceinline__ QueryBlock(const BwdParams& params, i32 row_of_block, i32 head_of_all, i32 slot)
      : batch(head_of_all / params.num_q_heads),
        head(head_of_all % params.num_q_heads),
        entry(params, batch, params.cu_seqlens_q, kBlockRows, slot),
        first_row(entry.block_in_it(params.cu_seqlens_q, kBlockRows, slot) * kBlockRows),
        row(first_row + row_of_block) {}
};

// The tiles of K and V of a KV head, from the first on. kThreads: that copy them.
template <class Config, i32 kThreads>
class KeyTiles {
  using Tile = BwdTile<Config>;

 public:
  template <class Block>
  __device__ __forceinline__ KeyTiles(const BwdParams& params, const Block& own)
      : params_(params),
        tile_(kv_head_of(params, own.batch, own.head) * params.kv_side_tiles + own.entry.first_kv_tile()),
        v_({params.v, own.batch, own.head / params.q_heads_per_kv_head, own.entry.keys(), 0, params.headdim}) {}

  // Begins to copy the current tile, and goes to the next.
  __device__ __forceinline__ void copy_async(u32 stage) {
    const u32 own = threadIdx.x * 16;
    sage::copy_async<Tile::kCodeBytes, kThreads>(stage + Tile::kCodes, codes() + own);
    copy_halves_async(stage);
    sage::copy_async<kSideBytes, kThreads>(stage + Tile::kSide, side() + own);
    advance();
  }

  // The parts of the current tile: K̂ and the side, which are runs of bytes, and V.
  static constexpr i32 kSideBytes = Tile::kKvSideBytes;
  __device__ __forceinline__ const u8* codes() const { return Tile::k_codes(params_, tile_); }
  __device__ __forceinline__ const u8* side() const { return Tile::kv_side(params_, tile_); }
  __device__ __forceinline__ void copy_halves_async(u32 stage) const { v_.copy_async(stage + Tile::kHalves); }

  __device__ __forceinline__ void advance() {
    ++tile_;
    v_.advance();
  }

 private:
  const BwdParams& params_;
  i32 tile_;  // of all heads
  HalfTiles<typename Tile::Halves, kTileRows, kThreads> v_;
};

// The index among those of all heads of a tile of the block's head: of the head's last tile, for a row behind it.
template <class Block>
__device__ __forceinline__ i32 q_tile_of(const BwdParams& params, const Block& own, i32 row) {
  const i32 last = ceil_div(own.entry.queries().count, kTileRows) - 1;
  return (own.batch * params.num_q_heads + own.head) * params.q_side_tiles + own.entry.first_q_tile() +
         min(row / kTileRows, last);
}

// dO of the block's head, from a row on.
template <class Block>
__device__ __forceinline__ HalfRows grad_out_of(const BwdParams& params, const Block& own, i32 row) {
  return {params.grad_out, own.batch, own.head, own.entry.queries(), row, params.headdim};
}

// Begins to copy Q̂ and dO of a tile of the block's queries, of which `row` of the block is the first. With kThreads
// threads.
template <class Config, i32 kThreads, class Block>
__device__ __forceinline__ void copy_queries_async(const BwdParams& params, const Block& own, i32 row, u32 tile) {
  using Tile = BwdTile<Config>;
  const i32 first = own.first_row + row;
  copy_async<Tile::kCodeBytes, kThreads>(tile + Tile::kCodes,
                                         Tile::q_codes(params, q_tile_of(params, own, first)) + threadIdx.x * 16);
  HalfTiles<typename Tile::Halves, kTileRows, kThreads>(grad_out_of(params, own, first))
      .copy_async(tile + Tile::kHalves);
}

// Constants of a warp's queries, of kM times 16 rows.
template <class Config, i32 kM>
struct QueryRows {
  float q_scale[kM][2], minus_lse[kM][2], minus_delta[kM][2];  // of the rows 16m + g and 16m + g + 8

  // Rows behind the last query's tile are those of that tile, and not stored.
  template <class Block>
  __device__ __forceinline__ QueryRows(const BwdParams& params, const Block& own, i32 lane) {
    using Tile = BwdTile<Config>;
    const u8* const side = Tile::q_side(params, q_tile_of(params, own, own.row));
#pragma unroll
    for (i32 r = 0; r < 2 * kM; ++r) {
      const i32 row = own.row + lane / 4 + 8 * r;
      const auto load = [&](i32 array) {
        return reinterpret_cast<const float*>(side + (array - Tile::kQSide))[row % kTileRows];
      };
      q_scale[r / 2][r % 2] = load(Tile::kQueryScales);
      minus_lse[r / 2][r % 2] = load(Tile::kMinusLse);
      minus_delta[r / 2][r % 2] = load(Tile::kMinusDelta);
    }
  }

  // Calls visit(m, n, c, P) for the scores of a tile of keys. All columns of a thread are keys of one scale group.
  // kScaled: P times that scale, a summand of the exponent, where a factor would take a product a score.
  template <bool kScaled, class Visit>
  __device__ __forceinline__ void exponentiate(const ColumnTiles<i32, kM>& scores, float k_scale, Visit visit) const {
    const float log2_most = kScaled ? ptx::lg2(k_scale) : 0.0f;
#pragma unroll
    for (i32 m = 0; m < kM; ++m) {
      float scale[2], of_row[2];
#pragma unroll
      for (i32 r = 0; r < 2; ++r) {
        scale[r] = k_scale * q_scale[m][r];
        of_row[r] = kScaled ? minus_lse[m][r] + log2_most : minus_lse[m][r];
      }
#pragma unroll
      for (i32 n = 0; n < kColumnTiles; ++n) {
#pragma unroll
        for (i32 c = 0; c < 4; ++c) {
          visit(m, n, c, probability(scores[m][n][c], scale[c / 2], of_row[c / 2], log2_most));
        }
      }
    }
  }
};

// The scale of this thread's keys of a tile in shared memory.
template <class Config>
__device__ __forceinline__ float load_key_scale(u32 keys, i32 lane) {
  return ptx::load_shared_f32(keys + BwdTile<Config>::kKeyScales + lane % 4 * 2 * sizeof(float));
}

// Zeros for the columns of a tile that a warp's rows do not see. first_key: the tile's first.
template <class Block, i32 kM>
__device__ __forceinline__ void hide_unseen(ColumnTiles<float, kM>& x, const BwdParams& params, const Block& own,
                                            i32 first_key, i32 lane) {
  i32 hidden_from[kM][2];
#pragma unroll
  for (i32 r = 0; r < 2 * kM; ++r) {
    hidden_from[r / 2][r % 2] = visible_end(params, own.entry, own.row + lane / 4 + 8 * r) - first_key;
  }
  hide<false, kM>(x, hidden_from, lane);
}

}  // namespace sage
