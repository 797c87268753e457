// One product of a warpgroup by every wrapper of wgmma, from rows of 128, 64, 32 and 256 bytes.

#include "sage/ptx/proxy.cuh"
#include "sage/ptx/shared.cuh"
#include "sage/ptx/special.cuh"
#include "sage/ptx/wgmma.cuh"
#include "sage/tile/layout.cuh"
#include "sage/tile/matrix_descriptor.cuh"

#ifdef __CUDACC__
#include "wgmma_shapes.cuh"
#endif

using namespace sage;

struct ProductParams {
  const u8* a;  // [64][row bytes], plain rows
  const u8* b;  // [columns][row bytes], plain rows
  u32* d;       // [64][columns] i32, or the bits of f32
  i32 which;    // the wrapper, by the cases of multiply() below, plus 8 for rows of 64 bytes, 16 for 32, 24 for 256
  i32 padding;
};

constexpr i32 kRows = 64, kThreads = 128;

// kRowBytes of k for kRows rows of A, from registers or shared memory, and 2 · kSize columns.
template <class T, i32 kSize, i32 kRowBytes, bool kInRegisters>
__device__ __forceinline__ void multiply(const ProductParams& params, u8* shared) {
  constexpr i32 kColumns = 2 * kSize, kSteps = kRowBytes / 32;
  using ARows = SwizzledRows<kRows, kRowBytes>;
  using BRows = SwizzledRows<kColumns, kRowBytes>;
  const i32 thread = ptx::thread_index(), warp = thread / kWarpSize, lane = thread % kWarpSize;
  u8 *sA = shared, *sB = shared + kRows * kRowBytes;
  for (i32 i = thread; i < kRows * kRowBytes; i += kThreads) {
    sA[ARows::offset(i / kRowBytes, i % kRowBytes / 16) + i % 16] = params.a[i];
  }
  for (i32 i = thread; i < kColumns * kRowBytes; i += kThreads) {
    sB[BRows::offset(i / kRowBytes, i % kRowBytes / 16) + i % 16] = params.b[i];
  }
  u32 a[kSteps][4];
#pragma unroll
  for (i32 k = 0; k < kSteps; ++k) {
#pragma unroll
    for (i32 i = 0; i < 4; ++i) {
      const i32 row = 16 * warp + lane / 4 + 8 * (i % 2), byte = 32 * k + 16 * (i / 2) + 4 * (lane % 4);
      a[k][i] = *reinterpret_cast<const u32*>(params.a + row * kRowBytes + byte);
    }
  }
  ptx::fence_proxy_async();
  __syncthreads();
  const u64 a_tile = matrix_descriptor<ARows>(ptx::shared_address(sA));
  const u64 b_tile = matrix_descriptor<BRows>(ptx::shared_address(sB));
  T d[kSize];
  ptx::wgmma_fence();
#pragma unroll
  for (i32 k = 0; k < kSteps; ++k) {
    if constexpr (kInRegisters) ptx::wgmma_m64k32(d, a[k], b_tile + descriptor_offset<BRows>(k), k > 0);
    else ptx::wgmma_m64k32(d, a_tile + descriptor_offset<ARows>(k), b_tile + descriptor_offset<BRows>(k), k > 0);
  }
  ptx::wgmma_commit();
  ptx::wgmma_wait<0>();
  T* out = reinterpret_cast<T*>(params.d);
#pragma unroll
  for (i32 i = 0; i < kSize; ++i) {
    out[(16 * warp + lane / 4 + 8 * (i / 2 % 2)) * kColumns + 8 * (i / 4) + 2 * (lane % 4) + i % 2] = d[i];
  }
}

// The wrappers, by type, number of columns, and whether A is in registers or in shared memory.
template <i32 kRowBytes>
__device__ __forceinline__ void multiply(const ProductParams& params, u8* shared) {
  switch (params.which % 8) {
    case 0: return multiply<i32, 32, kRowBytes, true>(params, shared);
    case 1: return multiply<i32, 32, kRowBytes, false>(params, shared);
    case 2: return multiply<i32, 64, kRowBytes, true>(params, shared);
    case 3: return multiply<i32, 64, kRowBytes, false>(params, shared);
    case 4: return multiply<u32, 32, kRowBytes, true>(params, shared);
    case 5: return multiply<u32, 64, kRowBytes, true>(params, shared);
    case 6: return multiply<u32, 36, kRowBytes, true>(params, shared);
    case 7: return multiply<u32, 68, kRowBytes, true>(params, shared);
  }
}

extern "C" __global__ void __launch_bounds__(kThreads)
    warpgroup_products(const __grid_constant__ ProductParams params) {
  extern __shared__ __align__(1024) u8 shared[];
  switch (params.which / 8) {
    case 0: return multiply<128>(params, shared);
    case 1: return multiply<64>(params, shared);
    case 2: return multiply<32>(params, shared);
    case 3: return multiply<256>(params, shared);
  }
}
