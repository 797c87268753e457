// Four 8x8 matrices of 16-bit elements (8 rows of 16 bytes each) between shared memory and the fragments of a warp.
// Lane 8i + r gives the address of row r of matrix i. Of each matrix, lane 4g + t holds word t of row g; with .trans,
// it holds the elements (2t, g) and (2t + 1, g).
// Source: PTX ISA, "ldmatrix", "stmatrix".
#pragma once

#include "sage/types.cuh"

namespace sage::ptx {

__device__ __forceinline__ void ldmatrix_x4(u32 (&d)[4], u32 shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
               : "r"(shared));
}

__device__ __forceinline__ void ldmatrix_x4_trans(u32 (&d)[4], u32 shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
               : "r"(shared));
}

// From sm_90 on.
__device__ __forceinline__ void stmatrix_x4(u32 shared, const u32 (&s)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(s[0]), "r"(s[1]),
               "r"(s[2]), "r"(s[3])
               : "memory");
}

}  // namespace sage::ptx
