// The structs that the host passes by value, one per kind of kernel.
// sage_aot/_params.py packs them; a unit test compares its offsets with the assertions below.
// Strides are in elements. Layouts in brackets are contiguous, outermost index first; "tile" layouts are explained in
// tile/layout.cuh. `headdim` is the caller's, kHeadDim the kernel's: channels from headdim on are zeros.
#pragma once

#include "sage/types.cuh"

// The run-time compiler has no <stddef.h>; this is what its front end makes of offsetof.
#ifdef __CUDACC_RTC__
#define SAGE_OFFSET(type, member) __INTADDR__(&((type*)0)->member)
#else
#define SAGE_OFFSET(type, member) __builtin_offsetof(type, member)
#endif

namespace sage {

struct Strides {
  i64 batch, head, row;
};

// One tensor of the caller's: [batch, heads, rows, headdim] in any order but the last.
struct Tensor {
  void* data;  // f16 or bf16
  Strides stride;
};

// Statistics over the sequence, in `num_chunks` parts of `chunk_rows` keys that quantization adds up.
struct StatsParams {
  Tensor k, v;
  float* k_sum;     // [batch * num_kv_heads][num_chunks][kHeadDim], sum of K
  float* v_absmax;  // [batch * num_kv_heads][num_chunks][kHeadDim], largest |V|
  i32 num_kv_heads;
  i32 seqlen_kv;
  i32 headdim;
  i32 chunk_rows;
  i32 num_chunks;
  Dtype dtype;
  i32 aligned;   // every row of k and v starts at a multiple of 16 bytes
  i32 smooth_k;  // 0: no block is launched for K
};
static_assert(sizeof(StatsParams) == 112);
static_assert(SAGE_OFFSET(StatsParams, k_sum) == 64);
static_assert(SAGE_OFFSET(StatsParams, num_kv_heads) == 80);
static_assert(SAGE_OFFSET(StatsParams, smooth_k) == 108);

struct QuantParams {
  Tensor q, k, v;
  const float* k_sum;     // as written by the statistics kernel
  const float* v_absmax;  // likewise
  u8* q_hat;              // [batch * num_q_heads][q_tiles] tiles of block_m rows
  u8* k_hat;              // [batch * num_kv_heads][kv_tiles] tiles of block_n keys
  u8* v_hat;              // [batch * num_kv_heads][kv_tiles] tiles of block_n keys
  float* q_scale;         // [batch * num_q_heads][q_tiles][block_m / warp_m][8], times softmax_scale · log2 e
  float* v_scale;         // [batch * num_kv_heads][kHeadDim]
  float* row_bias;        // [batch * num_q_heads][q_tiles * block_m], log2 units: what smoothing K took off a row's scores
  i32 batch;
  i32 num_q_heads;
  i32 num_kv_heads;
  i32 seqlen_q;
  i32 seqlen_kv;
  i32 headdim;
  i32 q_tiles;
  i32 kv_tiles;
  i32 num_chunks;
  float softmax_scale_log2;  // softmax scale times log2 e
  Dtype dtype;
  i32 aligned;   // every row of q, k and v starts at a multiple of 16 bytes
  i32 smooth_k;  // 0: k_sum is not read, the mean of K counts as zero
  i32 padding;
};
static_assert(sizeof(QuantParams) == 216);
static_assert(SAGE_OFFSET(QuantParams, k_sum) == 96);
static_assert(SAGE_OFFSET(QuantParams, q_scale) == 136);
static_assert(SAGE_OFFSET(QuantParams, batch) == 160);
static_assert(SAGE_OFFSET(QuantParams, softmax_scale_log2) == 196);

struct AttnParams {
  const u8* q_hat;        // these six as QuantParams
  const u8* k_hat;
  const u8* v_hat;
  const float* q_scale;
  const float* v_scale;
  const float* row_bias;
  Tensor out;             // like q
  float* lse;             // [batch][num_q_heads][seqlen_q], natural log; null: not wanted
  i32 num_q_heads;
  i32 num_kv_heads;
  i32 seqlen_q;
  i32 seqlen_kv;
  i32 headdim;
  i32 q_tiles;
  i32 kv_tiles;
  Dtype dtype;
};
static_assert(sizeof(AttnParams) == 120);
static_assert(SAGE_OFFSET(AttnParams, out) == 48);
static_assert(SAGE_OFFSET(AttnParams, lse) == 80);
static_assert(SAGE_OFFSET(AttnParams, num_q_heads) == 88);

}  // namespace sage
