// Predicated loads from global memory, around which the compiler would branch in C++, and stores of 8 and 16 bytes,
// which it would split.
// Source: PTX ISA, "ld" and "st".
#pragma once

#include "sage/ptx/shared.cuh"

namespace sage::ptx {

// `address`: a multiple of 16. Returns zeros, and reads nothing, where `exists` is false.
__device__ __forceinline__ U32x4 load_global_u32x4(const void* address, bool exists) {
  U32x4 x;
  asm volatile(
      "{\n"
      "  .reg .pred exists;\n"
      "  setp.ne.s32 exists, %5, 0;\n"
      "  mov.b32 %0, 0;\n"
      "  mov.b32 %1, 0;\n"
      "  mov.b32 %2, 0;\n"
      "  mov.b32 %3, 0;\n"
      "  @exists ld.global.v4.b32 {%0, %1, %2, %3}, [%4];\n"
      "}"
      : "=&r"(x.x), "=&r"(x.y), "=&r"(x.z), "=&r"(x.w)
      : "l"(address), "r"(static_cast<i32>(exists)));
  return x;
}

// Returns `otherwise`, and reads nothing, where `exists` is false. Not volatile, so that a load whose result nobody
// uses costs nothing. The compiler may move it in front of grid_dependency_wait(). It moves none in today's kernels:
// look for ACQBULK in front of all loads, where a kernel reads what the launch in front of it left.
__device__ __forceinline__ i32 load_global_i32(const i32* address, bool exists, i32 otherwise) {
  i32 x;
  asm("{\n"
      "  .reg .pred exists;\n"
      "  setp.ne.s32 exists, %2, 0;\n"
      "  mov.b32 %0, %3;\n"
      "  @exists ld.global.b32 %0, [%1];\n"
      "}"
      : "=&r"(x)
      : "l"(address), "r"(static_cast<i32>(exists)), "r"(otherwise));
  return x;
}

// `address`: a multiple of 8.
__device__ __forceinline__ void store_global_f32x2(float* address, const F32x2& x) {
  asm volatile("st.global.v2.f32 [%0], {%1, %2};" ::"l"(address), "f"(x.x), "f"(x.y) : "memory");
}

// `address`: a multiple of 16.
__device__ __forceinline__ void store_global_u32x4(void* address, const U32x4& x) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
               : "memory");
}

}  // namespace sage::ptx
