// sage_attn_sm80_d128_qkint4_pvf16_accf32_causal_vsmooth_qsmooth
// Written by codegen from templates/attn_mma.cu.jinja and this row of build_matrix.yaml:
//   {family: mma, arch: sm80, headdim: 128, pv: f16}
// Attention on quantized Q, K and V with mma.sync.

#include "sage/attn/mma/mainloop.cuh"

struct Config {
  static constexpr int kHeadDim = 128;  // channels
  static constexpr sage::Qk kQk = sage::Qk::kInt4;  // type of the quantized Q and K
  static constexpr sage::Pv kPv = sage::Pv::kF16;  // type of P and V
  static constexpr sage::PvAccum kPvAccum = sage::PvAccum::kF32;  // how P·V adds up
  static constexpr sage::P kP = sage::P::kExp2;  // how P follows from the scores
  static constexpr sage::Mask kMask = sage::Mask::kCausal;  // keys that a query row sees
  static constexpr bool kSmoothV = true;  // V less its mean
  static constexpr bool kSmoothQ = true;  // Q less the mean of each tile's rows
  static constexpr int kBlockM = 128;  // query rows of a block
  static constexpr int kBlockN = 64;  // keys of a KV tile
  static constexpr int kWarpM = 32;  // query rows of a warp
  static constexpr int kStages = 2;  // KV tiles in shared memory
  static constexpr int kVStages = 2;  // of these, with V
  static constexpr int kMinBlocks = 2;  // resident blocks an SM
};

using Attention = sage::AttentionMma<Config>;

extern "C" __global__ void __launch_bounds__(Attention::kThreads, Config::kMinBlocks)
sage_attn_sm80_d128_qkint4_pvf16_accf32_causal_vsmooth_qsmooth(const __grid_constant__ sage::AttnParams params) {
  extern __shared__ __align__(128) sage::u8 shared[];
  Attention::run(params, shared);
}

SAGE_KERNEL_INFO(Attention, AttnParams);
