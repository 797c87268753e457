// The matrix products of the backward kernels by mma.sync. A warp has kM times 16 rows.
#pragma once

#include "sage/bwd/gradient.cuh"
#include "sage/bwd/held_rows.cuh"
#include "sage/bwd/mma/rounded_rows.cuh"
#include "sage/ptx/ldmatrix.cuh"
#include "sage/ptx/mma.cuh"

namespace sage {

// Rows as the A operand, read from a tile in shared memory, of which `row` is the first.
template <class Swizzle>
struct SharedOperand {
  u32 address;

  __device__ __forceinline__ SharedOperand(u32 tile, i32 row, i32 lane)
      : address(Swizzle::moved(tile + Swizzle::offset(lane % 16, lane / 16), row, 0)) {}

  __device__ __forceinline__ void get(i32 m, i32 step, u32 (&a)[4]) const {
    ptx::ldmatrix_x4(a, Swizzle::moved(address, 16 * m, 2 * step));
  }
};

// The instructions that add a product of 32 bytes of every row to c: s8 by s8, u8 by s8, and of 16-bit floats.
struct S8 {
  __device__ __forceinline__ void operator()(i32 (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, const i32 (&c)[4]) const {
    ptx::mma_m16n8k32_s8s8s32(d, a, b0, b1, c);
  }
};
struct U8 {
  __device__ __forceinline__ void operator()(i32 (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, const i32 (&c)[4]) const {
    ptx::mma_m16n8k32_u8s8s32(d, a, b0, b1, c);
  }
};
template <Dtype kDtype>
struct Half {
  __device__ __forceinline__ void operator()(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1,
                                             const float (&c)[4]) const {
    if constexpr (kDtype == Dtype::kBf16) ptx::mma_m16n8k16_bf16bf16f32(d, a, b0, b1, c);
    else ptx::mma_m16n8k16_f16f16f32(d, a, b0, b1, c);
  }
};

// Adds the products of rows and of a tile in shared memory to acc, of the kN column tiles from `first` on.
template <class Swizzle, class T, i32 kM, i32 kN, class Operand, class Multiply>
__device__ __forceinline__ void multiply_rows(T (&acc)[kM][kN][4], const Operand& rows, u32 tile, i32 lane,
                                              Multiply multiply, i32 first = 0) {
  // Two groups of 8 rows by two chunks, chunks first.
  const u32 columns = tile + Swizzle::offset(lane / 16 * 8 + lane % 8, lane / 8 % 2);
#pragma unroll
  for (i32 step = 0; step < Swizzle::kRowBytes / 32; ++step) {
    u32 a[kM][4];
#pragma unroll
    for (i32 m = 0; m < kM; ++m) rows.get(m, step, a[m]);
#pragma unroll
    for (i32 n = 0; n < kN; n += 2) {
      u32 b[4];
      ptx::ldmatrix_x4(b, Swizzle::moved(columns, 8 * (first + n), 2 * step));
#pragma unroll
      for (i32 m = 0; m < kM; ++m) {
        multiply(acc[m][n], a[m], b[0], b[1], acc[m][n]);
        multiply(acc[m][n + 1], a[m], b[2], b[3], acc[m][n + 1]);
      }
    }
  }
}

// Adds rounded rows times a transposed tile in shared memory to a gradient. Multiply: by the type of the rows' codes.
template <class Config, class Multiply, i32 kM>
__device__ __forceinline__ void add_product(Gradient<Config, kM>& gradient, const RoundedRows<kM>& rounded,
                                            u32 transposed, i32 lane) {
  using Swizzle = typename BwdTile<Config>::Transposed;
  const u32 channels = transposed + Swizzle::offset(lane % 8, lane / 8);
#pragma unroll
  for (i32 n = 0; n < Config::kHeadDim / 8; ++n) {
    u32 b[4];
    ptx::ldmatrix_x4(b, Swizzle::moved(channels, 8 * n, 0));
#pragma unroll
    for (i32 m = 0; m < kM; ++m) {
      const i32 zero[4] = {};
      i32 sum[4];
#pragma unroll
      for (i32 step = 0; step < kTileRows / 32; ++step) {
        Multiply{}(sum, rounded.codes[m][step], b[2 * step], b[2 * step + 1], ptx::chain(step, zero, sum));
      }
      gradient.add(m, n, sum, rounded.scale[m]);
    }
  }
}

}  // namespace sage
