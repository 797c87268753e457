// How the tensor cores of each arch add up floating-point products. The ISA leaves this open; the values here were
// measured.
// Source: "MMA-Sim: Bit-Accurate Reference Model of Tensor Cores and Matrix Cores" (arXiv:2511.10909); Fasi et al.,
// "Numerical behavior of NVIDIA tensor cores", PeerJ CS 2021; SageAttention2, section 3.4 for the 13 bits of FP8.
#pragma once

#include "types.h"

namespace sim {

// A step adds `products` exact products to the accumulator at once. All terms are aligned to the largest exponent among
// them and cut off `fraction_bits` below its unit. Sums in f32 are cut to `kept_bits` of mantissa.
struct Step {
  int products;
  int fraction_bits;
  int kept_bits;
};

struct Chip {
  u32 arch;  // 89: sm_89; an arch that the table lacks is like the last one before it
  Step f16;
  Step e4m3;
  bool e4m3_as_f16;  // mma.sync has no FP8: the compiler makes f16 products of FP8 ones
  Step wgmma_e4m3;
  Step nvfp4;  // products: of groups of 16 elements, each of which is exact
};

// clang-format off: a chip a line
constexpr Chip kChips[] = {
    {80, {8, 24, 23}, {}, false, {}, {}},
    {86, {8, 24, 23}, {}, false, {}, {}},
    {89, {8, 24, 23}, {16, 13, 13}, false, {}, {}},
    {90, {16, 25, 23}, {}, true, {32, 13, 13}, {}},
    {100, {16, 25, 23}, {}, true, {}, {}},
    {120, {16, 25, 23}, {32, 25, 23}, false, {}, {4, 35, 23}},
};
// clang-format on

// The chip of the launch that runs.
const Chip& chip();

}  // namespace sim
