// sage_bwdq_sm80_d64
// Written by codegen from templates/bwd_q.cu.jinja and this row of build_matrix.yaml:
//   {family: mma, arch: sm80, headdim: 64, q: qraw}
// The gradient of Q.

#include "sage/bwd/mma/grad_q.cuh"

struct Config {
  static constexpr int kHeadDim = 64;  // channels
  static constexpr bool kHalves = false;  // whether P and dS are multiplied in 16 bits
  static constexpr int kSharedBytes = 166912;  // that a block can have
};

using Gradient = sage::BwdQ<Config>;

extern "C" __global__ void __launch_bounds__(Gradient::kThreads, Gradient::kMinBlocks)
sage_bwdq_sm80_d64_bf16(const __grid_constant__ sage::BwdParams params) {
  extern __shared__ __align__(1024) sage::u8 shared[];
  Gradient::run<sage::dtype_of(sage::SourceRows::kBf16), false>(params, shared);
}

extern "C" __global__ void __launch_bounds__(Gradient::kThreads, Gradient::kMinBlocks)
sage_bwdq_sm80_d64_f16(const __grid_constant__ sage::BwdParams params) {
  extern __shared__ __align__(1024) sage::u8 shared[];
  Gradient::run<sage::dtype_of(sage::SourceRows::kF16), false>(params, shared);
}

extern "C" __global__ void __launch_bounds__(Gradient::kThreads, Gradient::kMinBlocks)
sage_bwdq_sm80_d64_bf16_packed(const __grid_constant__ sage::BwdParams params) {
  extern __shared__ __align__(1024) sage::u8 shared[];
  Gradient::run<sage::dtype_of(sage::SourceRows::kBf16), true>(params, shared);
}

extern "C" __global__ void __launch_bounds__(Gradient::kThreads, Gradient::kMinBlocks)
sage_bwdq_sm80_d64_f16_packed(const __grid_constant__ sage::BwdParams params) {
  extern __shared__ __align__(1024) sage::u8 shared[];
  Gradient::run<sage::dtype_of(sage::SourceRows::kF16), true>(params, shared);
}

SAGE_KERNEL_INFO(Gradient, BwdParams);
