// The stages in shared memory between a thread that copies tiles of consecutive bytes by TMA bulk copies and the
// warpgroups whose products read them, the consumers.
#pragma once

#include "sage/ptx/bulk_copy.cuh"
#include "sage/ptx/mbarrier.cuh"
#include "sage/tile/pipeline.cuh"

namespace sage {

// kTileBytes: of all copies into a stage.
template <i32 kTileBytes, i32 kStages, i32 kConsumers>
class BulkPipeline {
  static constexpr i32 kStageBytes = ceil_div(kTileBytes, 1024) * 1024;  // a descriptor's matrix begins at a multiple
  static constexpr i32 kBarriers = kStages * kStageBytes;

 public:
  using Stage = PipelineState<kStages>;
  static constexpr i32 kBytes = kBarriers + 1024;  // what follows begins at a multiple of 1024
  static_assert(kStages * 16 <= 1024);

  __device__ __forceinline__ explicit BulkPipeline(u32 shared) : shared_(shared) {}

  // Call with one thread, in front of a barrier of the block.
  __device__ __forceinline__ void init() const {
#pragma unroll
    for (i32 stage = 0; stage < kStages; ++stage) {
      ptx::mbarrier_init(full(stage), 1);
      ptx::mbarrier_init(empty(stage), kConsumers * kWarpgroup);
    }
    ptx::fence_mbarrier_init();
  }

  // Waits until a stage is free. The copies of its tile follow, by the same thread.
  __device__ __forceinline__ void begin(const Stage& to) const {
    ptx::mbarrier_wait(empty(to.index), to.phase ^ 1);  // at once in the first round
    ptx::mbarrier_arrive_expect_tx(full(to.index), kTileBytes);
  }
  __device__ __forceinline__ void copy(const Stage& to, i32 offset, const u8* from, i32 bytes) const {
    ptx::bulk_copy(tile(to) + offset, from, bytes, full(to.index));
  }

  // Waits for a tile, and returns where it lies.
  __device__ __forceinline__ u32 wait(const Stage& stage) const {
    ptx::mbarrier_wait(full(stage.index), stage.phase);
    return tile(stage);
  }
  // Gives a stage back, which this thread and its products have read.
  __device__ __forceinline__ void release(const Stage& stage) const { ptx::mbarrier_arrive(empty(stage.index)); }

 private:
  __device__ __forceinline__ u32 tile(const Stage& stage) const { return shared_ + stage.index * kStageBytes; }
  __device__ __forceinline__ u32 full(i32 stage) const { return shared_ + kBarriers + stage * 16; }
  __device__ __forceinline__ u32 empty(i32 stage) const { return full(stage) + 8; }

  u32 shared_;
};

}  // namespace sage
