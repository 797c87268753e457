// Lists of the KV tiles that query tiles see, by a window, a boolean mask, a mask of blocks and a key mask together:
// problem/sparse_mask.cuh. A block makes the list of a query tile. Its warps classify KV tiles, one each at a time, and
// store a bit for each query and key of those that are seen in part; its first warp then lists a round of them in order.
#pragma once

#include "sage/params.cuh"
#include "sage/problem/sparse_mask.cuh"
#include "sage/ptx/special.cuh"
#include "sage/ptx/warp.cuh"

namespace sage {

// Config: kThreads.
template <class Config>
struct TileLists {
  static constexpr i32 kWarps = Config::kThreads / kWarpSize;
  static constexpr i32 kRound = 1024;  // KV tiles of a round
  static_assert(kRound % kWarpSize == 0);

  enum State : u8 { kNone, kPart, kWhole };  // of the keys of a KV tile, how many the query tile's rows see

  struct Shared {
    State states[kRound];
  };

  // Figures for the host: to launch the kernel.
  static constexpr auto facts() {
    return sage::facts(Fact{"threads", Config::kThreads}, Fact{"shared_bytes", 0}, Fact{"mask_block", kMaskBlock});
  }

  const ListsParams& params;
  Shared& shared;

  // blockIdx.x: query tiles fastest, then the heads of masks, then their batch entries.
  __device__ __forceinline__ void run() const {
    const i32 index = ptx::block_index(), warp = ptx::thread_index() / kWarpSize;
    const i32 mask = index / params.q_tiles;
    const Rows rows(params, mask, index % params.q_tiles);
    u16* list = params.tile_lists + static_cast<i64>(index) * params.kv_tiles;
    i32 whole = 0, parts = 0;
#pragma unroll 1
    for (i32 first = 0; first < params.kv_tiles; first += kRound) {
      const i32 tiles = min(kRound, params.kv_tiles - first);
#pragma unroll 1
      for (i32 i = warp; i < tiles; i += kWarps) {
        const State state = classify(rows, mask, first + i);
        if (lane() == 0) shared.states[i] = state;
      }
      __syncthreads();
      if (warp == 0) append(list, first, tiles, whole, parts);
      __syncthreads();  // the states have been read
    }
    if (ptx::thread_index() == 0) {
      params.tile_counts[2 * index] = whole + parts;
      params.tile_counts[2 * index + 1] = whole;
    }
  }

 private:
  __device__ __forceinline__ static i32 lane() { return ptx::thread_index() % kWarpSize; }

  // As visible_keys() asks for lengths: batch entries are equally long.
  struct Lengths {
    const ListsParams& params;

    __device__ __forceinline__ i32 q() const { return params.seqlen_q; }
    __device__ __forceinline__ i32 kv_of_caller() const { return params.seqlen_kv; }
    template <bool kBranch = false>
    __device__ __forceinline__ i32 kv() const {
      return params.seqlen_kv;
    }
    template <bool kBranch = false>
    __device__ __forceinline__ i32 packed(i32 first_keys) const {
      return first_keys;
    }
  };

  // The rows of a query tile, and where its masks begin; null: no such mask.
  struct Rows {
    i32 first, end;
    const u8 *elements, *blocks, *keys;

    __device__ __forceinline__ Rows(const ListsParams& params, i32 mask, i32 q_tile)
        : first(q_tile * params.block_m), end(min(first + params.block_m, params.seqlen_q)) {
      const i32 batch = mask / params.mask_heads, head = mask % params.mask_heads;
      elements = begin(params.attn_mask, batch, head);
      blocks = begin(params.block_mask, batch, head);
      keys = begin(params.key_mask, batch, head);
    }

   private:
    __device__ __forceinline__ static const u8* begin(const Tensor& mask, i32 batch, i32 head) {
      if (mask.data == nullptr) return nullptr;
      return static_cast<const u8*>(mask.data) + batch * mask.stride.batch + head * mask.stride.head;
    }
  };

