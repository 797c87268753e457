// sage_bwdprep_sm90_d64_qkint8_pve4m3
// Written by codegen from templates/bwd_prepare.cu.jinja and this row of build_matrix.yaml:
//   {family: wgmma, arch: sm90, headdim: 64, mask: [full, causal]}
// What the backward kernels read in addition to the caller's tensors and what is saved, from Q̂, K̂, dO and O.

#include "sage/bwd/prepare.cuh"

struct Config {
  static constexpr int kHeadDim = 64;  // channels
  static constexpr bool kHalves = true;  // whether P and dS are multiplied in 16 bits
  static constexpr sage::Qk kQk = sage::Qk::kInt8;  // type of the quantized Q and K
  static constexpr sage::Pv kPv = sage::Pv::kE4m3;  // type of the quantized V
  static constexpr int kBlockM = 192;  // query rows of a tile of Q̂
  static constexpr int kBlockN = 128;  // keys of a tile of K̂
  static constexpr int kWarpM = 16;  // query rows of a warp of the attention kernel
  static constexpr int kThreads = 256;
};

using Prepare = sage::BwdPrepare<Config>;

extern "C" __global__ void __launch_bounds__(Config::kThreads)
sage_bwdprep_sm90_d64_qkint8_pve4m3_bf16(const __grid_constant__ sage::BwdParams params) {
  __shared__ Prepare::Shared shared;
  Prepare{params, shared}.run<sage::SourceRows::kBf16, false>();
}

extern "C" __global__ void __launch_bounds__(Config::kThreads)
sage_bwdprep_sm90_d64_qkint8_pve4m3_f16(const __grid_constant__ sage::BwdParams params) {
  __shared__ Prepare::Shared shared;
  Prepare{params, shared}.run<sage::SourceRows::kF16, false>();
}

extern "C" __global__ void __launch_bounds__(Config::kThreads)
sage_bwdprep_sm90_d64_qkint8_pve4m3_bf16_packed(const __grid_constant__ sage::BwdParams params) {
  __shared__ Prepare::Shared shared;
  Prepare{params, shared}.run<sage::SourceRows::kBf16, true>();
}

extern "C" __global__ void __launch_bounds__(Config::kThreads)
sage_bwdprep_sm90_d64_qkint8_pve4m3_f16_packed(const __grid_constant__ sage::BwdParams params) {
  __shared__ Prepare::Shared shared;
  Prepare{params, shared}.run<sage::SourceRows::kF16, true>();
}

SAGE_KERNEL_INFO(Prepare, BwdParams);
