// Lists of the KV tiles that query tiles see, by a window, a boolean mask, a mask of blocks and a key mask together:
// problem/sparse_mask.cuh. A block makes the list of a query tile, a round of KV tiles at a time. A thread looks at a
// KV tile; where elements decide, a warp does, and stores a bit for each query and key. The first warp then lists the
// round in order.
#pragma once

#include "sage/params.cuh"
#include "sage/problem/sparse_mask.cuh"
#include "sage/ptx/global.cuh"
#include "sage/ptx/special.cuh"
#include "sage/ptx/warp.cuh"

namespace sage {

// Config: kThreads.
template <class Config>
struct TileLists {
  static constexpr i32 kWarps = Config::kThreads / kWarpSize;
  static constexpr i32 kRound = 1024;  // KV tiles of a round
  static constexpr i32 kChunk = 16;    // keys of a row that a lane reads at once
  static constexpr i32 kInFlight = 2;  // such reads of a lane
  static_assert(kRound % kWarpSize == 0);

  static constexpr u32 kPart = 1u << 30, kWhole = 1u << 31;  // beside an entry that is to be listed

  struct Shared {
    u32 entries[kRound];
  };

  // Figures for the host: to launch the kernel.
  static constexpr auto facts() {
    return sage::facts(Fact{"threads", Config::kThreads}, Fact{"shared_bytes", 0}, Fact{"mask_block", kMaskBlock},
                       Fact{"most_tiles", TileEntry::kMostTiles});
  }

  const ListsParams& params;
  Shared& shared;

