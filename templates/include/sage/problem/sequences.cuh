// Sequences in one tensor, [tokens, heads, headdim]: sequence b is the rows cu_seqlens[b] to cu_seqlens[b + 1] - 1.
// Work on rows comes in blocks, such as tiles, and a sequence has a run of slots, one for each of its blocks. Its first
// slot follows from cu_seqlens alone, cu_seqlens[b] / block + b: the sequences before it have at most cu_seqlens[b] /
// block whole blocks and b that are not whole. Slots may stay empty.
#pragma once

#include "sage/tile/address.cuh"
#include "sage/types.cuh"

namespace sage {

__device__ __forceinline__ i32 first_slot(const i32* cu_seqlens, i32 sequence, i32 block) {
  return cu_seqlens[sequence] / block + sequence;
}

// The last sequence whose first slot is not behind `slot`.
__device__ __forceinline__ i32 sequence_of_slot(const i32* cu_seqlens, i32 batch, i32 block, i32 slot) {
  i32 found = 0, end = batch;
#pragma unroll 1
  while (end - found > 1) {
    const i32 middle = (found + end) / 2;
    if (first_slot(cu_seqlens, middle, block) <= slot) found = middle;
    else end = middle;
  }
  return found;
}

// The index of the first query tile of a batch entry and one of its heads, among those of all heads.
template <class Params>
__device__ __forceinline__ i64 first_q_tile_of(const Params& params, i32 batch, i32 head, i32 block_m) {
  if (params.cu_seqlens_q == nullptr) return q_tile_index(batch * params.num_q_heads + head, params.q_tiles, 0);
  return q_tile_index(head, params.q_tiles, first_slot(params.cu_seqlens_q, batch, block_m));
}

// The index in kv_hat of the first KV tile of a batch entry and one of its KV heads.
template <class Params>
__device__ __forceinline__ i32 first_kv_tile_of(const Params& params, i32 batch, i32 head, i32 block_n) {
  if (params.cu_seqlens_k == nullptr) return (batch * params.num_kv_heads + head) * params.kv_tiles;
  return head * params.kv_tiles + first_slot(params.cu_seqlens_k, batch, block_n);
}

}  // namespace sage
