// The loads of one side's tiles into shared memory by cp.async, tile after tile. With two stages the next tile arrives
// while the products of this one run.
#pragma once

#include "sage/ptx/cp_async.cuh"
#include "sage/tile/copy.cuh"

namespace sage {

// kLoaded: of a tile's bytes those that are read.
template <i32 kTileBytes, i32 kLoaded, i32 kStages, i32 kThreads>
class TileStream {
 public:
  static constexpr i32 kBytes = kStages * kTileBytes;
  static_assert((kStages == 1 || kStages == 2) && kTileBytes % 128 == 0, "swizzled rows begin at a whole line");

  __device__ __forceinline__ explicit TileStream(u32 shared) : shared_(shared) {}

  // tile: in global memory.
  __device__ __forceinline__ void load(i32 index, const u8* tile) const {
    copy_async<kLoaded, kThreads>(shared_ + index % kStages * kTileBytes, tile + threadIdx.x * 16);
    ptx::cp_async_commit();
  }

  // Waits for a tile that was loaded, and returns where it lies. next: the tile behind it in global memory, or null.
  // Call with all threads, tile after tile, and finish() when the tile was read.
  __device__ __forceinline__ u32 wait(i32 index, const u8* next) const {
    ptx::cp_async_wait<0>();
    __syncthreads();  // of two stages, the other was read
    if (kStages == 2 && next != nullptr) load(index + 1, next);
    return shared_ + index % kStages * kTileBytes;
  }
  __device__ __forceinline__ void finish(i32 index, const u8* next) const {
    if constexpr (kStages == 1) {
      __syncthreads();
      if (next != nullptr) load(index + 1, next);
    }
  }

 private:
  u32 shared_;
};

}  // namespace sage
