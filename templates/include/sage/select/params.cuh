// The structs of the kernels that choose blocks of keys, as ../params.cuh has those of attention: calls without a
// selection do not depend on them.
#pragma once

#include "sage/params.cuh"

namespace sage {

// For the pooled blocks of one tensor: the mean of the rows of each block, rounded to s8. The last block
// of a head may have fewer rows.
struct PoolParams {
  Tensor x;        // [batch, x_heads, seqlen, headdim]
  u8* x_hat;       // [batch * x_heads][blocks][kHeadDim] of s8: the mean less that of a sample, divided by x_scale
  float* x_scale;  // [batch * x_heads][blocks]
  float* x_alike;  // likewise: how alike the rows of a block are, 0 to 1
  float* x_mean;   // [batch * x_heads][blocks][headdim]: the mean of the rows as they came; null: not wanted
  FastDivmod x_heads;
  FastDivmod blocks;  // of a head
  i32 block_rows;
  i32 seqlen;
  i32 headdim;
  Dtype dtype;
  i32 centre;  // whether the mean of a sample of the head's rows is subtracted
  i32 unused;  // fills a gap, as in ../params.cuh
};

constexpr auto fields_of(const PoolParams*) {
  using Params = PoolParams;
  return fields(SAGE_STRUCT(PoolParams), SAGE_FIELD(x), SAGE_FIELD(x_hat), SAGE_FIELD(x_scale), SAGE_FIELD(x_alike),
                SAGE_FIELD(x_mean), SAGE_FIELD(x_heads), SAGE_FIELD(blocks), SAGE_FIELD(block_rows), SAGE_FIELD(seqlen),
                SAGE_FIELD(headdim), SAGE_FIELD(dtype), SAGE_FIELD(centre), SAGE_FIELD(unused));
}

// What a query block's blocks of keys are chosen by, from their scores.
enum class ChooseBy : i32 { kKeep = 0, kMass = 1, kTau = 2 };

template <>
struct FieldType<ChooseBy> {
  static constexpr i32 kCode = 'i';
};

// For the blocks of keys that each block of queries sees. Blocks have block_q queries and block_k keys, multiples of
// kMaskBlock.
struct ChooseParams {
  const u8* q_hat;       // as PoolParams, of the blocks of q
  const float* q_scale;  // likewise
  const float* q_alike;  // likewise; these four null where no block is kept for its unlike rows
  const u8* k_hat;
  const float* k_scale;
  const float* k_alike;
  const float* amounts;  // [num_q_heads]; null: `amount` for all heads
  u8* selected;  // [batch][num_q_heads][q_block_count * block_q / 64][k_blocks * block_k / 64]: 1 where the 64 queries
                 // see the 64 keys, else 0
  FastDivmod num_q_heads;
  FastDivmod q_heads_per_kv_head;
  FastDivmod groups;  // of query blocks of a head: a thread block takes one
  FastDivmod num_kv_heads;
  i32 q_block_count;
  i32 k_blocks;
  i32 seqlen_q;
  i32 seqlen_kv;
  i32 block_q;
  i32 block_k;
  i32 group_rows;  // query blocks of a group, at most 16
  i32 pitch;       // floats of a row of scores in shared memory
  ChooseBy choose_by;
  float amount;
  float softmax_scale_log2;  // softmax scale times log2 e
  float least_alike;         // blocks whose rows are less alike are kept; 0: none
  i32 choose_causal;         // whether a query sees no key behind its own
  i32 first_kept;            // blocks of keys that every block of queries sees
  i32 near_kept;             // 1: the blocks at the queries' own keys; each more: one more on both sides; 0: none
  i32 dense_first_keys;      // keys that every query sees: so many first ones, and so many last ones
  i32 dense_last_keys;
  i32 dense_first_queries;  // queries that see every key, likewise
  i32 dense_last_queries;
  i32 unused;  // as in PoolParams
};

constexpr auto fields_of(const ChooseParams*) {
  using Params = ChooseParams;
  return fields(SAGE_STRUCT(ChooseParams), SAGE_FIELD(q_hat), SAGE_FIELD(q_scale), SAGE_FIELD(q_alike),
                SAGE_FIELD(k_hat), SAGE_FIELD(k_scale), SAGE_FIELD(k_alike), SAGE_FIELD(amounts), SAGE_FIELD(selected),
                SAGE_FIELD(num_q_heads), SAGE_FIELD(q_heads_per_kv_head), SAGE_FIELD(groups), SAGE_FIELD(num_kv_heads),
                SAGE_FIELD(q_block_count), SAGE_FIELD(k_blocks), SAGE_FIELD(seqlen_q), SAGE_FIELD(seqlen_kv),
                SAGE_FIELD(block_q), SAGE_FIELD(block_k), SAGE_FIELD(group_rows), SAGE_FIELD(pitch),
                SAGE_FIELD(choose_by), SAGE_FIELD(amount), SAGE_FIELD(softmax_scale_log2), SAGE_FIELD(least_alike),
                SAGE_FIELD(choose_causal), SAGE_FIELD(first_kept), SAGE_FIELD(near_kept), SAGE_FIELD(dense_first_keys),
                SAGE_FIELD(dense_last_keys), SAGE_FIELD(dense_first_queries), SAGE_FIELD(dense_last_queries),
                SAGE_FIELD(unused));
}

}  // namespace sage
