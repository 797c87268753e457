// Consequences of a Hopper kernel's shape: warpgroups, registers, and how its consumers' products overlap.
#pragma once

#include "sage/tile/pipeline.cuh"
#include "sage/problem/mask.cuh"

namespace sage {

constexpr i32 kWarpgroupRows = 64;  // query rows of a consumer, the M of wgmma

// Config: kHeadDim, kQk, kPv, kPvAccum, kP, kMask, kSmoothQ, kBlockM, kBlockN, kWarpM.
template <class Config>
struct WgmmaTraits {
  static constexpr i32 kConsumers = Config::kBlockM / kWarpgroupRows;  // warpgroups
  static constexpr i32 kThreads = (1 + kConsumers) * kWarpgroup;
  static constexpr i32 kProducerRegisters = kConsumers == 2 ? 24 : 32;
  static constexpr i32 kConsumerRegisters = kConsumers == 2 ? 240 : 160;
  static_assert(kConsumers == 2 || kConsumers == 3, "that many have the registers");
  static_assert(Config::kWarpM == 16 && Config::kQk == Qk::kInt8 && Config::kPv == Pv::kE4m3);
  static_assert(Config::kPvAccum == PvAccum::kTwoLevelF32);
  static_assert(Config::kBlockN == 64 || Config::kBlockN == 128, "the rows of V are the swizzle's span");

  // O of 256 channels leaves R the registers of 64. P·V is then computed for one slice of the channels after another.
  static constexpr i32 kSlices = Config::kHeadDim == 256 ? 4 : 1;
  static_assert(kSlices == 1 || kConsumers == 2, "O of 256 channels alone takes 128 registers");

  // Enough registers to keep P·V and Q·K in flight at once: products are one phase of a step, and consumers ping-pong.
  // Otherwise P and the scores share registers.
  static constexpr bool kTogether = kConsumers == 2;

  // A linear P takes scores in range alone, and finds out whether they are. Those of a smoothed Q are in f32, which has
  // the range.
  static constexpr bool kBoundsScores = Config::kP == P::kLinear && !Config::kSmoothQ;

  // Of a sparse mask a consumer passes over the KV tiles of which its own rows see nothing, but for those that
  // ping-pong.
  static constexpr bool kPasses = !kTogether && Config::kMask == Mask::kSparse;

  // Query rows that go over the same KV tiles. Consumers that ping-pong take equally many steps. Others leave out KV
  // tiles behind their rows' last; of a sparse mask those that they see in part come after all that every row sees.
  static constexpr i32 kRowsOfRange = kTogether || Config::kMask == Mask::kSparse ? Config::kBlockM : kWarpgroupRows;

  // R takes the P·V of two KV tiles. A smoothed Q leaves no registers for that. Slices cannot wait for a second tile:
  // they take two sets of registers alternately, and each is promoted before its set is used again.
  static constexpr bool kPairs = !Config::kSmoothQ && kSlices == 1;
  static constexpr i32 kRoom = kPairs ? 3 : 0;  // of the first tile's P, for the second

  // Whether an odd last full tile may open R: a masked step or the last P·V then completes the pair. A call whose keys
  // are whole tiles then executes no masked step. With three consumers, which dense kernels of head dim 64
  // have, this would cost a dozen register moves in the loop. Their sparse masks keep their bits where all is seen.
  static constexpr bool kOpenEnd = kPairs && Config::kHeadDim == 128;
};

}  // namespace sage
