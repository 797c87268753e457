// The matrix descriptor by which wgmma finds an operand in shared memory.
// Source: PTX ISA, "Matrix-Descriptor", "Swizzling Modes".
#pragma once

#include "sage/types.cuh"

namespace sage {

// The descriptor of the operand that starts at a shared address: rows of kRowBytes in the swizzle of SwizzledRows, in
// groups of eight. A tile starts at a multiple of 8 · kRowBytes. Add kNextK for the next 32 bytes of the same rows.
template <i32 kRowBytes>
__device__ __forceinline__ u64 matrix_descriptor(u32 shared) {
  static_assert(kRowBytes == 128 || kRowBytes == 64 || kRowBytes == 32, "the row is the swizzle's span");
  constexpr u64 kSwizzle = kRowBytes == 128 ? 1 : kRowBytes == 64 ? 2 : 3;
  constexpr u64 kLeading = 1;  // 16-byte units; where one swizzle's span is the whole row there is no next to lead to
  constexpr u64 kStride = 8 * kRowBytes / 16;  // 16-byte units, from one eight rows to the next
  return kSwizzle << 62 | kStride << 32 | kLeading << 16 | (shared & 0x3ffff) >> 4;
}

// From the descriptor of 32 bytes of a row to that of the 32 bytes after them.
constexpr u64 kNextK = 32 / 16;

}  // namespace sage
