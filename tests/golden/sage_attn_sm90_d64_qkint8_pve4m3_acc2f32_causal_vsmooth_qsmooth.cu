// sage_attn_sm90_d64_qkint8_pve4m3_acc2f32_causal_vsmooth_qsmooth
// Written by codegen from templates/attn_wgmma.cu.jinja and this row of build_matrix.yaml:
//   {family: wgmma, arch: sm90, headdim: 64, mask: [full, causal]}
// Attention on quantized Q, K and V with wgmma and TMA bulk copies.

#include "sage/attn/wgmma/kernel.cuh"

struct Config {
  static constexpr int kHeadDim = 64;  // channels
  static constexpr sage::Qk kQk = sage::Qk::kInt8;  // type of the quantized Q and K
  static constexpr sage::Pv kPv = sage::Pv::kE4m3;  // type of P and V
  static constexpr sage::PvAccum kPvAccum = sage::PvAccum::kTwoLevelF32;  // how P·V adds up
  static constexpr sage::P kP = sage::P::kExp2;  // how P follows from the scores
  static constexpr sage::Mask kMask = sage::Mask::kCausal;  // keys that a query row sees
  static constexpr bool kSmoothV = true;  // V less its mean
  static constexpr bool kSmoothQ = true;  // Q less the mean of each tile's rows
  static constexpr int kBlockM = 192;  // query rows of a block
  static constexpr int kBlockN = 128;  // keys of a KV tile
  static constexpr int kWarpM = 16;  // query rows of a warp
  static constexpr int kStages = 4;  // KV tiles in shared memory
  static constexpr int kVStages = 4;  // of these, with V
  static constexpr int kMinBlocks = 1;  // resident blocks an SM
};

using Attention = sage::AttentionWgmma<Config>;

extern "C" __global__ void __launch_bounds__(Attention::kThreads, Config::kMinBlocks)
sage_attn_sm90_d64_qkint8_pve4m3_acc2f32_causal_vsmooth_qsmooth(const __grid_constant__ sage::AttnParams params) {
  extern __shared__ __align__(1024) sage::u8 shared[];
  Attention{params, Attention::Shared(shared)}.run();
}

SAGE_KERNEL_INFO(Attention, AttnParams);
