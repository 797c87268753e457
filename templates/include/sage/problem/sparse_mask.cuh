// A sparse mask: a window, and where the call has a boolean mask or a mask of blocks what these leave of it. The kernel
// of quant/tile_lists.cuh then lists the KV tiles of a query tile: first, in their order, those that every row sees
// whole, and from the end on, backwards, those of which some row sees a part.
#pragma once

#include "sage/problem/work_tile.cuh"
#include "sage/ptx/shared.cuh"

namespace sage {

constexpr i32 kMaskBlock = 64;  // queries and keys of an element of a mask of blocks

// An entry of a list: a KV tile, and what the rows of the query tile see of it.
struct TileEntry {
  static constexpr u32 kMostTiles = 1u << 20;
  static constexpr i32 kFirstBlock = 20, kMostBlocks = 8;  // of the bits that say which blocks of 64 x 64 are seen
  static constexpr u32 kEveryBlock = ((1u << kMostBlocks) - 1) << kFirstBlock;
  static constexpr u32 kCut = 1u << 28;       // the window hides some key from some row
  static constexpr u32 kElements = 1u << 29;  // key_bits says what each row sees, the window and the blocks counted in

  u32 word;

  __device__ __forceinline__ i32 tile() const { return static_cast<i32>(word % kMostTiles); }
  __device__ __forceinline__ bool is_cut() const { return word & kCut; }
  __device__ __forceinline__ bool has_elements() const { return word & kElements; }
  // Of kColumns blocks of keys: whether rows of a block of 64 see all keys; some of any block, or of that column's.
  template <i32 kColumns>
  __device__ __forceinline__ bool shows_all(i32 row_block) const {
    constexpr u32 kOfRows = (1u << kColumns) - 1;
    return !is_cut() && !has_elements() && (word >> (kFirstBlock + row_block * kColumns) & kOfRows) == kOfRows;
  }
  template <i32 kColumns>
  __device__ __forceinline__ bool sees(i32 row_block) const {
    return word >> (kFirstBlock + row_block * kColumns) & ((1u << kColumns) - 1);
  }
  template <i32 kColumns>
  __device__ __forceinline__ bool sees(i32 row_block, i32 column) const {
    return word >> (kFirstBlock + row_block * kColumns + column) & 1;
  }
};

// Blocks of 64 keys in a KV tile.
template <class Config>
constexpr i32 kKeyBlocks = Config::kBlockN > kMaskBlock ? Config::kBlockN / kMaskBlock : 1;

// The KV tile at a place, counted as WorkTile::kv is. Without a list, tiles behind the whole ones may be cut by the
// window.
template <class Config>
__device__ __forceinline__ TileEntry entry_at(const AttnParams& params, const WorkTile& work, i32 place) {
  static_assert(Config::kBlockM % kMaskBlock == 0);
  static_assert(Config::kBlockM / kMaskBlock * kKeyBlocks<Config> <= TileEntry::kMostBlocks);
  if (params.tile_lists == nullptr) {
    const u32 entry = static_cast<u32>(work.kv.rotated(place)) | TileEntry::kEveryBlock;
    return {place < work.kv.template whole<Mask::kSparse>() ? entry : entry | TileEntry::kCut};
  }
  const i32 at = place < work.kv.full_end ? place : params.kv_tiles - 1 - (place - work.kv.full_end);
  return {params.tile_lists[list_index(params, work) * params.kv_tiles + at]};
}

template <class Config>
__device__ __forceinline__ i32 tile_at(const AttnParams& params, const WorkTile& work, i32 place) {
  if constexpr (Config::kMask != Mask::kSparse) return place;
  else return entry_at<Config>(params, work, place).tile();
}

// A bit for each key of a KV tile whose score of one row a thread holds in the fragment of an accumulator: of key 8n +
// 2t + c, where t is lane % 4. Bits lie as the bytes of P in an operand of P·V do: shifted left by m, a word has in the
// sign bit of byte e that of the operand's word m, whose n is 2m + e / 2, and c is e % 2.
template <i32 kBlockN>
struct FragmentBits {
  static constexpr i32 kField = kBlockN / 16;  // bits of an e
  static_assert(kField == 2 || kField == 4 || kField == 8);
  static constexpr u32 kOfField = (1u << kField) - 1;
  static constexpr u32 kEveryField = kField == 8 ? 0x01010101 : kField == 4 ? 0x1111 : 0x55;
  static constexpr u32 kAll = kEveryField * kOfField;
  static constexpr i32 kRowBytes = kBlockN / 8;  // of the words of four threads

