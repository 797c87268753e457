// One instruction at a time, on operands from memory: what test_meanings.py compares with its own arithmetic.
#include "sage/numerics/nvfp4.cuh"
#include "sage/ptx/cp_async.cuh"
#include "sage/ptx/global.cuh"
#include "sage/ptx/ldmatrix.cuh"
#include "sage/ptx/math.cuh"
#include "sage/ptx/mma.cuh"
#include "sage/ptx/shared.cuh"
#include "sage/ptx/warp.cuh"

namespace ptx = sage::ptx;
using sage::i32, sage::u16, sage::u32;

struct Params {
  const u32* in;
  u32* out;
  i32 which;  // instruction
  i32 count;
};

// [count][3] operands to [count] results; a block of one warp for each 32.
extern "C" __global__ void scalars(const __grid_constant__ Params params) {
  const i32 i = blockIdx.x * 32 + threadIdx.x;
  if (i >= params.count) return;
  const u32 a = params.in[3 * i], b = params.in[3 * i + 1], c = params.in[3 * i + 2];
  const float x = __uint_as_float(a), y = __uint_as_float(b);
  u32 result = 0;
  switch (params.which) {
    case 0: result = ptx::f16x2(x, y); break;
    case 1: result = ptx::bf16x2(x, y); break;
    case 2: result = ptx::e4m3x2(x, y); break;
    case 3: result = __float_as_uint(ptx::f32_from_f16(static_cast<u16>(a))); break;
    case 4: result = __float_as_uint(ptx::ex2(x)); break;
    case 5: result = __float_as_uint(ptx::lg2(x)); break;
    case 6: result = __float_as_uint(ptx::rcp(x)); break;
    case 7: result = __float_as_uint(ptx::max_nan(x, y)); break;
    case 8: result = ptx::prmt(a, b, c); break;
    case 9: result = __float_as_uint(fmaxf(x, y)); break;
    case 10: result = __float_as_uint(fminf(x, y)); break;
    case 11: result = __float_as_uint(x * y + __uint_as_float(c)); break;
    case 12: result = ptx::max_nan_bf16x2(a, b); break;
    case 13: result = ptx::min_nan_bf16x2(a, b); break;
    case 14: result = ptx::max_nan_f16x2(a, b); break;
    case 15: result = ptx::min_nan_f16x2(a, b); break;
    case 16: result = ptx::popcount(a); break;
    case 17: result = __float_as_uint(ptx::min_nan(x, y)); break;
    case 18: result = ptx::e2m1x8({x, y, -x, -y, 0.0f, 1.0f, 2.0f, 3.0f}); break;
    case 19: result = sage::e2m1(x, y); break;
    case 20: result = __float_as_uint(sage::f32_from_ue4m3(a)); break;
    case 21: result = __float_as_uint(sage::inv_nvfp4_scale(a)); break;
    case 22: result = ptx::finite_f16x2(x, y); break;
    case 23: result = ptx::finite_bf16x2(x, y); break;
    case 24: result = __float_as_uint(__fmaf_rd(x, y, __uint_as_float(c))); break;
  }
  params.out[i] = result;
}

// [32 lanes][4 words of A, 2 of B, 4 of C] to [32][4]; a block a product.
extern "C" __global__ void products(const __grid_constant__ Params params) {
  const u32* in = params.in + (blockIdx.x * 32 + threadIdx.x) * 10;
  u32* out = params.out + (blockIdx.x * 32 + threadIdx.x) * 4;
  const u32 a[4] = {in[0], in[1], in[2], in[3]};
  const u32 b0 = in[4], b1 = in[5];
  u32 c[4] = {in[6], in[7], in[8], in[9]};
  u32 (&half)[2] = reinterpret_cast<u32 (&)[2]>(c);
  i32 (&whole)[4] = reinterpret_cast<i32 (&)[4]>(c);
  float (&real)[4] = reinterpret_cast<float (&)[4]>(c);
  switch (params.which) {
    case 0: ptx::mma_m16n8k32_s8s8s32(whole, a, b0, b1, whole); break;
    case 1: ptx::mma_m16n8k64_s4s4s32(whole, a, b0, b1, whole); break;
    case 2: ptx::mma_m16n8k16_f16f16f32(real, a, b0, b1, real); break;
    case 3: ptx::mma_m16n8k32_e4m3e4m3f32(real, a, b0, b1, real); break;
    case 4: ptx::mma_m16n8k32_e4m3e4m3f16(half, a, b0, b1, half); break;
    case 5: ptx::mma_m16n8k32_u8s8s32(whole, a, b0, b1, whole); break;
    case 6: ptx::mma_m16n8k16_bf16bf16f32(real, a, b0, b1, real); break;
  }
  for (i32 i = 0; i < 4; ++i) out[i] = c[i];
}

