// The struct of the backward kernels, of a call whose Q and K the forward pass quantized; as params.cuh has the others.
#pragma once

#include "sage/params.cuh"

namespace sage {

struct BwdParams {
  Tensor grad_out, out, v;        // like q and v of the forward pass, of rows as bwd/half_rows.cuh says
  Tensor grad_q, grad_k, grad_v;  // to be written
  const u8* q_hat;                // as QuantParams
  const float* q_scale;           // likewise
  const u8* k_hat;   // [batch * num_kv_heads] tiles of K̂ of the forward pass, each with its KvLine behind it
  const float* lse;  // as AttnParams, of the smoothed K: no row_bias is in it
  u8* q_side;        // [batch * num_q_heads][q_side_tiles] sides of Q and dO, bwd/tile.cuh
  u8* kv_side;       // [batch * num_kv_heads][kv_side_tiles] sides of K and V
  float* q_sums;     // [batch * num_q_heads][q_side_tiles] sums of dQ, bwd/wgmma/sums_q.cuh
  u32* q_counts;     // how many blocks have added to the sums of a tile; null: no sums
  FastDivmod num_q_heads;
  FastDivmod num_kv_heads;
  FastDivmod q_heads_per_kv_head;
  i32 seqlen_q;
  i32 seqlen_kv;
  i32 headdim;
  FastDivmod q_side_tiles;        // tiles of kTileRows queries in the tiles of the forward pass, of a head
  FastDivmod kv_side_tiles;       // likewise of keys
  i32 log2_parts_of_kv_tile;      // of how many tiles of kTileRows keys a KV tile of the forward pass has
  FastDivmod q_blocks;            // of bwdq, of a head
  FastDivmod kv_blocks_of_head;   // of bwdkv and bwdqkv
  FastDivmod heads_side_by_side;  // KV heads whose blocks come in turn in bwdqkv, KeyBlock
  i32 q_side_blocks;              // blocks of bwdprep for Q and dO; those for K and V follow
  float softmax_scale;
  i32 is_causal;            // which keys a row sees
  i32 block_m;              // query rows of a tile of Q̂
  i32 kv_heads;             // of all batch entries
  i32 unused;               // fills a gap, as in PackParams
  const i32* key_rank;      // as PackParams; null: no key mask
  const i32* key_index;     // likewise
  const i32* cu_seqlens_q;  // as AttnParams
  const i32* cu_seqlens_k;
  i32 batch;
  i32 q_rows;  // as AttnParams
};

constexpr auto fields_of(const BwdParams*) {
  using Params = BwdParams;
  return fields(SAGE_STRUCT(BwdParams), SAGE_FIELD(grad_out), SAGE_FIELD(out), SAGE_FIELD(v), SAGE_FIELD(grad_q),
                SAGE_FIELD(grad_k), SAGE_FIELD(grad_v), SAGE_FIELD(q_hat), SAGE_FIELD(q_scale), SAGE_FIELD(k_hat),
                SAGE_FIELD(lse), SAGE_FIELD(q_side), SAGE_FIELD(kv_side), SAGE_FIELD(q_sums), SAGE_FIELD(q_counts),
                SAGE_FIELD(num_q_heads), SAGE_FIELD(num_kv_heads), SAGE_FIELD(q_heads_per_kv_head),
                SAGE_FIELD(seqlen_q), SAGE_FIELD(seqlen_kv), SAGE_FIELD(headdim), SAGE_FIELD(q_side_tiles),
                SAGE_FIELD(kv_side_tiles), SAGE_FIELD(log2_parts_of_kv_tile), SAGE_FIELD(q_blocks),
                SAGE_FIELD(kv_blocks_of_head), SAGE_FIELD(heads_side_by_side), SAGE_FIELD(q_side_blocks),
                SAGE_FIELD(softmax_scale), SAGE_FIELD(is_causal), SAGE_FIELD(block_m), SAGE_FIELD(kv_heads),
                SAGE_FIELD(unused), SAGE_FIELD(key_rank), SAGE_FIELD(key_index), SAGE_FIELD(cu_seqlens_q),
                SAGE_FIELD(cu_seqlens_k), SAGE_FIELD(batch), SAGE_FIELD(q_rows));
}

}  // namespace sage
