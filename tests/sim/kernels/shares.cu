// The query tiles that each block of a grid takes, in its order (attn/work.cuh).

#include "sage/attn/work.cuh"
#include "sage/ptx/special.cuh"

using namespace sage;

struct SharesParams {
  i32* taken;  // [blocks][most] indices
  i32 heads, q_tiles, causal, most;
};

template <bool kCausal_>
struct OfMask {
  static constexpr bool kCausal = kCausal_;
};

template <class Config>
__device__ __forceinline__ void list(const SharesParams& of) {
  AttnParams params = {};
  params.num_heads = of.heads, params.q_tiles = of.q_tiles;
  Share<Config> share;
  u32 index;
  i32* to = of.taken + ptx::block_index() * of.most;
  while (share.next(params, index)) *to++ = static_cast<i32>(index);
}

extern "C" __global__ void shares(const __grid_constant__ SharesParams params) {
  if (ptx::thread_index() > 0) return;
  if (params.causal) list<OfMask<true>>(params);
  else list<OfMask<false>>(params);
}
