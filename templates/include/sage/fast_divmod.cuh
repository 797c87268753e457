// Quotients and remainders by a number that the host knows: a product and shifts take the place of a division, which
// costs a hundred and more cycles at the beginning of every block.
// Source: Granlund and Montgomery, Division by Invariant Integers using Multiplication, 1994. CUTLASS has the name.
#pragma once

#include "sage/kernel_info.cuh"
#include "sage/types.cuh"

namespace sage {

struct FastDivmod {
  i32 divisor;     // 1 or more
  u32 multiplier;  // ceil(2^(31 + shift) / divisor)
  i32 shift;       // ceil(log2(divisor))

  __device__ __forceinline__ operator i32() const { return divisor; }
};

template <>
struct FieldType<FastDivmod> {
  static constexpr i32 kCode = 'D';
};

// n: 0 to 2^31 - 1. Exact: e = multiplier * divisor - 2^(31 + shift) is less than divisor, so n * e < 2^(31 + shift).
__device__ __forceinline__ i32 operator/(i32 n, const FastDivmod& by) {
  const u64 product = static_cast<u64>(static_cast<u32>(n)) * by.multiplier;
  return static_cast<i32>(static_cast<u32>(product >> 31) >> by.shift);
}

__device__ __forceinline__ i32 operator%(i32 n, const FastDivmod& by) { return n - n / by * by.divisor; }

}  // namespace sage
