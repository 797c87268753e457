// The matrix descriptor by which wgmma finds an operand in shared memory.
// Source: PTX ISA, "Matrix-Descriptor", "Swizzling Modes".
#pragma once

#include "sage/types.cuh"

namespace sage {

// The descriptor of SwizzledRows that start at a shared address, a multiple of 8 · kPitch. Add descriptor_offset() for
// other bytes of the same rows.
template <class Rows>
__device__ __forceinline__ u64 matrix_descriptor(u32 shared) {
  constexpr i32 kPitch = Rows::kPitch;
  static_assert(kPitch == 128 || kPitch == 64 || kPitch == 32, "the panel is the swizzle's span");
  constexpr u64 kSwizzle = kPitch == 128 ? 1 : kPitch == 64 ? 2 : 3;
  constexpr u64 kLeading = 1;               // not read: the 32 bytes that a product takes of a row lie in one span
  constexpr u64 kStride = 8 * kPitch / 16;  // 16-byte units, from one eight rows to the next
  return kSwizzle << 62 | kStride << 32 | kLeading << 16 | (shared & 0x3ffff) >> 4;
}

// From the descriptor of a row's first 32 bytes to that of its bytes from 32i on.
template <class Rows>
__device__ constexpr u64 descriptor_offset(i32 i) {
  const i32 byte = 32 * i;
  return (byte / Rows::kPitch * Rows::kPanelBytes + byte % Rows::kPitch) / 16;
}

}  // namespace sage
