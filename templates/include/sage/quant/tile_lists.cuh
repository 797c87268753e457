// Lists of the KV tiles that query tiles see, by a window, a boolean mask, a mask of blocks and a key mask together:
// problem/sparse_mask.cuh. A warp makes the list of a query tile: a lane looks at a KV tile. Where elements decide, a
// block makes the list, a round of KV tiles at a time: a warp looks at a KV tile, and stores a bit for each query and
// key. The first warp then lists the round in order.
#pragma once

#include "sage/problem/sparse_mask.cuh"
#include "sage/ptx/global.cuh"
#include "sage/ptx/special.cuh"
#include "sage/ptx/warp.cuh"
#include "sage/quant/params.cuh"

namespace sage {

// Config: kThreads.
template <class Config>
struct TileLists {
  static constexpr i32 kWarps = Config::kThreads / kWarpSize;
  static constexpr i32 kRound = 1024;  // KV tiles of a round
  static constexpr i32 kChunk = 16;    // keys of a row that a lane reads at once
  static constexpr i32 kInFlight = 2;  // such reads of a lane
  static_assert(kRound % kWarpSize == 0);

  static constexpr u32 kPart = 1u << 30, kWhole = 1u << 31;  // flags of an entry that is to be listed

  struct Shared {
    u32 entries[kRound];
  };

  // Figures for the host: to launch the kernel.
  static constexpr auto facts() {
    return sage::facts(Fact{"threads", Config::kThreads}, Fact{"shared_bytes", 0}, Fact{"mask_block", kMaskBlock},
                       Fact{"most_tiles", TileEntry::kMostTiles}, Fact{"lists_a_block", kWarps});
  }

  const ListsParams& params;
  Shared& shared;

  __device__ __forceinline__ void run() const {
    if (params.key_bits == nullptr) list_by_blocks();
    else list_by_elements();
  }

 private:
  __device__ __forceinline__ static i32 lane() { return ptx::thread_index() % kWarpSize; }

  // blockIdx.x: groups of kWarps query tiles of a mask fastest, then the heads of masks, then their batch entries.
  __device__ __forceinline__ void list_by_blocks() const {
    const i32 groups = ceil_div<i32>(params.q_tiles, kWarps), block = ptx::block_index(), mask = block / groups;
    const i32 q_tile = block % groups * kWarps + ptx::thread_index() / kWarpSize;
    if (q_tile >= params.q_tiles) return;
    const Rows rows(params, mask, q_tile);
    List list(params, mask * params.q_tiles + q_tile);
#pragma unroll 1
    for (i32 round = 0; round < ceil_div(params.kv_tiles, kWarpSize); ++round) {
      const i32 tile = round * kWarpSize + lane();
      list.append(params, tile < params.kv_tiles ? entry_of(rows, tile) : 0);
    }
    list.store_counts(params);
  }

  // blockIdx.x: query tiles fastest, then as above.
  __device__ __forceinline__ void list_by_elements() const {
    const i32 index = ptx::block_index(), warp = ptx::thread_index() / kWarpSize;
    const Rows rows(params, index / params.q_tiles, index % params.q_tiles);
    List list(params, index);
#pragma unroll 1
    for (i32 first = 0; first < params.kv_tiles; first += kRound) {
      const i32 tiles = min(kRound, params.kv_tiles - first);
#pragma unroll 1
      for (i32 i = warp; i < tiles; i += kWarps) {
        const u32 entry = entry_by_elements(rows, index, first + i);
        if (lane() == 0) shared.entries[i] = entry;
      }
      __syncthreads();
#pragma unroll 1
      for (i32 i = lane(); warp == 0 && i - lane() < tiles; i += kWarpSize) {
        list.append(params, i < tiles ? shared.entries[i] : 0);
      }
      __syncthreads();  // the entries have been read
    }
    if (warp == 0) list.store_counts(params);
  }

  // The list of a query tile, which a warp makes.
  struct List {
    i32 index;
    u32* entries;
    i32 whole = 0, parts = 0;

    __device__ __forceinline__ List(const ListsParams& params, i32 index_)
        : index(index_), entries(params.tile_lists + static_cast<i64>(index_) * params.kv_tiles) {}

