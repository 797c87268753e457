// The structs of the kernels before attention, as params.cuh has those of attention.
#pragma once

#include "sage/params.cuh"

namespace sage {

// How Q and K are balanced: quant/balance.cuh.
enum class Balance : i32 { kByNothing, kByK, kByKAndQ };

template <>
struct FieldType<Balance> {
  static constexpr i32 kCode = 'i';
};

// For the key mask of a call that has one.
struct PackParams {
  Tensor key_mask;  // u8 [batch, 1, seqlen_kv, 1]: not zero where a key may be seen
  i32* key_rank;    // [batch][seqlen_kv + 1]: how many of the first keys may be seen
  i32* key_index;   // [batch][seqlen_kv]: the keys that may be seen, in their order; the first is 0 where none may
  i32 seqlen_kv;
  i32 unused;  // fills a gap: fields_of() must cover the struct
};

constexpr auto fields_of(const PackParams*) {
  using Params = PackParams;
  return fields(SAGE_STRUCT(PackParams), SAGE_FIELD(key_mask), SAGE_FIELD(key_rank), SAGE_FIELD(key_index),
                SAGE_FIELD(seqlen_kv), SAGE_FIELD(unused));
}

// Where rows are rotated, q_scale also has the factor kHeadDim. Means are of rows as they came, before a rotation.
// Of sequences in one tensor, arrays of tiles begin with [num_q_heads] or [num_kv_heads] alone: problem/sequences.cuh.
struct QuantParams {
  Tensor q, k, v;
  u8* q_hat;           // [batch * num_q_heads][q_tiles] tiles of block_m rows
  u8* kv_hat;          // [batch * num_kv_heads][kv_tiles] tiles of block_n keys: K̂, V̂ and their KvLine
  float* q_scale;      // [batch * num_q_heads][q_tiles][block_m / warp_m][kRowGroups], times softmax_scale · log2 e
  float* q_mean;       // [batch * num_q_heads][q_tiles][kHeadDim], of a tile's rows, times softmax_scale · log2 e
  float* k_mean;       // [batch * num_kv_heads][kHeadDim], of a sample; zero where K is not smoothed
  float* k_factor;     // likewise, by which K's channels are multiplied: quant/balance.cuh
  float* q_unit;       // [batch * num_kv_heads], by which rows of Q are divided; one where no channel of K is
  float* v_scale;      // [batch * num_kv_heads][kHeadDim]
  float* v_inv_scale;  // likewise
  float* v_mean;       // likewise, as k_mean
  float* row_bias;     // [batch * num_q_heads][q_tiles * block_m], log2 units: what smoothing K took off a row's scores
  u32* tile_counter;   // [1], zeroed for the attention kernel's tile scheduler
  const i32* key_rank;      // as PackParams; null: no key mask
  const i32* key_index;     // likewise
  const i32* cu_seqlens_q;  // as AttnParams
  const i32* cu_seqlens_k;
  i32 batch;
  FastDivmod num_q_heads;
  FastDivmod num_kv_heads;
  FastDivmod q_heads_per_kv_head;
  i32 seqlen_q;
  i32 seqlen_kv;
  i32 kv_rows;  // keys of a batch entry; of sequences, all tokens of k
  i32 headdim;
  FastDivmod q_tiles;
  i32 kv_tiles;
  i32 block_m;               // query rows of a tile
  float softmax_scale_log2;  // softmax scale times log2 e
  Dtype dtype;
  i32 smooth_q;  // whether the mean of each tile's rows is subtracted
  i32 smooth_k;
  i32 smooth_v;
  i32 wants_row_bias;  // whether row_bias is q · k_mean; 0: zero, where a row is finite
  i32 rotate;          // whether Q̂ and K̂ are of rows times the Hadamard matrix
  i32 clip;            // whether the largest values of scale groups of s4 may be cut off
  float v_typical;     // mean magnitude that a channel of V has in V̂, in e4m3
  float v_least;       // a tile of V needs no factor where the largest magnitude in V̂ is from v_least
  float v_limit;       // to v_limit
  i32 kv_blocks;       // blocks for K of a KV head, and as many for V; 0: an earlier launch quantized K and V
  FastDivmod blocks_per_kv_head;
  Balance balance;
  i32 unused;  // fills a gap, as in PackParams
};

constexpr auto fields_of(const QuantParams*) {
  using Params = QuantParams;
  return fields(SAGE_STRUCT(QuantParams), SAGE_FIELD(q), SAGE_FIELD(k), SAGE_FIELD(v), SAGE_FIELD(q_hat),
                SAGE_FIELD(kv_hat), SAGE_FIELD(q_scale), SAGE_FIELD(q_mean), SAGE_FIELD(k_mean), SAGE_FIELD(k_factor),
                SAGE_FIELD(q_unit), SAGE_FIELD(v_scale), SAGE_FIELD(v_inv_scale), SAGE_FIELD(v_mean),
                SAGE_FIELD(row_bias), SAGE_FIELD(tile_counter), SAGE_FIELD(key_rank), SAGE_FIELD(key_index),
                SAGE_FIELD(cu_seqlens_q), SAGE_FIELD(cu_seqlens_k), SAGE_FIELD(batch), SAGE_FIELD(num_q_heads),
                SAGE_FIELD(num_kv_heads), SAGE_FIELD(q_heads_per_kv_head), SAGE_FIELD(seqlen_q), SAGE_FIELD(seqlen_kv),
                SAGE_FIELD(kv_rows), SAGE_FIELD(headdim), SAGE_FIELD(q_tiles), SAGE_FIELD(kv_tiles),
                SAGE_FIELD(block_m), SAGE_FIELD(softmax_scale_log2), SAGE_FIELD(dtype), SAGE_FIELD(smooth_q),
                SAGE_FIELD(smooth_k), SAGE_FIELD(smooth_v), SAGE_FIELD(wants_row_bias), SAGE_FIELD(rotate),
                SAGE_FIELD(clip), SAGE_FIELD(v_typical), SAGE_FIELD(v_least), SAGE_FIELD(v_limit),
                SAGE_FIELD(kv_blocks), SAGE_FIELD(blocks_per_kv_head), SAGE_FIELD(balance), SAGE_FIELD(unused));
}

// For delta_s, the term of the scores that smoothing Q took off: the mean of a query tile's rows · (K less its mean),
// in log2 units.
struct DeltaParams {
  Tensor k;
  const float* q_mean;  // as QuantParams
  const float* k_mean;
  float* delta_s;           // [num_heads][q_tiles][columns]; not written of KV tiles that no row of a tile sees
  const i32* key_rank;      // as PackParams; null: no key mask
  const i32* key_index;     // likewise
  const i32* cu_seqlens_q;  // as AttnParams
  const i32* cu_seqlens_k;
  i32 batch;
  i32 first_head;  // index into [batch * num_q_heads] of the first of num_heads query heads
  i32 num_heads;
  FastDivmod num_q_heads;
  FastDivmod num_kv_heads;
  FastDivmod q_heads_per_kv_head;
  i32 seqlen_q;
  i32 seqlen_kv;
  i32 headdim;
  FastDivmod q_tiles;
  i32 columns;             // kv_tiles * block_n
  FastDivmod key_blocks;   // of the launch's blocks: columns of blocks
  FastDivmod tile_blocks;  // rows of blocks of a query head
  Dtype dtype;
  i32 block_m;      // query rows of a tile
  i32 block_n;      // keys of a KV tile
  i32 window_left;  // as AttnParams: which keys a row sees
  i32 window_right;
};

constexpr auto fields_of(const DeltaParams*) {
  using Params = DeltaParams;
  return fields(SAGE_STRUCT(DeltaParams), SAGE_FIELD(k), SAGE_FIELD(q_mean), SAGE_FIELD(k_mean), SAGE_FIELD(delta_s),
                SAGE_FIELD(key_rank), SAGE_FIELD(key_index), SAGE_FIELD(cu_seqlens_q), SAGE_FIELD(cu_seqlens_k),
                SAGE_FIELD(batch), SAGE_FIELD(first_head), SAGE_FIELD(num_heads), SAGE_FIELD(num_q_heads),
                SAGE_FIELD(num_kv_heads), SAGE_FIELD(q_heads_per_kv_head), SAGE_FIELD(seqlen_q), SAGE_FIELD(seqlen_kv),
                SAGE_FIELD(headdim), SAGE_FIELD(q_tiles), SAGE_FIELD(columns), SAGE_FIELD(key_blocks),
                SAGE_FIELD(tile_blocks), SAGE_FIELD(dtype), SAGE_FIELD(block_m), SAGE_FIELD(block_n),
                SAGE_FIELD(window_left), SAGE_FIELD(window_right));
}

// For the lists of KV tiles of a call with a boolean mask or a mask of blocks. Its masks are those of batch entries and
// query heads that differ: as many as mask_batches and mask_heads, which are 1 where all have one mask.
struct ListsParams {
  Tensor attn_mask;   // u8 [batch, num_q_heads, seqlen_q, seqlen_kv]: not zero where the query sees the key; null: none
  Tensor block_mask;  // u8 [batch, num_q_heads, seqlen_q / 64, seqlen_kv / 64], rounded up: likewise of 64 x 64; null
  Tensor key_mask;    // u8 [batch, 1, seqlen_kv, 1]: likewise of a key; null
  u32* tile_lists;    // [masks][q_tiles][kv_tiles] of TileEntry: problem/sparse_mask.cuh
  i32* tile_counts;   // [masks][q_tiles][2]: KV tiles that are listed, and how many of these every row sees whole
  u8* key_bits;       // [masks][q_tiles][kv_tiles][block_m][4] of FragmentBits: written where a list has a part of the
                      // tile; null: neither attn nor key mask
  FastDivmod mask_heads;
  FastDivmod q_tiles;
  i32 kv_tiles;
  i32 seqlen_q;
  i32 seqlen_kv;
  i32 block_m;
  i32 block_n;
  i32 window_left;  // as AttnParams
  i32 window_right;
  i32 unused;  // fills a gap, as in PackParams
};

constexpr auto fields_of(const ListsParams*) {
  using Params = ListsParams;
  return fields(SAGE_STRUCT(ListsParams), SAGE_FIELD(attn_mask), SAGE_FIELD(block_mask), SAGE_FIELD(key_mask),
                SAGE_FIELD(tile_lists), SAGE_FIELD(tile_counts), SAGE_FIELD(key_bits), SAGE_FIELD(mask_heads),
                SAGE_FIELD(q_tiles), SAGE_FIELD(kv_tiles), SAGE_FIELD(seqlen_q), SAGE_FIELD(seqlen_kv),
                SAGE_FIELD(block_m), SAGE_FIELD(block_n), SAGE_FIELD(window_left), SAGE_FIELD(window_right),
                SAGE_FIELD(unused));
}

}  // namespace sage
