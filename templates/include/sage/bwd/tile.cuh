// What the backward kernels read: tiles of kTileRows rows of Q and dO, or of K and V, that bwd/prepare.cuh writes.
// Each part of a tile is swizzled already, so that loading a tile into shared memory is a plain copy.
//   codes        [kTileRows][kHeadDim] s8, Q̂ or K̂ as the forward pass quantized it
//   halves       [kTileRows][kHeadDim] f16 or bf16, dO or V
//   transposed   [kHeadDim][kTileRows] s8, codes by channels, rows in the order of key_of_column()
// A tile of Q and dO also has dÔ, dO quantized by rows, transposed likewise.
#pragma once

#include "sage/tile/layout.cuh"

namespace sage {

constexpr i32 kTileRows = 64;

// Which rows of a tile of dO share a scale: group g holds the rows m with m % kGradGroups == g, so that a thread's
// columns of an accumulator have two scales.
constexpr i32 kGradGroups = 8;

template <class Config>
struct BwdTile {
  using Codes = SwizzledRows<kTileRows, Config::kHeadDim>;
  using Halves = SwizzledRows<kTileRows, 2 * Config::kHeadDim>;
  using Transposed = SwizzledRows<Config::kHeadDim, kTileRows>;

  static constexpr i32 kCodes = 0, kHalves = kTileRows * Config::kHeadDim;
  static constexpr i32 kTransposed = kHalves + kTileRows * 2 * Config::kHeadDim;
  static constexpr i32 kRowBytes = kTransposed;  // of codes and halves

  // Behind them, of K and V: the scale of every key.
  static constexpr i32 kKeyScales = kTransposed + kTileRows * Config::kHeadDim;
  static constexpr i32 kKvBytes = kKeyScales + kTileRows * sizeof(float);

  // Behind them, of Q and dO: dÔ by channels, and f32 of every query: the scale of Q̂, times softmax_scale · log2 e;
  // the log-sum-exp, negated, in log2 units, -inf where the query sees no key, or does not exist; -D, D = sum of
  // dO · O; and that times the scale of Q̂. Then the scales of dÔ.
  static constexpr i32 kGrad = kTransposed + kTileRows * Config::kHeadDim;
  static constexpr i32 kQueryScales = kGrad + kTileRows * Config::kHeadDim;
  static constexpr i32 kMinusLse = kQueryScales + kTileRows * sizeof(float);
  static constexpr i32 kMinusDelta = kMinusLse + kTileRows * sizeof(float);
  static constexpr i32 kMinusScaledDelta = kMinusDelta + kTileRows * sizeof(float);
  static constexpr i32 kGradScales = kMinusScaledDelta + kTileRows * sizeof(float);
  static constexpr i32 kQWritten = kGradScales + kGradGroups * sizeof(float);
  static constexpr i32 kQBytes = ceil_div(kQWritten, 128) * 128;
  static_assert(kKvBytes % 128 == 0, "tiles stay aligned to whole lines");
};

}  // namespace sage