    // Appends the entries of the lanes, in their order, those that are marked.
    __device__ __forceinline__ void append(const ListsParams& params, u32 marked) {
      const u32 entry = marked & ~(kPart | kWhole), before = (1u << lane()) - 1;
      const u32 of_whole = ptx::ballot(marked & kWhole), of_parts = ptx::ballot(marked & kPart);
      if (marked & kWhole) entries[whole + ptx::popcount(of_whole & before)] = entry;
      if (marked & kPart) entries[params.kv_tiles - 1 - (parts + ptx::popcount(of_parts & before))] = entry;
      whole += ptx::popcount(of_whole);
      parts += ptx::popcount(of_parts);
    }

    __device__ __forceinline__ void store_counts(const ListsParams& params) const {
      if (lane() > 0) return;
      params.tile_counts[2 * index] = whole + parts;
      params.tile_counts[2 * index + 1] = whole;
    }
  };

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

  __device__ __forceinline__ static KeyInterval window_of(const ListsParams& params, i32 row) {
    return visible_keys<Mask::kSparse>(Lengths{params}, row);
  }

  // The rows of a query tile, and where its masks begin; null: no such mask.
  struct Rows {
    i32 first, end;
    const u8 *elements, *blocks, *keys;
    bool aligned;                   // whether rows of elements may be read 16 bytes at a time
    KeyInterval of_first, of_last;  // what the window shows to the first and the last row

    __device__ __forceinline__ Rows(const ListsParams& params, i32 mask, i32 q_tile)
        : first(q_tile * params.block_m), end(min(first + params.block_m, params.seqlen_q)) {
      const i32 batch = mask / params.mask_heads, head = mask % params.mask_heads;
      elements = begin(params.attn_mask, batch, head);
      blocks = begin(params.block_mask, batch, head);
      keys = begin(params.key_mask, batch, head);
      aligned = (reinterpret_cast<u64>(elements) | static_cast<u64>(params.attn_mask.stride.row)) % kChunk == 0;
      of_first = window_of(params, first), of_last = window_of(params, end - 1);
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
    keys.first = tile * params.block_n, keys.end = keys.first + params.block_n;
    keys.within = rows.of_last.begin <= keys.first && rows.of_first.end >= keys.end;
    return rows.of_first.begin < keys.end && rows.of_last.end > keys.first;
  }

  // Without elements: a block of 64 x 64 is seen where the mask of blocks and the window show some of it. All of them
  // are read at once.
  __device__ __forceinline__ u32 entry_of(const Rows& rows, i32 tile) const {
    Keys keys;
    if (!in_window(rows, tile, keys)) return 0;
    const i32 shift = params.block_n > kMaskBlock ? 1 : 0;  // log2 of the blocks of keys of a KV tile
    u32 seen = 0, every = 0;
#pragma unroll
    for (i32 b = 0; b < TileEntry::kMostBlocks; ++b) {
      const i32 row = rows.first + (b >> shift) * kMaskBlock, key = keys.first + (b & shift) * kMaskBlock;
      if (row < rows.end) {
        every |= 1u << b;
        if (block_shows(rows, row, key)) seen |= 1u << b;
      }
    }
    if (!keys.within) seen &= overlapped(rows, keys, 1 << shift);
    if (seen == 0) return 0;
    if (seen == every && keys.within) return tile | TileEntry::kEveryBlock | kWhole;
    return tile | seen << TileEntry::kFirstBlock | kPart | (keys.within ? 0 : TileEntry::kCut);
  }

  // The blocks of which the window shows some key to some row.
  __device__ __forceinline__ u32 overlapped(const Rows& rows, const Keys& keys, i32 of_row) const {
    u32 found = 0, bit = 1;
#pragma unroll 1
    for (i32 row = rows.first; row < rows.end; row += kMaskBlock) {
      const KeyInterval first = window_of(params, row), last = window_of(params, min(row + kMaskBlock, rows.end) - 1);
#pragma unroll 1
      for (i32 i = 0; i < of_row; ++i, bit *= 2) {
        const i32 key = keys.first + i * kMaskBlock;
        if (first.begin < min(key + kMaskBlock, keys.end) && last.end > key) found |= bit;
      }
    }
    return found;
  }

