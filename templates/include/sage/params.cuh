// The structs that the host passes by value, one per kind of kernel: here those of attention, in quant/params.cuh,
// select/params.cuh and bwd/params.cuh those of other launches. sage_aot/_launch/structs.py fills them in by name.
// fields_of() puts the offset of each field into the cubin for the host. Strides are in elements. Layouts in brackets
// are contiguous, outermost index first; tile/layout.cuh explains "tile" layouts. `headdim` counts the channels of rows
// in memory, kHeadDim the kernel's: channels from headdim on are zeros.
#pragma once

#include "sage/fast_divmod.cuh"
#include "sage/kernel_info.cuh"
#include "sage/types.cuh"

namespace sage {

struct Strides {
  i64 batch, head, row;
};

// One tensor of the caller's: [batch, heads, rows, headdim], of any strides but that of the last dimension, which is 1.
// Of sequences in one tensor, [tokens, heads, headdim], stride.batch is 0.
struct Tensor {
  void* data;  // f16, bf16 or f32, or as a struct says
  Strides stride;
};

template <>
struct FieldType<Tensor> {
  static constexpr i32 kCode = 'T';
};

struct AttnParams {
  const u8* q_hat;  // these six as QuantParams
  const u8* kv_hat;
  const float* q_scale;
  const float* v_scale;
  const float* v_mean;
  const float* row_bias;
  const float* delta_s;     // as DeltaParams, for the heads of this launch; read where Q is smoothed
  Tensor out;               // like q; where keys are split, partial_out of MergeParams
  float* lse;               // [batch][num_q_heads][q_rows], natural log; of sequences without [batch]; null: not
                            // wanted; where keys are split, partial_lse of MergeParams
  u32* tile_counter;        // [1], draws from the tile scheduler; zero before and after a launch
  const i32* key_rank;      // as PackParams; null: no key mask
  const i32* cu_seqlens_q;  // [batch + 1]: sequences in one tensor, problem/sequences.cuh; null: batch entries
  const i32* cu_seqlens_k;  // likewise
  i32 batch;
  i32 first_head;  // index into [batch * num_q_heads] of the first query head of this launch
  FastDivmod num_q_heads;
  FastDivmod num_kv_heads;
  FastDivmod q_heads_per_kv_head;
  i32 seqlen_q;   // of sequences the most
  i32 seqlen_kv;  // likewise
  i32 q_rows;     // queries of a batch entry; of sequences, all tokens of q
  i32 columns;    // of delta_s
  i32 headdim;    // of out
  FastDivmod q_tiles;
  i32 kv_tiles;
  Dtype dtype;             // of out
  i32 num_heads;           // query heads of this launch
  i32 split_rows;          // rows of a split in out and lse
  FastDivmod splits;       // blocks that share the keys of a query tile
  i32 window_left;         // these three of sparse kernels alone: keys that a row sees in front of its own
  i32 window_right;        // likewise behind it; problem/mask.cuh
  Tensor sinks;            // f32 [num_q_heads]: a logit that joins the softmax of a row without a value; null: none
  const u32* tile_lists;   // as ListsParams; these five of sparse kernels alone, too; null: the window alone decides
  const i32* tile_counts;  // likewise
  const u8* key_bits;      // likewise; null: no element of a mask decides
  i32 mask_of_batch;       // the index of a mask is batch · mask_of_batch + head · mask_of_head
  i32 mask_of_head;
  i32 returns_lse;  // whether the call returns a log-sum-exp, for which sums of P are exact
  i32 unused;       // fills a gap: fields_of() must cover the struct
};

constexpr auto fields_of(const AttnParams*) {
  using Params = AttnParams;
  return fields(SAGE_STRUCT(AttnParams), SAGE_FIELD(q_hat), SAGE_FIELD(kv_hat), SAGE_FIELD(q_scale),
                SAGE_FIELD(v_scale), SAGE_FIELD(v_mean), SAGE_FIELD(row_bias), SAGE_FIELD(delta_s), SAGE_FIELD(out),
                SAGE_FIELD(lse), SAGE_FIELD(tile_counter), SAGE_FIELD(key_rank), SAGE_FIELD(cu_seqlens_q),
                SAGE_FIELD(cu_seqlens_k), SAGE_FIELD(batch), SAGE_FIELD(first_head), SAGE_FIELD(num_q_heads),
                SAGE_FIELD(num_kv_heads), SAGE_FIELD(q_heads_per_kv_head), SAGE_FIELD(seqlen_q), SAGE_FIELD(seqlen_kv),
                SAGE_FIELD(q_rows), SAGE_FIELD(columns), SAGE_FIELD(headdim), SAGE_FIELD(q_tiles), SAGE_FIELD(kv_tiles),
                SAGE_FIELD(dtype), SAGE_FIELD(num_heads), SAGE_FIELD(split_rows), SAGE_FIELD(splits),
                SAGE_FIELD(window_left), SAGE_FIELD(window_right), SAGE_FIELD(sinks), SAGE_FIELD(tile_lists),
                SAGE_FIELD(tile_counts), SAGE_FIELD(key_bits), SAGE_FIELD(mask_of_batch), SAGE_FIELD(mask_of_head),
                SAGE_FIELD(returns_lse), SAGE_FIELD(unused));
}

// For the attention of a call whose keys are split. A split's rows: [batch][num_q_heads][q_rows], of sequences without
// [batch]; split_rows in all.
struct MergeParams {
  const float* partial_out;  // [splits][split_rows][partial_headdim]
  const float* partial_lse;  // [splits][split_rows], natural log; -inf where the row sees no key or sink of the split
  Tensor out;                // as AttnParams of a call whose keys are not split
  float* lse;                // likewise
  const i32* cu_seqlens_q;   // as AttnParams
  i32 batch;
  FastDivmod num_q_heads;
  i32 seqlen_q;
  i32 q_rows;
  i32 headdim;
  i32 partial_headdim;  // headdim, rounded up to whole 16-byte vectors
  FastDivmod splits;
  i32 split_rows;
  FastDivmod row_blocks;  // of the launch's blocks, those of a query head
  Dtype dtype;
};

constexpr auto fields_of(const MergeParams*) {
  using Params = MergeParams;
  return fields(SAGE_STRUCT(MergeParams), SAGE_FIELD(partial_out), SAGE_FIELD(partial_lse), SAGE_FIELD(out),
                SAGE_FIELD(lse), SAGE_FIELD(cu_seqlens_q), SAGE_FIELD(batch), SAGE_FIELD(num_q_heads),
                SAGE_FIELD(seqlen_q), SAGE_FIELD(q_rows), SAGE_FIELD(headdim), SAGE_FIELD(partial_headdim),
                SAGE_FIELD(splits), SAGE_FIELD(split_rows), SAGE_FIELD(row_blocks), SAGE_FIELD(dtype));
}

}  // namespace sage
