// Where an element of a quantized tensor lies: the layouts that the quantizers write and the matrix products read.
//
// Quantized tensors are stored tile by tile, each tile contiguous and already swizzled, so that loading one into shared
// memory is a plain copy of consecutive bytes. With kBlockM query rows and kBlockN keys a tile:
//   Q̂        [kBlockM][kHeadDim] s8, s4 or e2m1, rows of queries
//   K̂        [kBlockN][kHeadDim] s8, s4 or e2m1, rows of keys
//   V̂ f16    [kBlockN][kHeadDim] f16, rows of keys
//   V̂ e4m3   [kHeadDim][kBlockN] e4m3 or e2m1, rows of channels, its columns in the order of key_of_column()
// Behind e2m1 stand the scales of its groups, ue4m3, 16 elements of a row a group:
//   Q̂, K̂     [rows][kHeadDim / 16]
//   V̂        [kBlockN / 64][kHeadDim][64 / 16], the four groups of 64 columns side by side
// A KV tile is K̂, V̂ and a KvLine in 128 bytes, in one run of bytes.
#pragma once

#include "sage/types.cuh"

namespace sage {

// kRows rows of kRowBytes in panels: a panel holds at most 128 bytes of every row, the widest swizzle of wgmma. A row
// of a panel is chunks of 16 bytes; the position of a chunk is XORed with a value of its row, the row's XOR. ldmatrix
// reads the same chunk of eight consecutive rows at once: the XOR spreads these over all 32 banks (8 x 16 bytes).
template <i32 kRows, i32 kOwnRowBytes>
struct SwizzledRows {
  static constexpr i32 kRowBytes = kOwnRowBytes;
  static constexpr i32 kPitch = kRowBytes < 128 ? kRowBytes : 128;  // bytes from row to row of a panel
  static constexpr i32 kPanelBytes = kRows * kPitch;
  static_assert(kRowBytes >= 32 && (kRowBytes & (kRowBytes - 1)) == 0, "moved() takes additions for XORs");

  // Rows that share 128 bytes lie in different banks without an XOR.
  static constexpr i32 kRowsPerLine = 128 / kPitch;
  static constexpr i32 kXors = kPitch / 16;

  __device__ static constexpr i32 offset(i32 row, i32 chunk) {
    return chunk / 8 * kPanelBytes + row * kPitch + (chunk % 8 ^ row / kRowsPerLine % kXors) * 16;
  }

  // The address of (row + lane_row, chunk + lane_chunk) from that of (lane_row, lane_chunk). row is a multiple of 8,
  // which does not change the row's XOR. chunk shares no bit with lane_chunk, so that adding its bits within the XOR's
  // reach is an XOR. Tiles start at multiples of 128 bytes, which keeps those bits zero in their addresses.
  __device__ static constexpr u32 moved(u32 lane_address, i32 row, i32 chunk) {
    return (lane_address ^ chunk % 8 * 16) + chunk / 8 * kPanelBytes + row * kPitch;
  }
};

// The key whose P stands in column `column` of the P operand. In the score accumulators of 32 keys a thread owns the
// keys 8j + 2t and 8j + 2t + 1 (j = 0..3); in the 8-bit A operand it owns the columns 4t..4t+3 and 16 + 4t..16 + 4t+3,
// in the 4-bit A operand 8t..8t+7. This order of V̂'s keys makes the accumulators the operand, with no exchange between
// threads.
template <Pv kPv>
__device__ constexpr i32 key_of_column(i32 column) {
  constexpr i32 kRun = kPv == Pv::kNvfp4 ? 8 : 4;  // columns that a thread owns side by side
  const i32 half = column / (4 * kRun) % (8 / kRun), t = column / kRun % 4, e = column % kRun;
  return column / 32 * 32 + 16 * half + 8 * (e / 2) + 2 * t + e % 2;
}

// The bits of V̂ for a value that is not finite: minus zero, which adds nothing to P·V. Where the line of a KV
// tile says that the tile has such values, no other value of the tile is minus zero.
template <Pv kPv>
constexpr u32 kSpoiltValue = kPv == Pv::kNvfp4  ? 0x8
                             : kPv == Pv::kE4m3 ? 0x80
                                                : 0x8000;

// Scale groups of the keys of a tile: group t holds the keys n with n % 8 / 2 == t, those of the lanes t of a warp.
constexpr i32 kKeyGroups = 4;

// Scale groups of the rows of a warp: group g holds the rows m with m % kRowGroups == g. At 8 bits these are the rows
// of the lanes 4g..4g+3. At 4 bits, whose steps are coarse, every row has a scale of its own.
template <class Config>
constexpr i32 kRowGroups = Config::kQk == Qk::kInt8 ? 8 : Config::kWarpM;

// The line of a KV tile: its scales, which keys and channels hold what is not finite, and norms of its keys. The first
// kLoaded bytes are loaded to shared memory with the tile, with norms the first kLoadedWithNorms.
struct KvLine {
  static constexpr i32 kMost = 128;  // keys of a tile
  static constexpr i32 kChannelsOfMark = 8;

