// The matrix products of the backward kernels by wgmma. A warpgroup has 64 rows, 16 of each warp.
#pragma once

#include "sage/bwd/columns.cuh"
#include "sage/bwd/gradient.cuh"
#include "sage/bwd/half_rows.cuh"
#include "sage/bwd/held_rows.cuh"
#include "sage/ptx/opaque.cuh"
#include "sage/ptx/wgmma.cuh"
#include "sage/tile/matrix_descriptor.cuh"

namespace sage {

constexpr i32 kRowsOfWarpgroup = 64;

// A product of 64 columns, s32 or the bits of f32. While it is in flight, its registers belong to it.
using Accumulator = ColumnTiles<i32, 1>;

// Rows as the A operand, a tile in shared memory.
template <class Rows>
struct SharedRows {
  u64 descriptor;

  __device__ __forceinline__ explicit SharedRows(u32 tile) : descriptor(matrix_descriptor<Rows>(tile)) {}
  __device__ __forceinline__ u64 step(i32 i) const { return descriptor + descriptor_offset<Rows>(i); }
};

// Rows as the A operand, in registers.
template <i32 kSteps>
struct RegisterRows {
  const u32 (&of)[kSteps][4];

  __device__ __forceinline__ const u32 (&step(i32 i) const)[4] { return of[i]; }
};
template <i32 kSteps>
__device__ __forceinline__ RegisterRows<kSteps> register_rows(const u32 (&of)[kSteps][4]) {
  return {of};
}

// The codes and the 16-bit rows of a consumer as A operands: of 64 rows of Q̂ and dO, or of K̂ and V. kHeld: in
// registers, else in a tile in shared memory.
template <class Config, bool kHeld>
class OwnRows {
  using Tile = BwdTile<Config>;

 public:
  // tile: in shared memory.
  __device__ __forceinline__ OwnRows(u32 tile, const u8* /*codes*/, i32 /*row*/, const HalfRows& /*halves*/,
                                     i32 /*lane*/)
      : tile_(tile) {}
  __device__ __forceinline__ auto codes() const { return SharedRows<typename Tile::Codes>(tile_ + Tile::kCodes); }
  __device__ __forceinline__ auto halves() const { return SharedRows<typename Tile::Halves>(tile_ + Tile::kHalves); }

 private:
  u32 tile_;
};

template <class Config>
class OwnRows<Config, true> {
 public:
  // codes: a tile in global memory, of which `row` is the warp's first. halves: from that row on.
  __device__ __forceinline__ OwnRows(u32 /*tile*/, const u8* codes, i32 row, const HalfRows& halves, i32 lane)
      : codes_(CodeRows<typename BwdTile<Config>::Codes>{codes, row}, lane), halves_(halves, lane) {}
  __device__ __forceinline__ auto codes() const { return register_rows(codes_.of[0]); }
  __device__ __forceinline__ auto halves() const { return register_rows(halves_.of[0]); }

 private:
  HeldOperand<Config::kHeadDim, 1> codes_;
  HeldOperand<2 * Config::kHeadDim, 1> halves_;
};

// The instructions that multiply 32 bytes of every row: s8 by s8, and of 16-bit floats.
struct WgmmaS8 {
  template <class A>
  __device__ __forceinline__ static void issue(i32 (&d)[32], const A& a, u64 b, bool accumulate) {
    ptx::wgmma_m64k32(d, a, b, accumulate);
  }
};
template <Dtype kDtype>
struct WgmmaHalf {
  template <class A>
  __device__ __forceinline__ static void issue(i32 (&d)[32], const A& a, u64 b, bool accumulate) {
    if constexpr (kDtype == Dtype::kBf16) ptx::wgmma_m64n64_bf16(d, a, b, accumulate);
    else ptx::wgmma_m64n64_f16(d, a, b, accumulate);
  }
};

// Issues the product of rows and 64 columns, rows of a tile in shared memory of the layout Columns, as a group. kAdd:
// it adds to what d holds.
template <class Multiply, class Columns, bool kAdd, class A>
__device__ __forceinline__ void issue_product(Accumulator& d, const A& rows, u32 columns) {
  const u64 b = matrix_descriptor<Columns>(columns);
  ptx::wgmma_fence();
#pragma unroll
  for (i32 i = 0; i < Columns::kRowBytes / 32; ++i) {
    Multiply::issue(reinterpret_cast<i32 (&)[32]>(d), rows.step(i), b + descriptor_offset<Columns>(i), kAdd || i > 0);
  }
  ptx::wgmma_commit();
}

// Waits until at most kPending groups are in flight. d: of a product that has ended then; the compiler, which does not
// know that the wait is for it, would read d in front of the wait.
template <i32 kPending, i32 kTiles>
__device__ __forceinline__ void wait_for(i32 (&d)[kTiles][4]) {
  ptx::wgmma_wait<kPending>();
#pragma unroll
  for (i32 n = 0; n < kTiles; ++n) {
#pragma unroll
    for (i32 c = 0; c < 4; ++c) d[n][c] = static_cast<i32>(ptx::opaque(static_cast<u32>(d[n][c])));
  }
}
template <i32 kPending>
__device__ __forceinline__ void wait_for(Accumulator& d) {
  wait_for<kPending>(d[0]);
}

// 64 rows and 64 columns of P or dS in 16 bits, as the A operand of products over the columns.
using HalfRowsOperand = u32[kTileRows / 16][4];

// Rounds to the nearest in 16 bits, in bf16 to the largest finite number at most. P alone, which is at most 1, is f16.
template <Dtype kDtype>
__device__ __forceinline__ void halve(HalfRowsOperand& halves, const ColumnTiles<float, 1>& x) {
#pragma unroll
  for (i32 n = 0; n < kColumnTiles; ++n) {
#pragma unroll
    for (i32 r = 0; r < 2; ++r) {
      const float lo = x[0][n][2 * r], hi = x[0][n][2 * r + 1];
      halves[n / 2][n % 2 * 2 + r] = kDtype == Dtype::kBf16 ? ptx::finite_bf16x2(lo, hi) : ptx::f16x2(lo, hi);
    }
  }
}

// Issues such rows times a tile of 16-bit rows in shared memory, as a group that adds to the gradient.
template <Dtype kDtype, class Config>
__device__ __forceinline__ void issue_gradient(Gradient<Config, 1>& gradient, const HalfRowsOperand& halves, u32 rows) {
  using Rows = typename BwdTile<Config>::Halves;
  ptx::wgmma_fence();
#pragma unroll
  for (i32 slice = 0; slice < Config::kHeadDim / 64; ++slice) {
    const u64 b = matrix_descriptor<Rows>(rows + slice * Rows::kPanelBytes);
#pragma unroll
    for (i32 i = 0; i < kTileRows / 16; ++i) {
      const u64 of_step = b + i * 16 * Rows::kPitch / 16;
      if constexpr (kDtype == Dtype::kBf16) ptx::wgmma_m64n64_bf16_rows(gradient.slice(slice), halves[i], of_step);
      else ptx::wgmma_m64n64_f16_rows(gradient.slice(slice), halves[i], of_step);
    }
  }
  ptx::wgmma_commit();
}

// A product in 16 bits, as f32.
__device__ __forceinline__ void as_floats(ColumnTiles<float, 1>& x, const Accumulator& d) {
#pragma unroll
  for (i32 n = 0; n < kColumnTiles; ++n) {
#pragma unroll
    for (i32 c = 0; c < 4; ++c) x[0][n][c] = __int_as_float(d[0][n][c]);
  }
}

}  // namespace sage