  __device__ __forceinline__ static constexpr u32 bit(i32 n, i32 c) {
    return 1u << (kField * (2 * (n % 2) + c) + kField - 1 - n / 2);
  }

  // The keys in front of `end`.
  __device__ __forceinline__ static u32 before(i32 end, i32 t) {
    u32 word = 0;
#pragma unroll
    for (i32 e = 0; e < 4; ++e) {
      const i32 first = 2 * t + 8 * (e / 2) + e % 2;  // key of m = 0
      const i32 count = min(max((end - first + 15) >> 4, 0), kField);
      word |= (kOfField ^ kOfField >> count) << kField * e;
    }
    return word;
  }

  // The keys of a block of 64.
  __device__ __forceinline__ static constexpr u32 column(i32 index) {
    constexpr u32 kUpper = kField == 8 ? 0xf0 : kOfField;
    return kEveryField * (index == 0 ? kUpper : kOfField ^ kUpper);
  }

  // Word t of a row of key_bits, or where it lies in shared memory.
  __device__ __forceinline__ static u32 load(const u8* row, i32 t) {
    if constexpr (kField == 8) return reinterpret_cast<const u32*>(row)[t];
    else if constexpr (kField == 4) return reinterpret_cast<const u16*>(row)[t];
    else return row[t];
  }
  __device__ __forceinline__ static u32 load_shared(u32 address) {
    static_assert(kField > 2, "a word of bits is two bytes at least");
    if constexpr (kField == 8) return ptx::load_shared_u32(address);
    else return ptx::load_shared_u16(address);
  }
  __device__ __forceinline__ static void store_shared(u32 address, u32 word) {
    if constexpr (kField == 8) ptx::store_shared_u32(address, word);
    else ptx::store_shared_u16(address, word);
  }
};

// A KV tile's bits of all rows of the query tile.
template <class Config>
__device__ __forceinline__ const u8* tile_bits(const AttnParams& params, const WorkTile& work, i32 tile) {
  constexpr i64 kBytes = Config::kBlockM * FragmentBits<Config::kBlockN>::kRowBytes;
  return params.key_bits + (list_index(params, work) * params.kv_tiles + tile) * kBytes;
}

// The bits of the blocks of 64 keys that a block of 64 rows sees, row_block of the query tile.
template <class Config>
__device__ __forceinline__ u32 bits_of_blocks(const TileEntry& entry, i32 row_block) {
  using Bits = FragmentBits<Config::kBlockN>;
  u32 word = Bits::kAll;
#pragma unroll
  for (i32 c = 0; c < kKeyBlocks<Config>; ++c) {
    if (!entry.template sees<kKeyBlocks<Config>>(row_block, c)) word &= ~Bits::column(c);
  }
  return word;
}

// A bit for each of 32 keys of a tile that some row sees in part, from key 32w of it on, in the order of the keys.
template <class Config, class Keys>
__device__ __forceinline__ u32 visible_word(const AttnParams& params, const WorkTile& work, i32 row, const Keys& window,
                                            const TileEntry& entry, i32 w) {
  using Bits = FragmentBits<Config::kBlockN>;
  const i32 own = row - work.first_row, first = 32 * w;
  if (!entry.has_elements()) {
    const bool seen = entry.template sees<kKeyBlocks<Config>>(own / kMaskBlock, first / kMaskBlock);
    return seen ? window.from(entry.tile() * Config::kBlockN + first).word() : 0;
  }
  const u8* bits = tile_bits<Config>(params, work, entry.tile()) + own * Bits::kRowBytes;
  u32 word = 0;
#pragma unroll 1
  for (i32 i = 0; i < 32; ++i) {
    const u32 bit = Bits::bit((first + i) / 8, i % 2);
    if (Bits::load(bits, i % 8 / 2) & bit) word |= 1u << i;
  }
  return word;
}

}  // namespace sage
