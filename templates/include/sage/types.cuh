// Fixed-width scalar names and the enumerations that kernels are specialized on.
// No header of a toolkit or a standard library is included anywhere: every compiler sees the same text, and NVRTC needs
// no further files.
#pragma once

namespace sage {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i8 = signed char;
using i32 = int;
using i64 = long long;

// Type of the quantized Q and K in the first matrix product.
enum class Qk { kInt8, kInt4, kNvfp4 };

constexpr i32 bits_of(Qk qk) { return qk == Qk::kInt8 ? 8 : 4; }

// Type of P and V in the second matrix product.
enum class Pv { kF16, kE4m3, kNvfp4 };

// How O = P·V adds up over the KV tiles. kF32: in the accumulators of the product. kTwoLevel...: in fresh accumulators
// of the type named, for one KV tile or a pair, which a promotion then adds to O in f32.
enum class PvAccum { kF32, kTwoLevelF32, kTwoLevelF16 };

// How P follows from a score x, in log2 units less its row's reference: 2^x, or a line between the powers of two
// (attn/linear_p.cuh).
enum class P { kExp2, kLinear };

// Type of the caller's tensors; a run-time value, equal for all of them.
enum class Dtype : i32 { kF16 = 0, kBf16 = 1, kF32 = 2 };

__device__ constexpr i32 bytes_of(Dtype dtype) { return dtype == Dtype::kF32 ? 4 : 2; }

constexpr i32 kWarpSize = 32;

template <class Int>
__host__ __device__ constexpr Int ceil_div(Int a, Int b) {
  return (a + b - 1) / b;
}

}  // namespace sage
