// sage_quant_sm89_d128_qkint8_pve4m3
// Written by codegen from templates/quantize.cu.jinja and this row of build_matrix.yaml:
//   {family: mma, arch: sm89, headdim: 128, pv: e4m3}
// Quantization of Q, K and V into the tiles of the attention kernel.

#include "sage/quant/quantize.cuh"

struct Config {
  static constexpr int kHeadDim = 128;  // channels
  static constexpr sage::Qk kQk = sage::Qk::kInt8;  // type of the quantized Q and K
  static constexpr sage::Pv kPv = sage::Pv::kE4m3;  // type of the quantized V
  static constexpr int kBlockM = 128;  // query rows of a tile
  static constexpr int kOtherBlockM = 128;  // of kernels whose tiles have another height
  static constexpr int kBlockN = 64;  // keys of a tile
  static constexpr int kWarpM = 32;  // query rows of a warp of the attention kernel
  static constexpr bool kKeyNorms = false;  // whether a tile's line has norms of its keys
  static constexpr int kThreads = 256;
  static constexpr int kMinBlocks = 2;  // resident blocks an SM
  static constexpr bool kProgrammatic = false;  // launched before the launch in front of it ends
};

using Quantize = sage::Quantize<Config>;
using Statistics = sage::Statistics<Config>;

extern "C" __global__ void __launch_bounds__(Config::kThreads, Config::kMinBlocks)
sage_quant_sm89_d128_qkint8_pve4m3_bf16(const __grid_constant__ sage::QuantParams params) {
  __shared__ Quantize::Shared shared;
  Quantize{params, shared}.run<sage::SourceRows::kBf16>();
}

extern "C" __global__ void __launch_bounds__(Config::kThreads, Config::kMinBlocks)
sage_quant_sm89_d128_qkint8_pve4m3_f16(const __grid_constant__ sage::QuantParams params) {
  __shared__ Quantize::Shared shared;
  Quantize{params, shared}.run<sage::SourceRows::kF16>();
}

extern "C" __global__ void __launch_bounds__(Config::kThreads, Config::kMinBlocks)
sage_quant_sm89_d128_qkint8_pve4m3_any(const __grid_constant__ sage::QuantParams params) {
  __shared__ Quantize::Shared shared;
  Quantize{params, shared}.run<sage::SourceRows::kAny>();
}

extern "C" __global__ void __launch_bounds__(Config::kThreads, Config::kMinBlocks)
sage_quant_sm89_d128_qkint8_pve4m3_bf16_statistics(const __grid_constant__ sage::QuantParams params) {
  __shared__ Statistics::Shared shared;
  Statistics{params, shared}.run<sage::SourceRows::kBf16>();
}

extern "C" __global__ void __launch_bounds__(Config::kThreads, Config::kMinBlocks)
sage_quant_sm89_d128_qkint8_pve4m3_f16_statistics(const __grid_constant__ sage::QuantParams params) {
  __shared__ Statistics::Shared shared;
  Statistics{params, shared}.run<sage::SourceRows::kF16>();
}

extern "C" __global__ void __launch_bounds__(Config::kThreads, Config::kMinBlocks)
sage_quant_sm89_d128_qkint8_pve4m3_any_statistics(const __grid_constant__ sage::QuantParams params) {
  __shared__ Statistics::Shared shared;
  Statistics{params, shared}.run<sage::SourceRows::kAny>();
}

SAGE_KERNEL_INFO(Quantize, QuantParams);