  // blockIdx.x: query tiles fastest, then the heads of masks, then their batch entries.
  __device__ __forceinline__ void run() const {
    const i32 index = ptx::block_index(), warp = ptx::thread_index() / kWarpSize;
    const Rows rows(params, index / params.q_tiles, index % params.q_tiles);
    u32* list = params.tile_lists + static_cast<i64>(index) * params.kv_tiles;
    i32 whole = 0, parts = 0;
#pragma unroll 1
    for (i32 first = 0; first < params.kv_tiles; first += kRound) {
      const i32 tiles = min(kRound, params.kv_tiles - first);
      if (params.key_bits == nullptr) {
#pragma unroll 1
        for (i32 i = ptx::thread_index(); i < tiles; i += Config::kThreads) {
          shared.entries[i] = entry_of(rows, first + i);
        }
      } else {
#pragma unroll 1
        for (i32 i = warp; i < tiles; i += kWarps) {
          const u32 entry = entry_by_elements(rows, index, first + i);
          if (lane() == 0) shared.entries[i] = entry;
        }
      }
      __syncthreads();
      if (warp == 0) append(list, tiles, whole, parts);
      __syncthreads();  // the entries have been read
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

  __device__ __forceinline__ KeyInterval window_of(i32 row) const {
    return visible_keys<Mask::kSparse>(Lengths{params}, row);
  }

  // The rows of a query tile, and where its masks begin; null: no such mask.
  struct Rows {
    i32 first, end;
    const u8 *elements, *blocks, *keys;
    bool aligned;  // whether rows of elements may be read 16 bytes at a time

    __device__ __forceinline__ Rows(const ListsParams& params, i32 mask, i32 q_tile)
        : first(q_tile * params.block_m), end(min(first + params.block_m, params.seqlen_q)) {
      const i32 batch = mask / params.mask_heads, head = mask % params.mask_heads;
      elements = begin(params.attn_mask, batch, head);
      blocks = begin(params.block_mask, batch, head);
      keys = begin(params.key_mask, batch, head);
      aligned = (reinterpret_cast<u64>(elements) | static_cast<u64>(params.attn_mask.stride.row)) % kChunk == 0;
    }

   private:
    __device__ __forceinline__ static const u8* begin(const Tensor& mask, i32 batch, i32 head) {
      if (mask.data == nullptr) return nullptr;
      return static_cast<const u8*>(mask.data) + batch * mask.stride.batch + head * mask.stride.head;
    }
  };

  // A KV tile's keys, and whether the window shows them to every row.
  struct Keys {
    i32 first, end;
    bool within;
  };

  // False where the window hides the tile from all rows.
  __device__ __forceinline__ bool in_window(const Rows& rows, i32 tile, Keys& keys) const {
    const KeyInterval first = window_of(rows.first), last = window_of(rows.end - 1);
    keys.first = tile * params.block_n, keys.end = keys.first + params.block_n;
    keys.within = last.begin <= keys.first && first.end >= keys.end;
    return first.begin < keys.end && last.end > keys.first;
  }

  // Without elements: a block of 64 x 64 is seen where the mask of blocks and the window show some of it.
  __device__ __forceinline__ u32 entry_of(const Rows& rows, i32 tile) const {
    Keys keys;
    if (!in_window(rows, tile, keys)) return 0;
    u32 seen = 0, bit = 1u << TileEntry::kFirstBlock;
    bool all = keys.within;
#pragma unroll 1
    for (i32 row = rows.first; row < rows.end; row += kMaskBlock) {
      const KeyInterval first = window_of(row), last = window_of(min(row + kMaskBlock, rows.end) - 1);
#pragma unroll 1
      for (i32 key = keys.first; key < keys.end; key += kMaskBlock, bit *= 2) {
        const bool shown =
            first.begin < min(key + kMaskBlock, keys.end) && last.end > key && block_shows(rows, row, key);
        if (shown) seen |= bit;
        all &= shown;
      }
    }
    if (seen == 0) return 0;
    if (all) return tile | TileEntry::kEveryBlock | kWhole;
    return tile | seen | (keys.within ? kPart : kPart | TileEntry::kCut);
  }

  // Call with a warp: it reads 32 chunks of a KV tile at a time, of several rows. Stores the bits of all rows, those
  // behind the last too.
  __device__ __forceinline__ u32 entry_by_elements(const Rows& rows, i32 index, i32 tile) const {
    Keys keys;
    if (!in_window(rows, tile, keys)) return 0;
    const i32 chunks = params.block_n / kChunk, rows_at_once = kWarpSize / chunks;
    const i32 own_row = lane() / chunks, key = keys.first + (chunks - 1 - lane() % chunks) * kChunk;
    const u32 keys_shown = shown_by_key_mask(rows, key);
    const i32 columns = max(1, params.block_n / kMaskBlock), column = (key - keys.first) / kMaskBlock;
    u8* bits =
        params.key_bits + (static_cast<i64>(index) * params.kv_tiles + tile) * params.block_m * params.block_n / 8;
    u32 seen = 0;
    bool all = keys.within;
#pragma unroll 1
    for (i32 first = 0; first < params.block_m; first += kInFlight * rows_at_once) {
      u32 shown[kInFlight];
#pragma unroll
      for (i32 i = 0; i < kInFlight; ++i) {
        const i32 row = rows.first + first + i * rows_at_once + own_row;
        shown[i] = row < rows.end ? keys_shown & shown_by_elements(rows, row, key) : 0;
      }
#pragma unroll
      for (i32 i = 0; i < kInFlight; ++i) {
        const i32 own = first + i * rows_at_once + own_row, row = rows.first + own;
        if (own < params.block_m && row < rows.end) {
          if (!keys.within) shown[i] &= window_of(row).from(key).word();
          if (shown[i] != 0 && !block_shows(rows, row, key)) shown[i] = 0;
          if (shown[i] != 0) seen |= 1u << (TileEntry::kFirstBlock + own / kMaskBlock * columns + column);
          all &= shown[i] == 0xffff;
        }
        store_bits(bits, first + i * rows_at_once, chunks, shown[i]);
      }
    }
    seen = any_of_lanes(seen);
    if (seen == 0) return 0;
    if (!ptx::any(!all)) return tile | TileEntry::kEveryBlock | kWhole;
    return tile | seen | TileEntry::kElements | kPart;
  }

  // A bit for each key of a chunk.
  __device__ __forceinline__ u32 shown_by_elements(const Rows& rows, i32 row, i32 key) const {
    if (rows.elements == nullptr) return 0xffff;
    const u8* from = rows.elements + row * params.attn_mask.stride.row + key;
    if (!rows.aligned || key + kChunk > params.seqlen_kv) return bits_one_by_one(from, 1, key);
    const ptx::U32x4 bytes = ptx::load_global_u32x4(from, true);
    return nonzero_bytes(bytes.x) | nonzero_bytes(bytes.y) << 4 | nonzero_bytes(bytes.z) << 8 |
           nonzero_bytes(bytes.w) << 12;
  }
  __device__ __forceinline__ u32 shown_by_key_mask(const Rows& rows, i32 key) const {
    const i64 stride = params.key_mask.stride.row;
    if (rows.keys == nullptr) return 0xffff;
    return bits_one_by_one(rows.keys + key * stride, stride, key);
  }
  __device__ __forceinline__ u32 bits_one_by_one(const u8* from, i64 stride, i32 key) const {
    u32 bits = 0;
#pragma unroll 1
    for (i32 i = 0; i < min(kChunk, params.seqlen_kv - key); ++i) {
      if (from[i * stride] != 0) bits |= 1u << i;
    }
    return bits;
  }

  // A bit for each byte.
  __device__ __forceinline__ static u32 nonzero_bytes(u32 x) {
    const u32 marks = ((x & 0x7f7f7f7f) + 0x7f7f7f7f | x) >> 7 & 0x01010101;
    return marks * 0x10204080u >> 28;  // the marks side by side in the upper bits
  }

  __device__ __forceinline__ bool block_shows(const Rows& rows, i32 row, i32 key) const {
    if (rows.blocks == nullptr) return true;
    return key < params.seqlen_kv &&
           rows.blocks[row / kMaskBlock * params.block_mask.stride.row + key / kMaskBlock] != 0;
  }

  // Stores the FragmentBits of some rows, `first` of the query tile the first: a ballot has a bit of each lane's chunk,
  // and a chunk is an m, the first chunk in the last lane of a row.
  __device__ __forceinline__ void store_bits(u8* bits, i32 first, i32 chunks, u32 shown) const {
    const i32 t = lane() % 4;
    u32 of_t[4] = {};  // of the lane's t, by e
#pragma unroll
    for (i32 i = 0; i < kChunk; ++i) {
      const u32 of_lanes = ptx::ballot(shown >> i & 1);
      if (t == i % 8 / 2) of_t[2 * (i / 8) + i % 2] = of_lanes;
    }
    const i32 words = 4 * (kWarpSize / chunks);
#pragma unroll 1
    for (i32 w = lane(); w < words; w += kWarpSize) {
      const i32 row = w / 4;
      if (first + row >= params.block_m) break;
      u32 word = 0;
#pragma unroll
      for (i32 e = 0; e < 4; ++e) word |= (of_t[e] >> row * chunks & ((1u << chunks) - 1)) << chunks * e;
      u8* to = bits + (4 * (first + row) + t) * chunks / 2;
      if (chunks == 8) *reinterpret_cast<u32*>(to) = word;
      else if (chunks == 4) *reinterpret_cast<u16*>(to) = static_cast<u16>(word);
      else *to = static_cast<u8>(word);
    }
  }

  __device__ __forceinline__ static u32 any_of_lanes(u32 x) {
#pragma unroll
    for (i32 mask = kWarpSize / 2; mask > 0; mask /= 2) x |= ptx::shuffle_xor(x, mask);
    return x;
  }

  // Appends the entries of a round to both lists. Call with a warp.
  __device__ __forceinline__ void append(u32* list, i32 tiles, i32& whole, i32& parts) const {
#pragma unroll 1
    for (i32 i = lane(); i - lane() < tiles; i += kWarpSize) {
      const u32 marked = i < tiles ? shared.entries[i] : 0, entry = marked & ~(kPart | kWhole);
      const u32 of_whole = ptx::ballot(marked & kWhole), of_parts = ptx::ballot(marked & kPart);
      const u32 before = (1u << lane()) - 1;
      if (marked & kWhole) list[whole + ptx::popcount(of_whole & before)] = entry;
      if (marked & kPart) list[params.kv_tiles - 1 - (parts + ptx::popcount(of_parts & before))] = entry;
      whole += ptx::popcount(of_whole);
      parts += ptx::popcount(of_parts);
    }
  }
};

}  // namespace sage
