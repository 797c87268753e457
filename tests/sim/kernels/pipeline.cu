// Hopper's instructions as an attention kernel uses them. One thread of a producer warpgroup copies tiles into the
// stages of a pipeline. Two consumer warpgroups of 64 rows multiply, S = A·Bᵀ in s8 and O += e4m3(S · scale)·V, and
// ping-pong.

#include "sage/ptx/barrier.cuh"
#include "sage/ptx/bulk_copy.cuh"
#include "sage/ptx/math.cuh"
#include "sage/ptx/mbarrier.cuh"
#include "sage/ptx/proxy.cuh"
#include "sage/ptx/setmaxnreg.cuh"
#include "sage/ptx/shared.cuh"
#include "sage/ptx/special.cuh"
#include "sage/ptx/wgmma.cuh"
#include "sage/tile/layout.cuh"
#include "sage/tile/matrix_descriptor.cuh"

using namespace sage;

struct PipelineParams {
  const u8* a;  // [blocks][128][kDepth] s8, plain rows
  const u8* b;  // [tiles][kKeys][kDepth] s8, rows swizzled
  const u8* v;  // [tiles][kChannels][kKeys] e4m3, rows swizzled, columns in the order of key_of_column()
  i32* scores;  // [blocks][128][kKeys], sums over the tiles
  float* out;   // [blocks][128][kChannels]
  float scale;
  i32 tiles;
};

constexpr i32 kRows = 64, kConsumers = 2, kDepth = 128, kKeys = 128, kChannels = 64, kStages = 2;
constexpr i32 kWarpgroup = 128, kThreads = (1 + kConsumers) * kWarpgroup;

using Rows = SwizzledRows<kRows, kDepth>;
using KeyRows = SwizzledRows<kKeys, kDepth>;
using ChannelRows = SwizzledRows<kChannels, kKeys>;

struct Shared {
  alignas(1024) u8 a[kConsumers * kRows * kDepth];
  alignas(1024) u8 b[kStages][kKeys * kDepth];
  alignas(1024) u8 v[kStages][kChannels * kKeys];
  u64 full[kStages];   // the producer arrives, and a stage's bytes; consumers wait
  u64 empty[kStages];  // each consumer warpgroup's first thread arrives; the producer waits
};

// Ping-pong: the named barrier where a consumer warpgroup waits to issue its products, and where the other one arrives.
__device__ __forceinline__ u32 barrier_of(i32 consumer) { return 1 + consumer; }

__device__ __forceinline__ void produce(const PipelineParams& params, Shared& shared) {
  for (i32 tile = 0; tile < params.tiles; ++tile) {
    const i32 stage = tile % kStages;
    const u32 full = ptx::shared_address(&shared.full[stage]);
    if (tile >= kStages) ptx::mbarrier_wait(ptx::shared_address(&shared.empty[stage]), (tile / kStages - 1) % 2);
    ptx::mbarrier_arrive_expect_tx(full, sizeof(shared.b[0]) + sizeof(shared.v[0]));
    ptx::bulk_copy(ptx::shared_address(shared.b[stage]), params.b + static_cast<i64>(tile) * sizeof(shared.b[0]),
                   sizeof(shared.b[0]), full);
    ptx::bulk_copy(ptx::shared_address(shared.v[stage]), params.v + static_cast<i64>(tile) * sizeof(shared.v[0]),
                   sizeof(shared.v[0]), full);
  }
}

// Odd tiles take A from registers, even ones from shared memory.
__device__ __forceinline__ void multiply(i32 (&s)[64], const u32 (&a)[kDepth / 32][4], u64 a_tile, u64 b_tile,
                                         bool registers) {
  ptx::wgmma_fence();
#pragma unroll
  for (i32 k = 0; k < kDepth / 32; ++k) {
    if (registers) ptx::wgmma_m64k32(s, a[k], b_tile + descriptor_offset<KeyRows>(k), k > 0);
    else ptx::wgmma_m64k32(s, a_tile + descriptor_offset<Rows>(k), b_tile + descriptor_offset<KeyRows>(k), k > 0);
  }
  ptx::wgmma_commit();
  ptx::wgmma_wait<0>();
}

