// The loads of one side's tiles into shared memory by cp.async, tile after tile. With two stages the next tile arrives
// while the products of this one run.
#pragma once

#include "sage/ptx/cp_async.cuh"
#include "sage/types.cuh"

namespace sage {

// Tiles: its copy_async(shared) begins to copy the tile whose turn it is, with all threads of the block.
template <i32 kTileBytes, i32 kStages>
class TileStream {
 public:
  static constexpr i32 kBytes = kStages * kTileBytes;
  static_assert((kStages == 1 || kStages == 2) && kTileBytes % 128 == 0, "swizzled rows begin at a whole line");

  __device__ __forceinline__ explicit TileStream(u32 shared) : shared_(shared) {}

  template <class Tiles>
  __device__ __forceinline__ void load(i32 index, Tiles& tiles) const {
    tiles.copy_async(shared_ + index % kStages * kTileBytes);
    ptx::cp_async_commit();
  }

  // Waits for a tile that was loaded, and returns where it lies. more: whether another one follows. Call with all
  // threads, tile after tile, and finish() when the tile was read.
  template <class Tiles>
  __device__ __forceinline__ u32 wait(i32 index, bool more, Tiles& tiles) const {
    ptx::cp_async_wait<0>();
    __syncthreads();  // of two stages, the other was read
    if (kStages == 2 && more) load(index + 1, tiles);
    return shared_ + index % kStages * kTileBytes;
  }
  template <class Tiles>
  __device__ __forceinline__ void finish(i32 index, bool more, Tiles& tiles) const {
    if constexpr (kStages == 1) {
      __syncthreads();
      if (more) load(index + 1, tiles);
    }
  }

 private:
  u32 shared_;
};

}  // namespace sage
