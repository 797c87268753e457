// sage_stats_sm90_d64
// Written by codegen from templates/statistics.cu.jinja and this row of build_matrix.yaml:
//   {family: wgmma, arch: sm90, headdim: 64}
// Statistics of K and V over the sequence.

#include "sage/quant/statistics.cuh"

struct Config {
  static constexpr int kHeadDim = 64;  // channels
  static constexpr int kThreads = 128;
  static constexpr int kMinBlocks = 6;  // resident blocks an SM
};

using Statistics = sage::Statistics<Config>;

extern "C" __global__ void __launch_bounds__(Config::kThreads, Config::kMinBlocks)
sage_stats_sm90_d64(const __grid_constant__ sage::StatsParams params) {
  __shared__ Statistics::Parts parts;
  Statistics{params, parts}.run();
}

SAGE_KERNEL_INFO(Statistics, StatsParams);
