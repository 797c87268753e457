// The choice of the blocks of keys that each block of queries sees. The score of a block of keys is the product of its
// mean and that of the queries. Chosen are those with the best scores: a share of all (kKeep), as many as have a share
// of the softmax's mass (kMass), or those above the mean of all scores by so many standard deviations (kTau). Some are
// kept in any case. A thread block scores and chooses for up to 16 query blocks of a head: the scores, of s8 products,
// lie in shared memory; then a warp chooses for a query block.
// Sources: SpargeAttention (arXiv:2502.18137), sections 3.2 and 3.3; for kTau Sol-Attn (arXiv:2607.24027).
#pragma once

#include "sage/numerics/arithmetic.cuh"
#include "sage/problem/sparse_mask.cuh"
#include "sage/ptx/mma.cuh"
#include "sage/ptx/special.cuh"
#include "sage/ptx/warp.cuh"
#include "sage/select/params.cuh"

namespace sage {

// Config: kHeadDim, kThreads.
template <class Config>
struct ChooseBlocks {
  static constexpr i32 kWarps = Config::kThreads / kWarpSize;
  static constexpr i32 kMostRows = 16;  // of a group: those of a product
  static constexpr i32 kColumns = 8;    // blocks of keys of a product
  static constexpr i32 kSteps = Config::kHeadDim / 32;
  static constexpr i32 kProducts = kSteps <= 4 ? 2 : 1;  // whose operands a warp loads at once
  static constexpr i32 kFloats = 8192;                   // of scores: 32 KB, which leave an SM six blocks and more
  static constexpr i32 kPitch = 4 * kWarpSize;           // a row has a multiple of these: vectors for a warp
  static constexpr u32 kHidden = 0, kKept = ~0u;  // instead of a score's key: of a block that is kept in any case

  // Figures for the host: to launch the kernel.
  static constexpr auto facts() {
    return sage::facts(Fact{"threads", Config::kThreads}, Fact{"shared_bytes", kFloats * 4},
                       Fact{"most_rows", kMostRows}, Fact{"floats", kFloats}, Fact{"pitch", kPitch},
                       Fact{"mask_block", kMaskBlock});
  }

  const ChooseParams& params;
  float* scores;  // shared: [group_rows][pitch]

  // blockIdx.x: groups of query blocks fastest, then query heads, then batch entries.
  __device__ __forceinline__ void run() const {
    const i32 index = ptx::block_index(), q_head = index / params.groups;
    const Group group(params, q_head, index % params.groups);
    score(group);
    __syncthreads();
#pragma unroll 1
    for (i32 row = ptx::thread_index() / kWarpSize; row < group.rows; row += kWarps) {
      choose(Row(params, group, row), scores + row * params.pitch);
    }
  }

 private:
  __device__ __forceinline__ static i32 lane() { return ptx::thread_index() % kWarpSize; }

  // The query blocks of a thread block, and where what is pooled of them and of their keys begins.
  struct Group {
    i32 first, rows;  // of the head's query blocks
    i64 q_index, k_index;
    i32 q_head;  // of all batch entries
    float amount;

    __device__ __forceinline__ Group(const ChooseParams& params, i32 q_head_, i32 group)
        : first(group * params.group_rows),
          rows(min(params.group_rows, params.q_block_count - first)),
          q_head(q_head_) {
      const i32 batch = q_head / params.num_q_heads, own = q_head % params.num_q_heads;
      const i32 kv_head = batch * params.num_kv_heads + own / params.q_heads_per_kv_head;
      q_index = static_cast<i64>(q_head) * params.q_block_count + first;
      k_index = static_cast<i64>(kv_head) * params.k_blocks;
      amount = params.amounts == nullptr ? params.amount : params.amounts[own];
    }
  };

  // A query block: which blocks of keys it sees, and which of them it keeps in any case.
  struct Row {
    i32 block;
    i32 visible;                // blocks of keys, of which the first are seen
    i32 first_end, last_begin;  // of those that every query keeps at both ends
    i32 near_begin, near_end;   // of those at the queries' own keys
    bool every;                 // keeps all of them
    float amount;
    const float* k_alike;
    u8* selected;

