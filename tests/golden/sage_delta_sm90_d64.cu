// sage_delta_sm90_d64
// Written by codegen from templates/delta_s.cu.jinja and this row of build_matrix.yaml:
//   {family: wgmma, arch: sm90, headdim: 64, mask: [full, causal]}
// delta_s, the term of the scores that smoothing Q takes off.

#include "sage/quant/delta_s.cuh"

struct Config {
  static constexpr int kHeadDim = 64;  // channels
  static constexpr int kThreads = 256;
};

using DeltaS = sage::DeltaS<Config>;

extern "C" __global__ void __launch_bounds__(Config::kThreads)
sage_delta_sm90_d64_bf16(const __grid_constant__ sage::DeltaParams params) {
  __shared__ DeltaS::Operands operands;
  DeltaS{params, operands}.run<sage::SourceRows::kBf16>();
}

extern "C" __global__ void __launch_bounds__(Config::kThreads)
sage_delta_sm90_d64_f16(const __grid_constant__ sage::DeltaParams params) {
  __shared__ DeltaS::Operands operands;
  DeltaS{params, operands}.run<sage::SourceRows::kF16>();
}

extern "C" __global__ void __launch_bounds__(Config::kThreads)
sage_delta_sm90_d64_any(const __grid_constant__ sage::DeltaParams params) {
  __shared__ DeltaS::Operands operands;
  DeltaS{params, operands}.run<sage::SourceRows::kAny>();
}

SAGE_KERNEL_INFO(DeltaS, DeltaParams);
