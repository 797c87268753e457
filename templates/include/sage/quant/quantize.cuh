// Quantization of Q, K and V in one launch, or of K and V in one and of Q in another, into the tiles of
// tile/layout.cuh: all that comes before attention but delta_s. A launch in front of that of K and V finds their
// statistics (quant/statistics.cuh). Every tensor is read from memory once, but for 64 rows of each that the
// statistics take, and rows of Q and K that are smoothed, balanced, rotated or clipped, which are loaded two or three
// times; these loads hit caches. Values that are not finite are quantized as zero, in V̂ as minus zero, so that they do
// not change a scale that others share. The attention kernel writes NaN to the rows that see such a key or value, as
// the marks of the KV tile say (attn/spoilt.cuh), and to rows whose row_bias is not finite.
#pragma once

#include "sage/ptx/grid_dependency.cuh"
#include "sage/quant/quantize_k.cuh"
#include "sage/quant/quantize_q.cuh"
#include "sage/quant/quantize_v.cuh"
#include "sage/quant/statistics.cuh"

namespace sage {

// Config: kHeadDim, kQk, kPv, kBlockM, kOtherBlockM, kBlockN, kWarpM, kKeyNorms, kThreads,
// kProgrammatic.
template <class Config>
struct Quantize {
  using Block = QuantBlock<Config>;
  using Layout = typename Block::Layout;
  using Shared = typename Block::Shared;

  // Figures for the host: to launch the kernel, to lay out what it writes, and to emulate it.
  static constexpr auto facts() {
    return sage::facts(
        Fact{"threads", Config::kThreads}, Fact{"shared_bytes", 0}, Fact{"kv_tiles_per_block", Block::kTiles},
        Fact{"rows_at_once", SampleLayout<Config>::kRowsAtOnce}, Fact{"vector", kVector},
        Fact{"q_row_bytes", Layout::kQBytes / Config::kBlockM}, Fact{"kv_tile_bytes", Layout::kKvBytes},
        Fact{"row_groups", kRowGroups<Config>}, Fact{"key_groups", kKeyGroups},
        Fact{"warps_per_key_group", Block::kWarpsPerGroup}, Fact{"v_tiles_at_once", Block::kTilesOfV},
        Fact{"v_squares", SelectPiece<Config>::Type::kSteps}, Fact{"limit", QuantizedRows<Config>::kLimit},
        Fact{"clips", kClips<Config>}, Fact{"clip_step", ClipSearch<Config>::kStep},
        Fact{"clip_error_bias", ClipSearch<Config>::kErrorBias}, Fact{"smallest_abs_max", kSmallestAbsMax},
        Fact{"samples", kSamples}, Fact{"largest_mean", kLargestMean}, Fact{"rounding_of_mean", kRoundingOfMean},
        Fact{"most_balance", kMostBalance}, Fact{"least_keys", kLeastKeys},
        Fact{"programmatic_launch", Config::kProgrammatic});
  }

  const QuantParams& params;
  Shared& shared;

  // blockIdx.x: KV heads from the last to the first; within a KV head the tiles of K, of V, and of Q of all its query
  // heads. Attention begins with the first heads, whose tiles are then in L2.
  template <SourceRows kSource>
  __device__ __forceinline__ void run() const {
    if constexpr (Config::kProgrammatic) ptx::grid_dependency_wait();
    ptx::launch_dependents();
    if (blockIdx.x == 0 && threadIdx.x == 0) *params.tile_counter = 0;
    const bool sequences = params.cu_seqlens_k != nullptr;
    const i32 index = ptx::block_index(), block = index % params.blocks_per_kv_head, v_block = block - params.kv_blocks;
    const i32 entry_and_head = params.batch * params.num_kv_heads - 1 - index / params.blocks_per_kv_head;
    i32 batch = entry_and_head / params.num_kv_heads;  // of sequences found below
    const i32 head = entry_and_head % params.num_kv_heads, q_block = v_block - params.kv_blocks;
    if (q_block < 0) {
      i32 own = v_block < 0 ? block : v_block;  // of the batch entry's blocks for K, or for V
      if (sequences) {
        constexpr i32 kBlockKeys = Block::kTiles * Config::kBlockN;
        batch = sequence_of_slot(params.cu_seqlens_k, params.batch, kBlockKeys, own);
        own -= first_slot(params.cu_seqlens_k, batch, kBlockKeys);
      }
      const i32 first_tile = own * Block::kTiles;
      if (v_block < 0) QuantizeK<Config>{params, shared}.template run<kSource>(batch, head, first_tile);
      else QuantizeV<Config>{params, shared}.template run<kSource>(batch, head, first_tile);
    } else if (Config::kOtherBlockM == Config::kBlockM || params.block_m == Config::kBlockM) {
      quantize_q<kSource, Config::kBlockM>(batch, head, q_block);
    } else {
      quantize_q<kSource, Config::kOtherBlockM>(batch, head, q_block);
    }
  }

 private:
  template <SourceRows kSource, i32 kBlockM>
  __device__ __forceinline__ void quantize_q(i32 batch, i32 kv_head, i32 q_block) const {
    const i32 q_head = kv_head * params.q_heads_per_kv_head + q_block / params.q_tiles;
    i32 tile = q_block % params.q_tiles;
    if (params.cu_seqlens_q != nullptr) {
      batch = sequence_of_slot(params.cu_seqlens_q, params.batch, kBlockM, tile);
      tile -= first_slot(params.cu_seqlens_q, batch, kBlockM);
    }
    QuantizeQ<Config, kBlockM>{params, shared}.template run<kSource>(batch, q_head, tile);
  }
};

}  // namespace sage
