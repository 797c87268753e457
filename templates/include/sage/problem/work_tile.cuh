// A work tile, which is what a block works on at a time: a query tile, its heads and rows, and the KV tiles that they
// see, or a split of these.
#pragma once

#include "sage/params.cuh"
#include "sage/problem/heads.cuh"
#include "sage/problem/kv_range.cuh"
#include "sage/tile/address.cuh"

namespace sage {

struct WorkTile {
  i32 q_head;         // index into [batch * num_q_heads]; of sequences into [num_q_heads]
  i32 kv_head;        // index into [batch * num_kv_heads]
  i32 batch, head;    // of the output
  i32 q_tile;         // of the head; of sequences its slot
  i32 first_row;      // of the query tile, in its batch entry
  i32 first_kv_tile;  // index into kv_hat of the first KV tile that the block may see; kv counts from there on
  i32 q_begin;        // row of the batch entry's first query in out and lse, behind the rows of earlier splits
  Lengths lengths;    // of the batch entry
  KvRange kv;         // from 0 on; of a list, places in it, of which those before full_end are seen whole
  i32 first_key;      // of the first KV tile that the block sees, in its batch entry; 0 but in later splits

  __device__ __forceinline__ Seqlen<AttnParams, true> seqlen(const AttnParams& params) const {
    return {params, batch, &lengths};
  }

  // A slot of sequences may be empty.
  __device__ __forceinline__ bool has_queries() const { return first_row < lengths.q; }

  // The KV tiles that kRows of the rows see, from `row` of the query tile on, counted as kv is; none where no such row
  // exists. Under a causal mask they may see fewer than the query tile does.
  template <class Config, i32 kRows>
  __device__ __forceinline__ KvRange kv_of_rows(const AttnParams& params, i32 row) const {
    if (first_row + row >= lengths.q) return {};
    if constexpr (Config::kMask != Mask::kCausal) return kv;
    const KvRange own = kv_range<Config, kRows>(seqlen(params), first_row + row);
    const i32 first = first_key / Config::kBlockN, end = min(max(own.end - first, 0), kv.end);
    return {0, end, 0, min(own.full_end - first, end)};
  }

  // Element: of params.dtype's size.
  template <class Element>
  __device__ __forceinline__ Element* output_row(const AttnParams& params, i32 row) const {
    const Strides& stride = params.out.stride;
    return static_cast<Element*>(params.out.data) + batch * stride.batch + head * stride.head +
           (q_begin + row) * stride.row;
  }

  // A row of the log-sum-exp, which is contiguous.
  __device__ __forceinline__ float* lse_row(const AttnParams& params, i32 row) const {
    return params.lse + static_cast<i64>(q_head) * params.q_rows + q_begin + row;
  }

  // A KV tile as the quantizer left it.
  template <class Config>
  __device__ __forceinline__ const u8* kv_tile(const AttnParams& params, i32 tile) const {
    return kv_tile_address<Config>(params.kv_hat, first_kv_tile + tile);
  }
};

// The index of the list of a query tile among those of all masks (problem/sparse_mask.cuh).
__device__ __forceinline__ i64 list_index(const AttnParams& params, const WorkTile& work) {
  const i32 mask = work.batch * params.mask_of_batch + work.head * params.mask_of_head;
  return static_cast<i64>(mask) * params.q_tiles.divisor + work.q_tile;
}

// index: splits of a query tile fastest, then query tiles of a head, then heads. Query tiles of a head are neighbours:
// blocks that run together read the same K and V from L2. All masks but full take the query tiles of a
// head from the last, which under a causal mask has the most keys, so that a grid with one block a work tile ends with
// short blocks.
// The epilogue of the mma family computes the WorkTile again, which saves registers across the main loop.
template <class Config>
__device__ __forceinline__ WorkTile work_tile(const AttnParams& params, i32 index) {
  WorkTile work;
  const i32 split = index % params.splits, query_tile = index / params.splits, tile = query_tile % params.q_tiles;
  work.q_tile = Config::kMask == Mask::kFull ? tile : params.q_tiles - 1 - tile;
  work.q_head = params.first_head + query_tile / params.q_tiles;
  i32 first_tile = 0;  // of the batch entry
  if (params.cu_seqlens_q == nullptr) {
    work.batch = work.q_head / params.num_q_heads;
    work.head = work.q_head % params.num_q_heads;
  } else {
    work.batch = sequence_of_slot(params.cu_seqlens_q, params.batch, Config::kBlockM, work.q_tile);
    work.head = work.q_head;
    first_tile = first_slot(params.cu_seqlens_q, work.batch, Config::kBlockM);
  }
  work.kv_head = kv_head_of(params, work.batch, work.head);
  work.first_row = (work.q_tile - first_tile) * Config::kBlockM;
  work.first_kv_tile = first_kv_tile_of(params, work.batch, work.head / params.q_heads_per_kv_head, Config::kBlockN);
  work.q_begin = seqlen_of(params, work.batch).q_begin() + split * params.split_rows;
  work.lengths = seqlen_of(params, work.batch).lengths();
  const KvRange kv = kv_range<Config>(work.seqlen(params), work.first_row);
  const i32 begin = kv.begin_of_split(split, params.splits);
  work.kv = kv.of_split(begin, params.splits);
  work.first_kv_tile += begin;
  work.first_key = begin * Config::kBlockN;
  if constexpr (Config::kMask == Mask::kSparse) {
    if (params.tile_lists != nullptr) {  // whose call splits no keys
      const i32* counts = params.tile_counts + 2 * list_index(params, work);
      work.kv = {0, counts[0], 0, counts[1]};
      work.first_kv_tile -= begin;
      work.first_key = 0;
    }
  }
  return work;
}

}  // namespace sage
