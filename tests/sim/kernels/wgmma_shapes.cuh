// Shapes of wgmma that no kernel uses, for compare.py, which compares the simulator's results with a GPU's.
#pragma once

#include "sage/types.cuh"

namespace sage::ptx {

// As in sage/ptx/wgmma.cuh.
#define SAGE_WGMMA_D64 \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
#define SAGE_WGMMA_OPERANDS_8(c, d, i) \
  c(d[i]), c(d[i + 1]), c(d[i + 2]), c(d[i + 3]), c(d[i + 4]), c(d[i + 5]), c(d[i + 6]), c(d[i + 7])
#define SAGE_WGMMA_OPERANDS_32(c, d, i) \
  SAGE_WGMMA_OPERANDS_8(c, d, i), SAGE_WGMMA_OPERANDS_8(c, d, i + 8), SAGE_WGMMA_OPERANDS_8(c, d, i + 16), \
      SAGE_WGMMA_OPERANDS_8(c, d, i + 24)
#define SAGE_WGMMA_OPERANDS_64(c, d, i) SAGE_WGMMA_OPERANDS_32(c, d, i), SAGE_WGMMA_OPERANDS_32(c, d, i + 32)

__device__ __forceinline__ void wgmma_m64k32(i32 (&d)[64], const u32 (&a)[4], u64 b, bool accumulate) {
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %69, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k32.s32.s8.s8 " SAGE_WGMMA_D64 "{%64, %65, %66, %67}, %68, p;}"
      : SAGE_WGMMA_OPERANDS_64("+r", d, 0)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<i32>(accumulate)));
}

__device__ __forceinline__ void wgmma_m64k32(u32 (&d)[64], const u32 (&a)[4], u64 b, bool accumulate) {
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %69, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 " SAGE_WGMMA_D64 "{%64, %65, %66, %67}, %68, p, 1, 1;}"
      : SAGE_WGMMA_OPERANDS_64("+r", d, 0)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<i32>(accumulate)));
}

#undef SAGE_WGMMA_D64
#undef SAGE_WGMMA_OPERANDS_8
#undef SAGE_WGMMA_OPERANDS_32
#undef SAGE_WGMMA_OPERANDS_64

}  // namespace sage::ptx
