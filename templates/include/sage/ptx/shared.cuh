// Shared memory by the 32-bit addresses that instructions take.
// Source: PTX ISA, "ld" and "st"; CUDA programming guide, "Address Space Conversion Functions".
#pragma once

#include "sage/types.cuh"

namespace sage::ptx {

// Shared-memory address of a generic pointer.
__device__ __forceinline__ u32 shared_address(const void* pointer) {
  return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ float load_shared_f32(u32 shared) {
  float x;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(shared));
  return x;
}

__device__ __forceinline__ u32 load_shared_u32(u32 shared) {
  u32 x;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(x) : "r"(shared) : "memory");
  return x;
}

__device__ __forceinline__ u32 load_shared_u16(u32 shared) {
  u32 x;
  asm volatile("{\n  .reg .b16 half;\n  ld.shared.b16 half, [%1];\n  cvt.u32.u16 %0, half;\n}"
               : "=r"(x)
               : "r"(shared)
               : "memory");
  return x;
}

__device__ __forceinline__ void store_shared_u32(u32 shared, u32 x) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(shared), "r"(x) : "memory");
}

__device__ __forceinline__ void store_shared_u16(u32 shared, u32 x) {
  asm volatile("{\n  .reg .b16 half;\n  cvt.u16.u32 half, %1;\n  st.shared.b16 [%0], half;\n}" ::"r"(shared), "r"(x)
               : "memory");
}

__device__ __forceinline__ void store_shared_u8(u32 shared, u32 x) {
  asm volatile("st.shared.u8 [%0], %1;" ::"r"(shared), "r"(x) : "memory");
}

struct F32x2 {
  float x, y;
};

__device__ __forceinline__ F32x2 load_shared_f32x2(u32 shared) {
  F32x2 pair;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(pair.x), "=f"(pair.y) : "r"(shared));
  return pair;
}

struct alignas(16) U32x4 {
  u32 x, y, z, w;
};

__device__ __forceinline__ U32x4 load_shared_u32x4(u32 shared) {
  U32x4 four;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(four.x), "=r"(four.y), "=r"(four.z), "=r"(four.w)
               : "r"(shared)
               : "memory");
  return four;
}

}  // namespace sage::ptx
