// sage_bwdkv_sm89_d128
// Written by codegen from templates/bwd_kv.cu.jinja and this row of build_matrix.yaml:
//   {family: mma, arch: sm89, headdim: 128, pv: e4m3}
// The gradients of K and V.

#include "sage/bwd/mma/grad_kv.cuh"

struct Config {
  static constexpr int kHeadDim = 128;  // channels
  static constexpr bool kHalves = false;  // whether P and dS are multiplied in 16 bits
  static constexpr bool kSumsQ = false;  // whether blocks add up the gradient of Q, too
  static constexpr int kSharedBytes = 101376;  // that a block can have
};

using Gradient = sage::BwdKv<Config>;

extern "C" __global__ void __launch_bounds__(Gradient::kThreads, Gradient::kMinBlocks)
sage_bwdkv_sm89_d128_bf16(const __grid_constant__ sage::BwdParams params) {
  extern __shared__ __align__(1024) sage::u8 shared[];
  Gradient::run<sage::dtype_of(sage::SourceRows::kBf16), false>(params, shared);
}

extern "C" __global__ void __launch_bounds__(Gradient::kThreads, Gradient::kMinBlocks)
sage_bwdkv_sm89_d128_f16(const __grid_constant__ sage::BwdParams params) {
  extern __shared__ __align__(1024) sage::u8 shared[];
  Gradient::run<sage::dtype_of(sage::SourceRows::kF16), false>(params, shared);
}

extern "C" __global__ void __launch_bounds__(Gradient::kThreads, Gradient::kMinBlocks)
sage_bwdkv_sm89_d128_bf16_packed(const __grid_constant__ sage::BwdParams params) {
  extern __shared__ __align__(1024) sage::u8 shared[];
  Gradient::run<sage::dtype_of(sage::SourceRows::kBf16), true>(params, shared);
}

extern "C" __global__ void __launch_bounds__(Gradient::kThreads, Gradient::kMinBlocks)
sage_bwdkv_sm89_d128_f16_packed(const __grid_constant__ sage::BwdParams params) {
  extern __shared__ __align__(1024) sage::u8 shared[];
  Gradient::run<sage::dtype_of(sage::SourceRows::kF16), true>(params, shared);
}

SAGE_KERNEL_INFO(Gradient, BwdParams);