    __device__ __forceinline__ Row(const ChooseParams& params, const Group& group, i32 row)
        : block(group.first + row), amount(group.amount) {
      const i32 first_query = block * params.block_q;
      const i32 last_query = min(first_query + params.block_q, params.seqlen_q) - 1;
      const i32 own = params.seqlen_kv - params.seqlen_q;  // the key of query 0: masks are aligned bottom-right
      visible = params.k_blocks;
      if (params.choose_causal) visible = min(visible, ceil_div(max(last_query + own + 1, 0), params.block_k));
      first_end = max(params.first_kept, ceil_div(params.dense_first_keys, params.block_k));
      last_begin = params.k_blocks;
      if (params.dense_last_keys > 0) last_begin = max(params.seqlen_kv - params.dense_last_keys, 0) / params.block_k;
      near_begin = max(first_query + own, 0) / params.block_k - (params.near_kept - 1);
      near_end = last_query + own < 0 ? 0 : (last_query + own) / params.block_k + params.near_kept;
      if (params.near_kept == 0) near_end = near_begin = 0;
      every = first_query < params.dense_first_queries || last_query >= params.seqlen_q - params.dense_last_queries;
      if (params.q_alike != nullptr) every |= params.q_alike[group.q_index + row] < params.least_alike;
      k_alike = params.k_alike == nullptr ? nullptr : params.k_alike + group.k_index;
      const i32 bands = params.block_q / kMaskBlock, columns = params.block_k / kMaskBlock;
      selected = params.selected +
                 (static_cast<i64>(group.q_head) * params.q_block_count + block) * bands * params.k_blocks * columns;
    }

    __device__ __forceinline__ bool keeps(const ChooseParams& params, i32 column) const {
      return every || column < first_end || column >= last_begin || (column >= near_begin && column < near_end) ||
             (k_alike != nullptr && k_alike[column] < params.least_alike);
    }
  };

  // The scores of a group's query blocks, in log2 units, into shared memory.
  __device__ __forceinline__ void score(const Group& group) const {
    const i32 g = lane() / 4, t = lane() % 4;
    u32 q[kSteps][4];
    load_queries(group, g, t, q);
    float q_scale[2];
#pragma unroll
    for (i32 i = 0; i < 2; ++i) {
      const i32 row = g + 8 * i;
      q_scale[i] = row < group.rows ? params.q_scale[group.q_index + row] * params.softmax_scale_log2 : 0.0f;
    }
#pragma unroll kProducts
    for (i32 first = ptx::thread_index() / kWarpSize * kColumns; first < params.k_blocks; first += kWarps * kColumns) {
      const i32 column = min(first + g, params.k_blocks - 1);
      const u8* k = params.k_hat + (group.k_index + column) * Config::kHeadDim + 4 * t;
      const i32 zeros[4] = {};
      i32 sum[4];
#pragma unroll
      for (i32 s = 0; s < kSteps; ++s) {
        const u32 b0 = *reinterpret_cast<const u32*>(k + 32 * s), b1 = *reinterpret_cast<const u32*>(k + 32 * s + 16);
        ptx::mma_m16n8k32_s8s8s32(sum, q[s], b0, b1, ptx::chain(s, zeros, sum));
      }
#pragma unroll
      for (i32 i = 0; i < 4; ++i) {
        const i32 row = g + i / 2 * 8, at = first + 2 * t + i % 2;
        if (row < group.rows && at < params.k_blocks) {
          const float product = within_f32(static_cast<float>(sum[i]) * params.k_scale[group.k_index + at]);
          scores[row * params.pitch + at] = within_f32(product * q_scale[i / 2]);
        }
      }
    }
  }

