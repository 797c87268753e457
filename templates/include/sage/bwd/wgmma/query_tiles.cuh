// The tiles of queries that see any of a block's keys, and their copies to shared memory.
#pragma once

#include "sage/bwd/key_block.cuh"
#include "sage/bwd/wgmma/bulk_pipeline.cuh"

namespace sage {

// Of each query head that reads the KV head, from the last tile to the first: under a causal mask all blocks of a head
// then begin with the same tile.
template <class Block>
class QueryTilesBackwards {
 public:
  i32 begin, end;  // of each head

  __device__ __forceinline__ QueryTilesBackwards(const BwdParams& params, const Block& own)
      : begin(first_tile(params, own, own.first_key)),
        end(tiles_of(own)),
        tiles_of_head_(params.q_side_tiles),
        heads_left_(begin < end ? static_cast<i32>(params.q_heads_per_kv_head) : 0),
        first_(own.head_of_all * params.q_heads_per_kv_head * tiles_of_head_ + own.entry.first_q_tile()),
        tile_(end - 1) {}

  __device__ __forceinline__ bool any() const { return heads_left_ > 0; }
  // The index of the current tile among those of all heads.
  __device__ __forceinline__ i32 of_all() const { return first_ + tile_; }
  __device__ __forceinline__ void advance() {
    if (--tile_ >= begin) return;
    tile_ = end - 1, first_ += tiles_of_head_, --heads_left_;
  }

  // How many tiles the queries of a head have.
  __device__ __forceinline__ static i32 tiles_of(const Block& own) {
    return ceil_div(own.entry.queries().count, kTileRows);
  }
  // The first tile of queries that sees a key.
  __device__ __forceinline__ static i32 first_tile(const BwdParams& params, const Block& own, i32 key) {
    return has_diagonal(params) ? max(0, first_seeing(own.entry, key)) / kTileRows : 0;
  }
  // The first tile of queries of which all see a key.
  __device__ __forceinline__ static i32 whole_from(const BwdParams& params, const Block& own, i32 key) {
    return has_diagonal(params) ? ceil_div(max(0, first_seeing(own.entry, key)), kTileRows) : 0;
  }

 private:
  i32 tiles_of_head_, heads_left_, first_, tile_;  // first_: of the head's tiles
};

// The stages of tiles of queries: one for what a tile's own step reads, and one for its half codes, which the step of
// the next tile reads.
template <class Tile, i32 kStages, i32 kConsumers>
struct QueryPipelines {
  using Rows = BulkPipeline<Tile::kQWritten, kStages, kConsumers>;
  using HalfCodes = BulkPipeline<Tile::kHalfBytes, kStages, kConsumers>;
  using Stage = typename Rows::Stage;
  static constexpr i32 kBytes = Rows::kBytes + HalfCodes::kBytes;

  const Rows rows;
  const HalfCodes half_codes;

  __device__ __forceinline__ explicit QueryPipelines(u32 shared) : rows(shared), half_codes(shared + Rows::kBytes) {}
  __device__ __forceinline__ void init() const {
    rows.init();
    half_codes.init();
  }

  // Begins to copy a tile, of all heads, when its stages are free. Call with one thread.
  __device__ __forceinline__ void copy(Stage& next, const BwdParams& params, i32 q_tile) const {
    const u8* const side = Tile::q_side(params, q_tile);
    rows.begin(next);
    rows.copy(next, Tile::kCodes, Tile::q_codes(params, q_tile), Tile::kCodeBytes);
    rows.copy(next, Tile::kQSide, side, Tile::kQWritten - Tile::kQSide);
    half_codes.begin(next);
    half_codes.copy(next, 0, side + (Tile::kQHalfCodes - Tile::kQSide), Tile::kHalfBytes);
    next.advance();
  }
};

}  // namespace sage