  // Index: lane % 4 of the threads that multiply with the scale. A sign is set where a key, or a value, is not finite.
  struct Factors {
    float k_scale;
    float v_factor;  // V less its mean is V̂ · v_factor · v_scale; a power of two, equal in all groups
  } group[kKeyGroups];
  // Written where a k_scale has its sign set: a bit for each key that is not finite.
  u32 k_spoilt[kMost / 32];
  // Written where a v_factor has its sign set: a bit for each kChannelsOfMark channels with such a value.
  u32 v_spoilt[1];
  // Bounds on the norms of the keys of each scale group, as they are quantized: one of each of the two warps that
  // quantize a group. Where the quantizer's Config::kKeyNorms says so.
  struct alignas(8) Norms {
    float of_warp[2];
  } norms[kKeyGroups];

  static constexpr i32 kLoaded = kKeyGroups * sizeof(Factors);
  static constexpr i32 kBytes = 128;  // tiles stay aligned to whole lines

  __device__ __forceinline__ float largest_norm() const {
    float largest = 0.0f;
#pragma unroll
    for (const Norms& of_group : norms) largest = fmaxf(largest, fmaxf(of_group.of_warp[0], of_group.of_warp[1]));
    return largest;
  }
};

// Rows and bytes of one tile of each quantized tensor.
template <class Config>
struct TileLayout {
  static constexpr i32 kQkRowBytes = Config::kHeadDim * bits_of(Config::kQk) / 8;
  static constexpr i32 kQkRowScales = Config::kQk == Qk::kNvfp4 ? Config::kHeadDim / 16 : 0;  // bytes of them
  static constexpr bool kTransposedV = Config::kPv != Pv::kF16;

  static constexpr i32 kVRowCount = kTransposedV ? Config::kHeadDim : Config::kBlockN;
  static constexpr i32 kVBits = Config::kPv == Pv::kNvfp4 ? 4 : Config::kPv == Pv::kE4m3 ? 8 : 16;
  static constexpr i32 kVRowBytes = (kTransposedV ? Config::kBlockN : Config::kHeadDim) * kVBits / 8;
  static constexpr i32 kVRowScales = Config::kPv == Pv::kNvfp4 ? Config::kBlockN / 16 : 0;

  using QRows = SwizzledRows<Config::kBlockM, kQkRowBytes>;
  using KRows = SwizzledRows<Config::kBlockN, kQkRowBytes>;
  using VRows = SwizzledRows<kVRowCount, kVRowBytes>;

  // The offset of the value of a row and a column in V̂.
  __device__ static constexpr i32 v_offset(i32 row, i32 column) {
    const i32 byte = kVBits < 8 ? column / (8 / kVBits) : column * (kVBits / 8);
    return VRows::offset(row, byte / 16) + byte % 16;
  }

  // Scales of groups in a tile of Q̂, K̂ or V̂: behind the elements.
  static constexpr i32 kQScales = Config::kBlockM * kQkRowBytes, kKScales = Config::kBlockN * kQkRowBytes;
  static constexpr i32 kVScales = kVRowCount * kVRowBytes;
  __device__ static constexpr i32 v_scale_offset(i32 row, i32 column) {
    return (column / 64 * kVRowCount + row) * 4 + column % 64 / 16;
  }

  static constexpr i32 kQBytes = kQScales + Config::kBlockM * kQkRowScales;
  static constexpr i32 kKBytes = kKScales + Config::kBlockN * kQkRowScales;
  static constexpr i32 kVBytes = kVScales + kVRowCount * kVRowScales;

  // A KV tile: offsets of its parts, and its size.
  static constexpr i32 kV = kKBytes, kLine = kV + kVBytes, kKvBytes = kLine + KvLine::kBytes;
  static_assert(sizeof(KvLine) <= KvLine::kBytes);
  static_assert(Config::kBlockN <= KvLine::kMost && Config::kHeadDim <= 32 * KvLine::kChannelsOfMark);
};

}  // namespace sage