// [32 lanes][4 words of A, 2 of B, 4 of C, scales of A and of B] to [32][4]; a block a product. which: 0 for FP8, for
// NVFP4 one more than the lane with the scales of B.
extern "C" __global__ void scaled_products(const __grid_constant__ Params params) {
  const u32* in = params.in + (blockIdx.x * 32 + threadIdx.x) * 12;
  float* out = reinterpret_cast<float*>(params.out) + (blockIdx.x * 32 + threadIdx.x) * 4;
  const u32 a[4] = {in[0], in[1], in[2], in[3]};
  float c[4];
  for (i32 i = 0; i < 4; ++i) c[i] = __uint_as_float(in[6 + i]);
  if (params.which == 0) {
    ptx::mma_m16n8k32_mxf8_e4m3e4m3f32(c, a, in[4], in[5], c, in[10], in[11]);
  } else {
    ptx::mma_m16n8k64_nvfp4_e2m1e2m1f32(c, a, in[4], in[5], c, in[10], in[11], static_cast<u16>(params.which - 1));
  }
  for (i32 i = 0; i < 4; ++i) out[i] = c[i];
}

// [32][4 words] of shared memory, a row of 16 bytes each, to [32][4].
extern "C" __global__ void matrices(const __grid_constant__ Params params) {
  extern __shared__ __align__(128) unsigned char shared[];
  const u32 row = ptx::shared_address(shared) + threadIdx.x * 16;
  ptx::cp_async_16(row, params.in + threadIdx.x * 4);
  ptx::cp_async_commit();
  ptx::cp_async_wait<0>();
  __syncthreads();
  u32 d[4];
  if (params.which == 0) ptx::ldmatrix_x4(d, row);
  else ptx::ldmatrix_x4_trans(d, row);
  for (i32 i = 0; i < 4; ++i) params.out[threadIdx.x * 4 + i] = d[i];
}

// [32][4 words], fragments of a lane each, to [32][4], a row of 16 bytes each.
extern "C" __global__ void matrices_back(const __grid_constant__ Params params) {
  extern __shared__ __align__(128) unsigned char shared[];
  u32 s[4];
  for (i32 i = 0; i < 4; ++i) s[i] = params.in[threadIdx.x * 4 + i];
  ptx::stmatrix_x4(ptx::shared_address(shared) + threadIdx.x * 16, s);
  __syncwarp();
  const u32 row = ptx::shared_address(shared) + threadIdx.x * 16;
  ptx::store_global_u32x4(params.out + threadIdx.x * 4, ptx::load_shared_u32x4(row));
}

// [64] f32 of two warps to [64]; which: the lanes that differ, or -1 for a vote on x > 0, -2 and -3 for sum and maximum
// over 8 neighbours, -4 for the bits of all lanes' votes, -5 for x of the lane that x names.
extern "C" __global__ void exchanges(const __grid_constant__ Params params) {
  const float x = __uint_as_float(params.in[threadIdx.x]);
  float y = 0.0f;
  if (params.which >= 0) y = ptx::shuffle_xor(x, params.which);
  else if (params.which == -1) y = ptx::any(x > 0.0f) ? 1.0f : 0.0f;
  else if (params.which == -2) y = ptx::sum_over_lanes<8>(x);
  else if (params.which == -3) y = ptx::max_over_lanes<8>(x);
  else if (params.which == -4) y = __uint_as_float(ptx::ballot(x > 0.0f));
  else y = static_cast<float>(ptx::shuffle(static_cast<i32>(x), static_cast<i32>(x)));
  params.out[threadIdx.x] = __float_as_uint(y);
}