  // Call with a warp.
  __device__ __forceinline__ State classify(const Rows& rows, i32 mask, i32 tile) const {
    const Lengths lengths{params};
    const i32 first_key = tile * params.block_n, end_key = first_key + params.block_n;
    const KeyInterval first = visible_keys<Mask::kSparse>(lengths, rows.first);
    const KeyInterval last = visible_keys<Mask::kSparse>(lengths, rows.end - 1);
    if (first.begin >= end_key || last.end <= first_key) return kNone;
    const bool within = last.begin <= first_key && first.end >= end_key;  // whether every row's window has the tile
    const State of_blocks = rows.blocks == nullptr ? kWhole : state_of_blocks(rows, first_key, end_key);
    if (of_blocks == kNone) return kNone;
    if (params.key_bits == nullptr) return within && of_blocks == kWhole ? kWhole : kPart;
    bool any = false, all = true;
#pragma unroll 1
    for (i32 row = rows.first; row < rows.end; ++row) {
      const KeyInterval window = visible_keys<Mask::kSparse>(lengths, row);
#pragma unroll 1
      for (i32 key = first_key; key < min(end_key, params.seqlen_kv); key += kWarpSize) {
        const u32 word = ptx::ballot(sees(rows, row, key + lane()));
        if (lane() == 0) bits_of(mask, row)[key / kWarpSize] = word;
        const bool blocked = rows.blocks != nullptr && block_at(rows, row, key) == 0;
        any |= !blocked && (word & window.from(key).word()) != 0;
        all &= word == ~0u;
      }
    }
    if (!any) return kNone;
    return within && of_blocks == kWhole && all ? kWhole : kPart;
  }

  // Whether the element and the key mask let the row see the key.
  __device__ __forceinline__ bool sees(const Rows& rows, i32 row, i32 key) const {
    if (key >= params.seqlen_kv) return false;
    return (rows.elements == nullptr || rows.elements[row * params.attn_mask.stride.row + key] != 0) &&
           (rows.keys == nullptr || rows.keys[key * params.key_mask.stride.row] != 0);
  }

  __device__ __forceinline__ u32* bits_of(i32 mask, i32 row) const {
    return params.key_bits + (static_cast<i64>(mask) * params.seqlen_q + row) * ceil_div(params.seqlen_kv, kWarpSize);
  }

  __device__ __forceinline__ u8 block_at(const Rows& rows, i32 row, i32 key) const {
    return rows.blocks[row / kMaskBlock * params.block_mask.stride.row + key / kMaskBlock];
  }

  __device__ __forceinline__ State state_of_blocks(const Rows& rows, i32 first_key, i32 end_key) const {
    bool any = false, all = true;
#pragma unroll 1
    for (i32 row = rows.first; row < rows.end; row += kMaskBlock) {
#pragma unroll 1
      for (i32 key = first_key; key < min(end_key, params.seqlen_kv); key += kMaskBlock) {
        const bool seen = block_at(rows, row, key) != 0;
        any |= seen;
        all &= seen;
      }
    }
    return !any ? kNone : all ? kWhole : kPart;
  }

  // Appends the KV tiles of a round to both lists. Call with a warp.
  __device__ __forceinline__ void append(u16* list, i32 first, i32 tiles, i32& whole, i32& parts) const {
#pragma unroll 1
    for (i32 i = lane(); i - lane() < tiles; i += kWarpSize) {
      const State state = i < tiles ? shared.states[i] : kNone;
      const u32 of_whole = ptx::ballot(state == kWhole), of_parts = ptx::ballot(state == kPart);
      const u32 before = (1u << lane()) - 1;
      if (state == kWhole) list[whole + ptx::popcount(of_whole & before)] = static_cast<u16>(first + i);
      if (state == kPart) {
        list[params.kv_tiles - 1 - (parts + ptx::popcount(of_parts & before))] = static_cast<u16>(first + i);
      }
      whole += ptx::popcount(of_whole);
      parts += ptx::popcount(of_parts);
    }
  }
};

}  // namespace sage