  __device__ __forceinline__ void load_queries(const Group& group, i32 g, i32 t, u32 (&q)[kSteps][4]) const {
#pragma unroll
    for (i32 s = 0; s < kSteps; ++s) {
#pragma unroll
      for (i32 i = 0; i < 4; ++i) {
        const i32 row = g + i % 2 * 8;
        const u8* from = params.q_hat + (group.q_index + row) * Config::kHeadDim + 32 * s + 16 * (i / 2) + 4 * t;
        q[s][i] = row < group.rows ? *reinterpret_cast<const u32*>(from) : 0;
      }
    }
  }

  // Call with a warp.
  __device__ __forceinline__ void choose(const Row& row, float* score) const {
    const Statistics all(params, row, score);
    const float kept = replace_by_keys(row, score, all.highest);
    const u32* keys = reinterpret_cast<const u32*>(score);
    u32 least = kKept;       // of the keys that are chosen
    i32 ties = row.visible;  // of those equal to it, the first
    if (params.choose_by == ChooseBy::kKeep) {
      const i32 wanted = max(1, static_cast<i32>(ceilf(row.amount * static_cast<float>(row.visible))));
      least = search(row, keys, [&](u32 key) { return count(keys, key) - wanted; });
      ties = wanted - count(keys, least + 1);  // none, where as many are kept
    } else if (params.choose_by == ChooseBy::kMass) {
      const float wanted = row.amount * all.mass - kept;
      if (wanted > 0.0f) {
        least = search(row, keys, [&](u32 key) { return mass(row, keys, key, all.highest) >= wanted ? 1 : -1; });
      }
    } else {
      least = key_of(fminf(all.mean + row.amount * all.deviation, all.highest));
    }
    store(row, keys, least, ties);
  }

  // Of the scores of all blocks of keys that a row sees.
  struct Statistics {
    float highest, mass, mean, deviation;

    __device__ __forceinline__ Statistics(const ChooseParams& params, const Row& row, const float* score)
        : highest(-ptx::infinity()), mass(0.0f), mean(0.0f), deviation(0.0f) {
      if (params.choose_by == ChooseBy::kKeep) return;
      float sum = 0.0f, squares = 0.0f;
      for (i32 i = lane(); i < row.visible; i += kWarpSize) highest = fmaxf(highest, score[i]), sum += score[i];
      highest = ptx::max_over_lanes<kWarpSize>(highest);
      mean = ptx::sum_over_lanes<kWarpSize>(sum) / static_cast<float>(max(row.visible, 1));
      for (i32 i = lane(); i < row.visible; i += kWarpSize) {
        mass += weight(params, i, score[i], highest);
        squares = fmaf(score[i] - mean, score[i] - mean, squares);
      }
      mass = ptx::sum_over_lanes<kWarpSize>(mass);
      deviation = ptx::sqrt(ptx::sum_over_lanes<kWarpSize>(squares) / static_cast<float>(max(row.visible, 1)));
    }
  };

  // The mass of a block of keys: as many times 2^score as it has keys.
  __device__ __forceinline__ static float weight(const ChooseParams& params, i32 column, float score, float highest) {
    const i32 keys = min(params.block_k, params.seqlen_kv - column * params.block_k);
    return static_cast<float>(keys) * ptx::ex2(score - highest);
  }

  // Writes keys over the scores: unsigned integers of the same order, kHidden below and kKept above all. Returns
  // the mass of the blocks that are kept, where masses decide.
  __device__ __forceinline__ float replace_by_keys(const Row& row, float* score, float highest) const {
    float kept = 0.0f;
#pragma unroll 1
    for (i32 i = lane(); i < params.pitch; i += kWarpSize) {
      u32 key = kHidden;
      if (i < row.visible) {
        const bool keeps = row.keeps(params, i);
        if (keeps && params.choose_by == ChooseBy::kMass) kept += weight(params, i, score[i], highest);
        key = keeps ? kKept : key_of(score[i]);
      }
      score[i] = __uint_as_float(key);
    }
    __syncwarp();
    return ptx::sum_over_lanes<kWarpSize>(kept);
  }