__device__ __forceinline__ void consume(const PipelineParams& params, Shared& shared, i32 consumer) {
  const i32 thread = ptx::thread_index() % kWarpgroup, warp = thread / kWarpSize, lane = thread % kWarpSize;
  const i32 row = consumer * kRows + 16 * warp + lane / 4;
  const u8* own = shared.a + consumer * kRows * kDepth;
  u32 a[kDepth / 32][4];
#pragma unroll
  for (i32 k = 0; k < kDepth / 32; ++k) {
#pragma unroll
    for (i32 i = 0; i < 4; ++i) {
      const i32 r = 16 * warp + lane / 4 + 8 * (i % 2), column = 32 * k + 16 * (i / 2) + 4 * (lane % 4);
      a[k][i] = *reinterpret_cast<const u32*>(own + Rows::offset(r, column / 16) + column % 16);
    }
  }
  const u64 a_tile = matrix_descriptor<Rows>(ptx::shared_address(own));
  i32 total[64] = {};
  float o[32] = {};
  for (i32 tile = 0; tile < params.tiles; ++tile) {
    const i32 stage = tile % kStages;
    ptx::mbarrier_wait(ptx::shared_address(&shared.full[stage]), tile / kStages % 2);
    ptx::barrier_sync(barrier_of(consumer), 2 * kWarpgroup);
    i32 s[64];
    multiply(s, a, a_tile, matrix_descriptor<KeyRows>(ptx::shared_address(shared.b[stage])), tile % 2);
    if (consumer == 0 || tile + 1 < params.tiles) ptx::barrier_arrive(barrier_of(1 - consumer), 2 * kWarpgroup);

    u32 p[kKeys / 32][4];
#pragma unroll
    for (i32 k = 0; k < kKeys / 32; ++k) {
#pragma unroll
      for (i32 i = 0; i < 4; ++i) {  // columns 4t.. of half i / 2: scores of 8 keys each, 4k + 2 · half and the next
        const i32 first = 4 * (4 * k + 2 * (i / 2)) + 2 * (i % 2);
        p[k][i] = ptx::e4m3x4(s[first] * params.scale, s[first + 1] * params.scale, s[first + 4] * params.scale,
                              s[first + 5] * params.scale);
      }
    }
    u32 r[32];
    const u64 v_tile = matrix_descriptor<ChannelRows>(ptx::shared_address(shared.v[stage]));
    ptx::wgmma_fence();
#pragma unroll
    for (i32 k = 0; k < kKeys / 32; ++k) ptx::wgmma_m64k32(r, p[k], v_tile + descriptor_offset<ChannelRows>(k), k > 0);
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    ptx::barrier_sync(3 + consumer, kWarpgroup);  // all four warps have read the stage
    if (thread == 0) ptx::mbarrier_arrive(ptx::shared_address(&shared.empty[stage]));
#pragma unroll
    for (i32 i = 0; i < 64; ++i) total[i] += s[i];
#pragma unroll
    for (i32 i = 0; i < 32; ++i) o[i] += __uint_as_float(r[i]);
  }
  const i64 first = static_cast<i64>(blockIdx.x) * kConsumers * kRows;
#pragma unroll
  for (i32 i = 0; i < 64; ++i) {
    params.scores[(first + row + 8 * (i / 2 % 2)) * kKeys + 8 * (i / 4) + 2 * (lane % 4) + i % 2] = total[i];
  }
#pragma unroll
  for (i32 i = 0; i < 32; ++i) {
    params.out[(first + row + 8 * (i / 2 % 2)) * kChannels + 8 * (i / 4) + 2 * (lane % 4) + i % 2] = o[i];
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, 1) pipeline(const __grid_constant__ PipelineParams params) {
  extern __shared__ __align__(1024) u8 shared[];
  Shared& memory = *reinterpret_cast<Shared*>(shared);
  const u32 thread = ptx::thread_index();
  const u8* a = params.a + static_cast<i64>(blockIdx.x) * sizeof(memory.a);
  for (i32 i = thread; i < kConsumers * kRows * kDepth; i += kThreads) {
    memory.a[Rows::offset(i / kDepth, i % kDepth / 16) + i % 16] = a[i];
  }
  ptx::fence_proxy_async();  // sA is read by wgmma
  if (thread == 0) {
    for (i32 stage = 0; stage < kStages; ++stage) {
      ptx::mbarrier_init(ptx::shared_address(&memory.full[stage]), 1);
      ptx::mbarrier_init(ptx::shared_address(&memory.empty[stage]), kConsumers);
    }
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  if (thread < kWarpgroup) {
    ptx::setmaxnreg_dec<40>();
    ptx::barrier_arrive(barrier_of(0), 2 * kWarpgroup);
    if (thread == 0) produce(params, memory);
  } else {
    ptx::setmaxnreg_inc<232>();
    consume(params, memory, thread / kWarpgroup - 1);
  }
}
