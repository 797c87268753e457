// Asynchronous matrix products D = A·B + D of a warpgroup, four neighbouring warps: D has 64 x N elements, A and B have
// 32 bytes in k, and both are K-major where nothing else is said.
//   D  warp w has the rows 16w + i; of each 8 columns, its lanes hold what a lane of mma.m16n8 holds of C
//   A  in registers, as A of mma.m16n8k32 for the warp's 16 rows, or in shared memory
//   B  in shared memory
// From issue to wgmma_wait, D, A in registers, and operands in shared memory belong to the product. No thread may touch
// D or A, or write the shared memory. Between ordinary stores to the operands and the issue, fence_proxy_async() and a
// barrier must stand.
// Source: PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions".
#pragma once

#include "sage/types.cuh"

namespace sage::ptx {

// Call this before the first product, and after the threads touched registers of D or A: it orders these accesses
// before the products to come.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// Ends a group: all products since the last commit.
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most kPending groups are in flight.
template <i32 kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// The registers of D in an instruction, and as operands of the asm statement. D has N / 2 registers a thread.
#define SAGE_WGMMA_D32 \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
#define SAGE_WGMMA_D64 \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
#define SAGE_WGMMA_D16 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
#define SAGE_WGMMA_OPERANDS_8(c, d, i) \
  c(d[i]), c(d[i + 1]), c(d[i + 2]), c(d[i + 3]), c(d[i + 4]), c(d[i + 5]), c(d[i + 6]), c(d[i + 7])
#define SAGE_WGMMA_OPERANDS_32(c, d, i) \
  SAGE_WGMMA_OPERANDS_8(c, d, i), SAGE_WGMMA_OPERANDS_8(c, d, i + 8), SAGE_WGMMA_OPERANDS_8(c, d, i + 16), \
      SAGE_WGMMA_OPERANDS_8(c, d, i + 24)
#define SAGE_WGMMA_OPERANDS_64(c, d, i) SAGE_WGMMA_OPERANDS_32(c, d, i), SAGE_WGMMA_OPERANDS_32(c, d, i + 32)

// s8 · s8 in s32; a, b: matrix descriptors of shared memory. Where accumulate is false, D = A·B.
__device__ __forceinline__ void wgmma_m64k32(i32 (&d)[32], u64 a, u64 b, bool accumulate) {
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %34, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k32.s32.s8.s8 " SAGE_WGMMA_D32 "%32, %33, p;}"
      : SAGE_WGMMA_OPERANDS_32("+r", d, 0)
      : "l"(a), "l"(b), "r"(static_cast<i32>(accumulate)));
}

__device__ __forceinline__ void wgmma_m64k32(i32 (&d)[64], u64 a, u64 b, bool accumulate) {
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k32.s32.s8.s8 " SAGE_WGMMA_D64 "%64, %65, p;}"
      : SAGE_WGMMA_OPERANDS_64("+r", d, 0)
      : "l"(a), "l"(b), "r"(static_cast<i32>(accumulate)));
}

// The products of the backward kernels, of 64 columns. d: s32, or f32 as bits, so that products of all types may share
// registers; a: a matrix descriptor, or registers. In 16 bits a row has 16 elements in k, the same 32 bytes.
#define SAGE_WGMMA_SHARED(name, shape, scales) \
  __device__ __forceinline__ void name(i32 (&d)[32], u64 a, u64 b, bool accumulate) { \
    asm volatile( \
        "{.reg .pred p; setp.ne.b32 p, %34, 0;\n" \
        "wgmma.mma_async.sync.aligned." shape " " SAGE_WGMMA_D32 "%32, %33, p" scales ";}" \
        : SAGE_WGMMA_OPERANDS_32("+r", d, 0) \
        : "l"(a), "l"(b), "r"(static_cast<i32>(accumulate))); \
  }
#define SAGE_WGMMA_HELD(name, shape, scales) \
  __device__ __forceinline__ void name(i32 (&d)[32], const u32 (&a)[4], u64 b, bool accumulate) { \
    asm volatile( \
        "{.reg .pred p; setp.ne.b32 p, %37, 0;\n" \
        "wgmma.mma_async.sync.aligned." shape " " SAGE_WGMMA_D32 "{%32, %33, %34, %35}, %36, p" scales ";}" \
        : SAGE_WGMMA_OPERANDS_32("+r", d, 0) \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<i32>(accumulate))); \
  }