  __device__ __forceinline__ static u32 key_of(float score) {
    const u32 bits = __float_as_uint(score + 0.0f);  // of zeros, one
    return bits ^ (bits >> 31 ? 0xffffffff : 0x80000000);
  }
  __device__ __forceinline__ static float score_of(u32 key) {
    return __uint_as_float(key ^ (key >> 31 ? 0x80000000 : 0xffffffff));
  }

  // The largest key of which surplus() is not negative, or the least that there may be; any key of which it is zero
  // will do. The scores of two bounds are halved, since keys of scores around zero lie far apart.
  template <class Surplus>
  __device__ __forceinline__ u32 search(const Row& row, const u32* keys, Surplus surplus) const {
    u32 low = kKept, high = kHidden;
    for (i32 i = lane(); i < row.visible; i += kWarpSize) {
      if (keys[i] != kKept) low = min(low, keys[i]), high = max(high, keys[i]);
    }
#pragma unroll
    for (i32 mask = kWarpSize / 2; mask > 0; mask /= 2) {
      low = min(low, ptx::shuffle_xor(low, mask)), high = max(high, ptx::shuffle_xor(high, mask));
    }
#pragma unroll 1
    while (low < high) {
      u32 middle = key_of(0.5f * score_of(low) + 0.5f * score_of(high));
      if (middle <= low || middle > high) middle = low + (high - low + 1) / 2;
      const i32 found = surplus(middle);
      if (found == 0) return middle;
      if (found > 0) low = middle;
      else high = middle - 1;
    }
    return low;
  }

  // How many keys there are from `least` on, which is above kHidden.
  __device__ __forceinline__ i32 count(const u32* keys, u32 least) const {
    u32 found = 0;
#pragma unroll 4
    for (i32 i = 4 * lane(); i < params.pitch; i += kPitch) {
      const Four four = *reinterpret_cast<const Four*>(keys + i);
      found += (four.x >= least) + (four.y >= least) + (four.z >= least) + (four.w >= least);
    }
    return static_cast<i32>(ptx::sum_over_lanes<kWarpSize>(found));
  }
  struct alignas(16) Four {
    u32 x, y, z, w;
  };

  // The mass of the blocks whose keys are `least` or more, but for those that are kept.
  __device__ __forceinline__ float mass(const Row& row, const u32* keys, u32 least, float highest) const {
    float found = 0.0f;
#pragma unroll 1
    for (i32 i = lane(); i < row.visible; i += kWarpSize) {
      if (keys[i] >= least && keys[i] != kKept) found += weight(params, i, score_of(keys[i]), highest);
    }
    return ptx::sum_over_lanes<kWarpSize>(found);
  }

  // Stores which blocks are seen: those that are kept, those whose keys are above `least`, and of those that equal it
  // the first.
  __device__ __forceinline__ void store(const Row& row, const u32* keys, u32 least, i32 ties) const {
    i32 before = 0;  // ties in front of these blocks
#pragma unroll 1
    for (i32 first = 0; first < params.k_blocks; first += kWarpSize) {
      const i32 i = first + lane();
      const u32 key = keys[i], tied = ptx::ballot(key == least);
      const i32 rank = before + ptx::popcount(tied & ((1u << lane()) - 1));
      if (i < params.k_blocks) mark(row, i, key == kKept || key > least || (key == least && rank < ties));
      before += ptx::popcount(tied);
    }
  }

  // Stores whether a query block sees a block of keys.
  __device__ __forceinline__ void mark(const Row& row, i32 column, bool seen) const {
    const i32 bands = params.block_q / kMaskBlock, columns = params.block_k / kMaskBlock;
    const i64 pitch = static_cast<i64>(params.k_blocks) * columns;
    u8* to = row.selected + column * columns;
#pragma unroll 1
    for (i32 b = 0; b < bands; ++b, to += pitch) {
      if (columns == 2) {
        *reinterpret_cast<u16*>(to) = seen ? 0x0101 : 0;
      } else {
#pragma unroll 1
        for (i32 c = 0; c < columns; ++c) to[c] = seen;
      }
    }
  }
};

}  // namespace sage
