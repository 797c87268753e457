// The work tiles that each block of a grid draws from the tile scheduler, in its order (problem/tile_scheduler.cuh).

#include "sage/problem/tile_scheduler.cuh"
#include "sage/ptx/special.cuh"

using namespace sage;

struct SchedulerParams {
  i32* list;          // [blocks][most] indices
  u32* tile_counter;  // as in AttnParams
  i32 num_q_heads, num_kv_heads, q_tiles, kv_tiles, splits, causal, most;
};

template <Mask kMask_>
struct OfMask {
  static constexpr Mask kMask = kMask_;
  static constexpr i32 kBlockN = 128, kHeadDim = 128;
};

template <class Config>
__device__ __forceinline__ void list(const SchedulerParams& of) {
  AttnParams params = {};
  params.tile_counter = of.tile_counter;
  params.num_heads = of.num_q_heads, params.q_heads_per_kv_head.divisor = of.num_q_heads / of.num_kv_heads;
  params.q_tiles.divisor = of.q_tiles, params.splits.divisor = of.splits;
  params.seqlen_kv = of.kv_tiles * Config::kBlockN;
  i32* to = of.list + ptx::block_index() * of.most;
  TileScheduler<Config> scheduler{params};
  for (; !scheduler.ended(); scheduler.advance()) *to++ = static_cast<i32>(scheduler.index());
  scheduler.close();
}

extern "C" __global__ void tile_scheduler(const __grid_constant__ SchedulerParams params) {
  if (ptx::thread_index() > 0) return;
  if (params.causal) list<OfMask<Mask::kCausal>>(params);
  else list<OfMask<Mask::kFull>>(params);
}