SAGE_WGMMA_HELD(wgmma_m64k32, "m64n64k32.s32.s8.s8", "")
SAGE_WGMMA_HELD(wgmma_m64n64_f16, "m64n64k16.f32.f16.f16", ", 1, 1, 0")
SAGE_WGMMA_HELD(wgmma_m64n64_bf16, "m64n64k16.f32.bf16.bf16", ", 1, 1, 0")
SAGE_WGMMA_SHARED(wgmma_m64n64_f16, "m64n64k16.f32.f16.f16", ", 1, 1, 0, 0")
SAGE_WGMMA_SHARED(wgmma_m64n64_bf16, "m64n64k16.f32.bf16.bf16", ", 1, 1, 0, 0")
#undef SAGE_WGMMA_SHARED
#undef SAGE_WGMMA_HELD

// Of 16-bit floats, b: not K-major but the rows of k, of 64 columns each. d is added to.
#define SAGE_WGMMA_ROWS_OF_K(name, shape) \
  __device__ __forceinline__ void name(float (&d)[32], const u32 (&a)[4], u64 b) { \
    asm volatile("wgmma.mma_async.sync.aligned." shape " " SAGE_WGMMA_D32 "{%32, %33, %34, %35}, %36, 1, 1, 1, 1;" \
                 : SAGE_WGMMA_OPERANDS_32("+f", d, 0) \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)); \
  }
SAGE_WGMMA_ROWS_OF_K(wgmma_m64n64_f16_rows, "m64n64k16.f32.f16.f16")
SAGE_WGMMA_ROWS_OF_K(wgmma_m64n64_bf16_rows, "m64n64k16.f32.bf16.bf16")
#undef SAGE_WGMMA_ROWS_OF_K

// Of bf16, both operands the rows of k in shared memory: a of 64 columns, b of as many as D has. Where accumulate is
// false, D = A·B.
__device__ __forceinline__ void wgmma_bf16_columns_by_rows(i32 (&d)[32], u64 a, u64 b, bool accumulate) {
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %34, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " SAGE_WGMMA_D32 "%32, %33, p, 1, 1, 1, 1;}"
      : SAGE_WGMMA_OPERANDS_32("+r", d, 0)
      : "l"(a), "l"(b), "r"(static_cast<i32>(accumulate)));
}

__device__ __forceinline__ void wgmma_bf16_columns_by_rows(i32 (&d)[16], u64 a, u64 b, bool accumulate) {
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %18, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 " SAGE_WGMMA_D16 "%16, %17, p, 1, 1, 1, 1;}"
      : SAGE_WGMMA_OPERANDS_8("+r", d, 0), SAGE_WGMMA_OPERANDS_8("+r", d, 8)
      : "l"(a), "l"(b), "r"(static_cast<i32>(accumulate)));
}

// Registers of D for N = 72 and N = 136: eight columns more than D32 and D64.
#define SAGE_WGMMA_D36 \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35}, "
#define SAGE_WGMMA_D68 \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, %65, %66, %67}, "
#define SAGE_WGMMA_OPERANDS_4(c, d, i) c(d[i]), c(d[i + 1]), c(d[i + 2]), c(d[i + 3])

// e4m3 · e4m3 in f32; a: registers, b: matrix descriptor of shared memory, d: f32 as bits, so that it may share
// registers with a product of integers.
__device__ __forceinline__ void wgmma_m64k32(u32 (&d)[32], const u32 (&a)[4], u64 b, bool accumulate) {
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %37, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 " SAGE_WGMMA_D32 "{%32, %33, %34, %35}, %36, p, 1, 1;}"
      : SAGE_WGMMA_OPERANDS_32("+r", d, 0)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<i32>(accumulate)));
}

__device__ __forceinline__ void wgmma_m64k32(u32 (&d)[36], const u32 (&a)[4], u64 b, bool accumulate) {
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %41, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n72k32.f32.e4m3.e4m3 " SAGE_WGMMA_D36 "{%36, %37, %38, %39}, %40, p, 1, 1;}"
      : SAGE_WGMMA_OPERANDS_32("+r", d, 0), SAGE_WGMMA_OPERANDS_4("+r", d, 32)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<i32>(accumulate)));
}

__device__ __forceinline__ void wgmma_m64k32(u32 (&d)[68], const u32 (&a)[4], u64 b, bool accumulate) {
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %73, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n136k32.f32.e4m3.e4m3 " SAGE_WGMMA_D68 "{%68, %69, %70, %71}, %72, p, 1, 1;}"
      : SAGE_WGMMA_OPERANDS_64("+r", d, 0), SAGE_WGMMA_OPERANDS_4("+r", d, 64)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<i32>(accumulate)));
}

#undef SAGE_WGMMA_D16
#undef SAGE_WGMMA_D32
#undef SAGE_WGMMA_D64
#undef SAGE_WGMMA_D36
#undef SAGE_WGMMA_D68
#undef SAGE_WGMMA_OPERANDS_4
#undef SAGE_WGMMA_OPERANDS_8
#undef SAGE_WGMMA_OPERANDS_32
#undef SAGE_WGMMA_OPERANDS_64

}  // namespace sage::ptx
