// delta_s, the term of the scores that smoothing Q takes off: per query tile and key, delta_s = q_mean · (k − k̄), the
// mean of the tile's rows, in log2 units, times the smoothed key. K is the caller's: the quantized K would put back the
// error that smoothing removes. delta_s is a matrix product of [q_tiles][headdim] and [keys][headdim] per query head,
// in f32, 64 x 64 values a block.
// Source: SageAttention2, section 3.1.
#pragma once

#include "sage/numerics/arithmetic.cuh"
#include "sage/problem/heads.cuh"
#include "sage/problem/kv_range.cuh"
#include "sage/ptx/special.cuh"
#include "sage/quant/params.cuh"
#include "sage/quant/source.cuh"
#include "sage/tile/address.cuh"

namespace sage {

// Config: kHeadDim, kThreads.
template <class Config>
struct DeltaS {
  static constexpr i32 kTile = 64;          // query tiles, and keys, of a block
  static constexpr i32 kDepth = 32;         // channels in shared memory at once
  static constexpr i32 kEdge = 4;           // each thread: 4 query tiles by 4 keys
  static constexpr i32 kPitch = kTile + 4;  // words of a row in shared memory; rows stay aligned to 16 bytes
  static constexpr i32 kVectors = kDepth / kVector;
  static_assert(Config::kThreads == kTile * kTile / (kEdge * kEdge));
  static_assert(Config::kThreads == kTile * kVectors, "a thread loads one vector of each operand");

  // Figures for the host: to launch the kernel.
  static constexpr auto facts() {
    return sage::facts(Fact{"threads", Config::kThreads}, Fact{"shared_bytes", 0}, Fact{"tile", kTile});
  }

  // Channel by channel, so that a thread's four values are neighbours.
  struct Operands {
    float q[kDepth][kPitch];
    float k[kDepth][kPitch];
  };

  const DeltaParams& params;
  Operands& operands;  // shared

  // blockIdx.x: keys fastest, then query tiles, then query heads.
  template <SourceRows kSource>
  __device__ __forceinline__ void run() const {
    const bool sequences = params.cu_seqlens_q != nullptr;
    const i32 block_rows = kTile * params.block_m;
    const i32 index = ptx::block_index(), tiles_and_head = index / params.key_blocks;
    const i32 first_key = index % params.key_blocks * kTile;
    i32 tile_block = tiles_and_head % params.tile_blocks;  // of the batch entry
    const i32 entry_and_head = params.first_head + tiles_and_head / params.tile_blocks;
    i32 batch = entry_and_head / params.num_q_heads;
    const i32 q_head = entry_and_head % params.num_q_heads;
    if (sequences) {
      batch = sequence_of_slot(params.cu_seqlens_q, params.batch, block_rows, tile_block);
      tile_block -= first_slot(params.cu_seqlens_q, batch, block_rows);
    }
    const auto seqlen = seqlen_of(params, batch);
    const i32 first_tile = tile_block * kTile, tiles = ceil_div(seqlen.q(), params.block_m);
    if (first_tile >= tiles || !visible(batch, first_tile, first_key)) return;
    const i32 kv_head = q_head / params.q_heads_per_kv_head;
    const Source<kSource> source(params.k, batch, kv_head, seqlen.kv_begin(), seqlen.kv(), params.headdim, params.dtype,
                                 key_index_of(params, batch));
    // Indices of the batch entry's first query tile: in q_mean, among those of all heads; in delta_s, of the launch's.
    const i64 first_of_all = first_q_tile_of(params, batch, q_head, params.block_m);
    const i64 first_of_launch = first_of_all - static_cast<i64>(params.first_head) * params.q_tiles;
    const float* q_mean = params.q_mean + first_of_all * Config::kHeadDim;
    const float* k_mean = params.k_mean + channel_index<Config>(batch * params.num_kv_heads + kv_head);

    const i32 row = threadIdx.x / kTile * kVector, column = threadIdx.x % kTile;  // of the operands: channel, and which
    const i32 tile = threadIdx.x / (kTile / kEdge) * kEdge, key = threadIdx.x % (kTile / kEdge) * kEdge;
    const bool computes = first_tile + tile < tiles;  // few calls have 64 query tiles
    float sum[kEdge][kEdge] = {};
    for (i32 depth = 0; depth < Config::kHeadDim; depth += kDepth) {
      float x[kVector];
      source.convert(source.load(first_key + column, depth + row), x);
      __syncthreads();  // the products of the channels before are done
#pragma unroll
      for (i32 i = 0; i < kVector; ++i) {
        const i32 c = depth + row + i;
        operands.k[row + i][column] = finite_or_zero(x[i] - k_mean[c]);
        operands.q[row + i][column] =
            first_tile + column < tiles ? q_mean[(first_tile + column) * Config::kHeadDim + c] : 0.0f;
      }
      __syncthreads();
      if (!computes) continue;
#pragma unroll
      for (i32 d = 0; d < kDepth; ++d) {
#pragma unroll
        for (i32 i = 0; i < kEdge; ++i) {
#pragma unroll
          for (i32 j = 0; j < kEdge; ++j) sum[i][j] = fmaf(operands.q[d][tile + i], operands.k[d][key + j], sum[i][j]);
        }
      }
    }
#pragma unroll
    for (i32 i = 0; i < kEdge; ++i) {
      if (first_tile + tile + i >= tiles) break;
      float* out = params.delta_s + (first_of_launch + first_tile + tile + i) * params.columns;
#pragma unroll
      for (i32 j = 0; j < kEdge; ++j) {
        if (first_key + key + j < params.columns) out[first_key + key + j] = clamped_term(sum[i][j]);
      }
    }
  }

  // Whether any row of these query tiles sees anything of the KV tiles of these keys.
  __device__ __forceinline__ bool visible(i32 batch, i32 first_tile, i32 first_key) const {
    const auto seqlen = seqlen_of(params, batch);
    const i32 last_row = min((first_tile + kTile) * params.block_m, seqlen.q()) - 1;
    const i32 first_column = first_key / params.block_n * params.block_n;
    const i32 end_column = ceil_div(first_key + kTile, params.block_n) * params.block_n;
    const i32 first_row = first_tile * params.block_m;
    return rows_see(seqlen, first_row, last_row, first_column, end_column);
  }
};

}  // namespace sage