  // Call with a warp: it reads 32 chunks of a KV tile at a time, of several rows. Stores the bits of all rows, those
  // behind the last too.
  __device__ __forceinline__ u32 entry_by_elements(const Rows& rows, i32 index, i32 tile) const {
    Keys keys;
    if (!in_window(rows, tile, keys)) return 0;
    const i32 chunks = params.block_n / kChunk, rows_at_once = kWarpSize / chunks;
    const i32 own_row = lane() / chunks, key = keys.first + (chunks - 1 - lane() % chunks) * kChunk;
    const bool one_row = params.attn_mask.stride.row == 0;  // the mask of every query
    const u32 keys_shown = shown_by_key_mask(rows, key) & (one_row ? shown_by_elements(rows, rows.first, key) : ~0u);
    const i32 columns = max(1, params.block_n / kMaskBlock), column = (key - keys.first) / kMaskBlock;
    u8* bits =
        params.key_bits + (static_cast<i64>(index) * params.kv_tiles + tile) * params.block_m * params.block_n / 8;
    u32 seen = 0;
    bool all = keys.within;
    if (one_row && keys.within && rows.blocks == nullptr) {
      store_bits_of_all(bits, chunks, rows_at_once, keys_shown);
#pragma unroll 1
      for (i32 row = 0; keys_shown != 0 && row < rows.end - rows.first; row += kMaskBlock) {
        seen |= 1u << (TileEntry::kFirstBlock + row / kMaskBlock * columns + column);
      }
      return entry_of_elements(tile, seen, keys_shown == 0xffff);
    }
#pragma unroll 1
    for (i32 first = 0; first < params.block_m; first += kInFlight * rows_at_once) {
      u32 shown[kInFlight];
#pragma unroll
      for (i32 i = 0; i < kInFlight; ++i) {
        const i32 row = rows.first + first + i * rows_at_once + own_row;
        shown[i] = row < rows.end ? keys_shown & (one_row ? ~0u : shown_by_elements(rows, row, key)) : 0;
      }
#pragma unroll
      for (i32 i = 0; i < kInFlight; ++i) {
        const i32 own = first + i * rows_at_once + own_row, row = rows.first + own;
        if (own < params.block_m && row < rows.end) {
          if (!keys.within) shown[i] &= window_of(params, row).from(key).word();
          if (shown[i] != 0 && !block_shows(rows, row, key)) shown[i] = 0;
          if (shown[i] != 0) seen |= 1u << (TileEntry::kFirstBlock + own / kMaskBlock * columns + column);
          all &= shown[i] == 0xffff;
        }
        store_bits(bits, first + i * rows_at_once, chunks, shown[i]);
      }
    }
    return entry_of_elements(tile, seen, all);
  }

  // seen, all: what each lane has found.
  __device__ __forceinline__ static u32 entry_of_elements(i32 tile, u32 seen, bool all) {
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

  // Stores the FragmentBits of some rows, `first` of the query tile the first.
  __device__ __forceinline__ void store_bits(u8* bits, i32 first, i32 chunks, u32 shown) const {
    store_words(bits, first, chunks, Words(shown));
  }

  // The same of all rows of a query tile, which see the same keys.
  __device__ __forceinline__ void store_bits_of_all(u8* bits, i32 chunks, i32 rows_at_once, u32 shown) const {
    const Words words(shown);
#pragma unroll 1
    for (i32 i = 0; i < params.block_m / rows_at_once; ++i) store_words(bits, i * rows_at_once, chunks, words);
  }

  // Bits of the chunks of a warp's lanes: a ballot has a bit of each, and a chunk is an m of FragmentBits, the first
  // chunk in the last lane of a row.
  struct Words {
    u32 of_t[4] = {};  // of the lane's t, by e

    __device__ __forceinline__ explicit Words(u32 shown) {
#pragma unroll
      for (i32 i = 0; i < kChunk; ++i) {
        const u32 of_lanes = ptx::ballot(shown >> i & 1);
        if (lane() % 4 == i % 8 / 2) of_t[2 * (i / 8) + i % 2] = of_lanes;
      }
    }
  };

  __device__ __forceinline__ void store_words(u8* bits, i32 first, i32 chunks, const Words& of_rows) const {
    const i32 t = lane() % 4, words = 4 * (kWarpSize / chunks);
#pragma unroll 1
    for (i32 w = lane(); w < words; w += kWarpSize) {
      const i32 row = w / 4;
      if (first + row >= params.block_m) break;
      u32 word = 0;
#pragma unroll
      for (i32 e = 0; e < 4; ++e) word |= (of_rows.of_t[e] >> row * chunks & ((1u << chunks) - 1)) << chunks * e;
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
};

}  // namespace sage
