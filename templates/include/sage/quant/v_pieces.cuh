// The piece of a tile of V that a thread reads and stores in one step: eight channels of one key (RowOfV), or of four
// keys where V̂ is transposed (SquareOfV).
#pragma once

#include "sage/numerics/nvfp4.cuh"
#include "sage/ptx/math.cuh"
#include "sage/ptx/special.cuh"
#include "sage/quant/block.cuh"

namespace sage {

// The square that a thread transposes in one step: four neighbouring columns of the P operand, which are four keys, of
// kVector channels. A warp takes 32 columns of 32 channels, so that it reads 64 bytes of a row of V and writes 32 bytes
// of a row of V̂: whole sectors.
template <class Config>
struct SquareOfV {
  using Block = QuantBlock<Config>;
  using Layout = typename Block::Layout;
  using Swizzle = typename Layout::VRows;
  static constexpr i32 kBits = Layout::kVBits, kInChunk = 128 / kBits;  // columns in a chunk of 16 bytes
  static constexpr i32 kEdge = 32, kKeys = 4;
  static constexpr i32 kAcross = Config::kBlockN / kEdge, kDown = Config::kHeadDim / kEdge;  // squares of a tile
  static constexpr i32 kAcrossAtOnce = Block::kWarps / kDown, kSteps = Block::kTilesOfV * kAcross / kAcrossAtOnce;
  static constexpr i32 kStepsOfTile = kSteps, kWarpsOfTile = kAcross / kSteps;  // warps that share a channel
  static_assert(Block::kTilesOfV * kAcross % kAcrossAtOnce == 0, "every warp takes equally many squares");
  static_assert(kAcross % kSteps == 0, "a warp's squares are of one tile");
  static constexpr bool kKeepsSums = kBits == 8;  // NVFP4 has steps of up to half of a value

  i32 tile, column, channel;  // tile: of the block's; channel: the first of eight, of every step

  __device__ __forceinline__ explicit SquareOfV(i32 step) {
    const i32 across = ptx::thread_index() / kWarpSize / kDown * kSteps + step;
    tile = across / kAcross;
    column = across % kAcross * kEdge + ptx::thread_index() % 8 * 4;
    channel = first_channel();
  }

  __device__ __forceinline__ i32 key(i32 e) const { return key_of_column<Config::kPv>(column + e); }  // of the tile's

  __device__ __forceinline__ static i32 first_channel() {
    return ptx::thread_index() / kWarpSize % kDown * kEdge + ptx::thread_index() % kWarpSize / 8 * kVector;
  }

  // Of the warps of the thread's tile that share its channels.
  __device__ __forceinline__ static i32 warp_of_tile() {
    return ptx::thread_index() / kWarpSize / kDown % kWarpsOfTile;
  }

  // Where the bytes of channel i of the thread's channels lie.
  __device__ __forceinline__ u32* word(u8* v_hat, i32 i) const {
    return reinterpret_cast<u32*>(v_hat + Swizzle::offset(channel + i, column / kInChunk) +
                                  column % kInChunk * kBits / 8);
  }

  // read(e, w, x): channels 2w and 2w + 1 of key e. Two channels at a time: more would take too many registers.
  template <class Read>
  __device__ __forceinline__ void store(u8* v_hat, Read read) const {
#pragma unroll
    for (i32 w = 0; w < kVector / 2; ++w) {
      float x[kKeys][2];
#pragma unroll
      for (i32 e = 0; e < kKeys; ++e) read(e, w, x[e]);
#pragma unroll
      for (i32 c = 0; c < 2; ++c) {
        u8* to = v_hat + Swizzle::offset(channel + 2 * w + c, column / kInChunk) + column % kInChunk * kBits / 8;
        if constexpr (kBits == 8) {
          *reinterpret_cast<u32*>(to) = ptx::e4m3x4(x[0][c], x[1][c], x[2][c], x[3][c]);
        } else {  // four neighbouring lanes have the columns of a group
          const float own[kKeys] = {x[0][c], x[1][c], x[2][c], x[3][c]};
          const u32 scale = nvfp4_scale<kNvfp4Group / kKeys>(own);
          *reinterpret_cast<u16*>(to) = static_cast<u16>(e2m1_word(own, inv_nvfp4_scale(scale)));
          u8* const scales = v_hat + Layout::kVScales;
          if (column % kNvfp4Group == 0)
            scales[Layout::v_scale_offset(channel + 2 * w + c, column)] = static_cast<u8>(scale);
        }
      }
    }
  }
};

// Eight channels of one key.
template <class Config>
struct RowOfV {
  using Block = QuantBlock<Config>;
  using Swizzle = typename Block::Layout::VRows;
  static constexpr i32 kKeys = 1, kKeysAtOnce = Config::kThreads / Block::kVectors;
  static constexpr bool kKeepsSums = false;
  static constexpr i32 kStepsOfTile = Config::kBlockN / kKeysAtOnce, kSteps = Block::kTilesOfV * kStepsOfTile;
  static_assert(Config::kBlockN % kKeysAtOnce == 0, "every thread takes equally many keys");

  i32 tile, row, channel;  // tile: of the block's; channel: the first of eight, of every step

  __device__ __forceinline__ explicit RowOfV(i32 step)
      : tile(step / kStepsOfTile),
        row(ptx::thread_index() / Block::kVectors + step % kStepsOfTile * kKeysAtOnce),
        channel(first_channel()) {}

  __device__ __forceinline__ i32 key(i32) const { return row; }  // of the tile's

  __device__ __forceinline__ static i32 first_channel() { return ptx::thread_index() % Block::kVectors * kVector; }

  template <class Read>
  __device__ __forceinline__ void store(u8* v_hat, Read read) const {
    Halves out;
#pragma unroll
    for (i32 w = 0; w < kVector / 2; ++w) {
      float x[2];
      read(0, w, x);
      out.word[w] = ptx::f16x2(x[0], x[1]);
    }
    *reinterpret_cast<Halves*>(v_hat + Swizzle::offset(row, channel / kVector)) = out;
  }
};

template <class Config, Pv kPv = Config::kPv>
struct SelectPiece {
  using Type = SquareOfV<Config>;
};
template <class Config>
struct SelectPiece<Config, Pv::kF16> {
  using Type = RowOfV<Config>;
};

}  // namespace sage
