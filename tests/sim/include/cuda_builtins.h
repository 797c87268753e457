// The parts of CUDA C++ that kernels use without including anything, for a host compiler; every kernel is compiled with
// this file before its first line. Keywords that only steer nvcc vanish; built-in functions call the engine.
//
// `__shared__` is `thread_local`: C++ allows that on a block-scope variable, which it makes static, and on an extern
// array, which the engine then defines; all threads of a simulated block run in one thread of the host and share both.
// Source: CUDA C++ programming guide, "C++ Language Extensions".
#pragma once

#include "sim/engine.h"

#if !defined(__FMA__) && !defined(__aarch64__)
#error "nvcc turns a * b + c into one fused multiply-add; this processor has none, so results would differ"
#endif

#define __host__
#define __device__
// Not compiled where nobody calls it; hidden, or libraries of one name for their shared memory would share it.
#define __global__ inline __attribute__((visibility("hidden")))
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __shared__ thread_local
#define __align__(bytes) __attribute__((aligned(bytes)))

extern const sim::Index &threadIdx, &blockIdx, &blockDim, &gridDim;

inline void __syncthreads(sim::Site site = sim::Site::here()) { sim::synchronize("__syncthreads", true, site); }
inline void __syncwarp(sim::Site site = sim::Site::here()) { sim::synchronize_warp(site); }
inline int __syncthreads_and(int predicate, sim::Site site = sim::Site::here()) {
  return sim::synchronize("__syncthreads_and", predicate != 0, site);
}
inline unsigned atomicOr(unsigned* address, unsigned value, sim::Site site = sim::Site::here()) {
  return sim::atomic_or(address, value, site);
}
inline unsigned atomicAdd(unsigned* address, unsigned value, sim::Site site = sim::Site::here()) {
  return sim::atomic_add(address, value, site);
}
inline unsigned __cvta_generic_to_shared(const void* pointer, sim::Site site = sim::Site::here()) {
  return sim::shared_address(pointer, site);
}

inline int __float_as_int(float x) { return __builtin_bit_cast(int, x); }
inline unsigned __float_as_uint(float x) { return __builtin_bit_cast(unsigned, x); }
inline float __int_as_float(int x) { return __builtin_bit_cast(float, x); }
inline float __uint_as_float(unsigned x) { return __builtin_bit_cast(float, x); }

constexpr int min(int a, int b) { return b < a ? b : a; }
constexpr int max(int a, int b) { return a < b ? b : a; }
constexpr unsigned min(unsigned a, unsigned b) { return b < a ? b : a; }
constexpr unsigned max(unsigned a, unsigned b) { return a < b ? b : a; }

// IEEE 754-2008 minNum and maxNum: the other operand where one is NaN; -0 counts as less than +0.
inline float fmaxf(float a, float b) {
  if (a != a) return b;
  if (a == b) return __int_as_float(__float_as_int(a) & __float_as_int(b));
  return a < b ? b : a;
}
inline float fminf(float a, float b) { return -fmaxf(-a, -b); }
inline float fmaf(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
// Rounded down: the nearest, or the float below it where the sum's exact rest is negative.
inline float __fmaf_rd(float a, float b, float c) {
  const float nearest = fmaf(a, b, c);
  const double product = static_cast<double>(a) * b, total = product + c, part = total - product;
  const double lost = (product - (total - part)) + (c - part);
  return nearest - total > lost ? __builtin_nextafterf(nearest, -__builtin_inff()) : nearest;
}
inline float fabsf(float x) { return __builtin_fabsf(x); }
inline float ceilf(float x) { return __builtin_ceilf(x); }
