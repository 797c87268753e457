// Four 8x8 matrices of 16-bit elements (8 rows of 16 bytes each) from shared memory to the fragments of a warp.
// Lane 8i + r gives the address of row r of matrix i; lane 4g + t receives of each matrix the word t of row g, or with
// .trans the elements (2t, g) and (2t + 1, g).
// Source: PTX ISA, "ldmatrix".
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

}  // namespace sage::ptx
