// The stages in shared memory between the warpgroup that copies tiles, the producer, and those whose products read
// them, the consumers. A tile is BwdTile's stage: a thread of the producer copies its codes and its side by TMA bulk
// copies, and all of them its rows of the caller, whose stride a bulk copy does not know, by cp.async.
#pragma once

#include "sage/tile/pipeline.cuh"
#include "sage/ptx/bulk_copy.cuh"
#include "sage/ptx/cp_async.cuh"
#include "sage/ptx/mbarrier.cuh"
#include "sage/ptx/proxy.cuh"

namespace sage {

template <class Tile, i32 kTileBytes, i32 kStages, i32 kConsumers>
class TilePipeline {
 public:
  using Stage = PipelineState<kStages>;
  static constexpr i32 kStageBytes = ceil_div(kTileBytes, 1024) * 1024;  // a descriptor's matrix begins at a multiple
  static constexpr i32 kBytes = kStages * (kStageBytes + 16);

  __device__ __forceinline__ explicit TilePipeline(u32 shared) : shared_(shared) {}

  // Call with one thread, in front of a barrier of the block.
  __device__ __forceinline__ void init() const {
#pragma unroll
    for (i32 stage = 0; stage < kStages; ++stage) {
      ptx::mbarrier_init(full(stage), kWarpgroup + 1);
      ptx::mbarrier_init(empty(stage), kConsumers * kWarpgroup);
    }
    ptx::fence_mbarrier_init();
  }

  // Copies tiles with the threads of the producer, which may have begun other copies: those arrive with the first tile.
  // Tiles: as KeyTiles.
  template <class Tiles>
  __device__ __forceinline__ void produce(Tiles& tiles, i32 count) const {
    Stage next, landed;
#pragma unroll 1
    for (i32 i = 0; i < count; ++i, next.advance()) {
      ptx::mbarrier_wait(empty(next.index), next.phase ^ 1);  // at once in the first round
      if (threadIdx.x == 0) copy_runs(tiles, next);
      tiles.copy_halves_async(tile(next));
      ptx::cp_async_commit();
      tiles.advance();
      if (i < kInFlight) continue;
      ptx::cp_async_wait<kInFlight>();
      publish(landed);
    }
    ptx::cp_async_wait<0>();
#pragma unroll 1
    for (i32 i = 0; i < min(count, kInFlight); ++i) publish(landed);
  }

  // Where the tile of a stage lies.
  __device__ __forceinline__ u32 tile(const Stage& stage) const { return shared_ + stage.index * kStageBytes; }
  // Waits for a tile, and returns where it lies.
  __device__ __forceinline__ u32 wait(const Stage& stage) const {
    ptx::mbarrier_wait(full(stage.index), stage.phase);
    return tile(stage);
  }
  // Gives a stage back, which this thread and its products have read.
  __device__ __forceinline__ void release(Stage& stage) const {
    ptx::mbarrier_arrive(empty(stage.index));
    stage.advance();
  }
  // Gives back the stages of tiles that the consumer leaves alone.
  __device__ __forceinline__ void pass(Stage& stage, i32 count) const {
#pragma unroll 1
    for (i32 i = 0; i < count; ++i) {
      wait(stage);
      release(stage);
    }
  }

 private:
  // Tiles being copied while another one begins. A consumer may wait for tile t + 1 while it holds t - 1 and t. That
  // tile is published when the copies of kInFlight more have begun: with more than kStages - 3 they would need the
  // stage of t - 1, and both sides would wait for ever.
  static constexpr i32 kInFlight = kStages - 3;
  static_assert(kInFlight > 0);

  __device__ __forceinline__ u32 full(i32 stage) const { return shared_ + kStages * kStageBytes + stage * 16; }
  __device__ __forceinline__ u32 empty(i32 stage) const { return full(stage) + 8; }

  // Begins to copy the runs of bytes of a tile.
  template <class Tiles>
  __device__ __forceinline__ void copy_runs(const Tiles& tiles, const Stage& to) const {
    const u32 barrier = full(to.index);
    ptx::mbarrier_arrive_expect_tx(barrier, Tile::kCodeBytes + Tiles::kSideBytes);
    ptx::bulk_copy(tile(to) + Tile::kCodes, tiles.codes(), Tile::kCodeBytes, barrier);
    ptx::bulk_copy(tile(to) + Tile::kSide, tiles.side(), Tiles::kSideBytes, barrier);
  }

  // Makes a tile that this thread's copies wrote visible to the products, and tells the consumers.
  __device__ __forceinline__ void publish(Stage& landed) const {
    ptx::fence_proxy_async();
    ptx::mbarrier_arrive(full(landed.index));
    landed.advance();
  }

  u32 shared_;
};

}  // namespace sage
