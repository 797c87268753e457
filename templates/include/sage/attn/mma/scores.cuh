// The first product with mma.sync: integer scores of the query rows of a warp against one KV tile.
//
// The accumulators start at kScoreBiasBits instead of zero, so that the bits of each finished score are the float
// kScoreBias + score: no integer is converted. All products read the start value from one fragment.
// Source: SageAttention2, section 3.2 and appendix A.6.
#pragma once

#include "sage/attn/kv_scales.cuh"
#include "sage/attn/mma/softmax.cuh"
#include "sage/ptx/ldmatrix.cuh"
#include "sage/ptx/mma.cuh"
#include "sage/ptx/shared.cuh"
#include "sage/tile/layout.cuh"

namespace sage {

template <class Config>
struct IntegerScores {
  using QRows = typename TileLayout<Config>::QRows;
  using KRows = typename TileLayout<Config>::KRows;
  static constexpr i32 kMTiles = Config::kWarpM / 16, kNTiles = Config::kBlockN / 8;
  static constexpr i32 kSteps = TileLayout<Config>::kQkRowBytes / 32;  // 32 bytes of a row a product
  static_assert(kNTiles % 2 == 0, "one ldmatrix feeds two products");

  using Accumulator = i32[kMTiles][kNTiles][4];

  // Operands of ldmatrix in this lane: the shared address of its row of Q, and the offset of its row in a tile of K.
  // Q: 16 rows by two chunks, rows first. K: two groups of 8 keys by two chunks, chunks first.
  u32 q_row, k_offset;

  static constexpr float kLimit = Integers<bits_of(Config::kQk)>::kLimit;
  static_assert(Config::kHeadDim * kLimit * kLimit < 0x1p22f, "scores leave the upper bits of kScoreBias as they are");

  __device__ __forceinline__ IntegerScores(u32 sQ, i32 warp, i32 lane)
      : q_row(sQ + warp * Config::kWarpM * QRows::kPitch + QRows::offset(lane % 16, lane / 16)),
        k_offset(KRows::offset(lane / 16 * 8 + lane % 8, lane / 8 % 2)) {}

  // The scores of the KV tile in a stage; returns their scales.
  template <class Stream>
  __device__ __forceinline__ RowScales<Config> multiply(Accumulator& acc_s, const RowScales<Config>& q_scale,
                                                        const Stream& stream, u32 stage, i32 lane) const {
    multiply(acc_s, stream.k(stage));
    // A thread meets one scale of K: that of its keys 8j + 2t and 8j + 2t + 1.
    RowScales<Config> scale = q_scale.score_scales(fabsf(KvTileScales(stream.line(stage), lane).k_scale));
    if constexpr (Config::kSmoothQ) {
      add_delta(acc_s, scale, stream.delta(stage), lane);
      scale = RowScales<Config>::ones();
    }
    return scale;
  }

 private:
  __device__ __forceinline__ void multiply(Accumulator& acc_s, u32 sK) const {
    const u32 k_row = sK + k_offset;
    const i32 bias[4] = {kScoreBiasBits, kScoreBiasBits, kScoreBiasBits, kScoreBiasBits};
#pragma unroll
    for (i32 step = 0; step < kSteps; ++step) {
      u32 q[kMTiles][4];
#pragma unroll
      for (i32 m = 0; m < kMTiles; ++m) ptx::ldmatrix_x4(q[m], QRows::moved(q_row, 16 * m, 2 * step));
#pragma unroll
      for (i32 n = 0; n < kNTiles; n += 2) {
        u32 k[4];
        ptx::ldmatrix_x4(k, KRows::moved(k_row, 8 * n, 2 * step));
#pragma unroll
        for (i32 m = 0; m < kMTiles; ++m) {
          mma(acc_s[m][n], q[m], k[0], k[1], ptx::chain(step, bias, acc_s[m][n]));
          mma(acc_s[m][n + 1], q[m], k[2], k[3], ptx::chain(step, bias, acc_s[m][n + 1]));
        }
      }
    }
  }

  // Where Q is smoothed: adds the term of each key to its scores, in f32 and in log2 units, and leaves the bits of the
  // finished scores in the accumulators. sDelta: delta_s of the tile's keys.
  __device__ __forceinline__ static void add_delta(Accumulator& acc_s, const RowScales<Config>& scale, u32 sDelta,
                                                   i32 lane) {
#pragma unroll
    for (i32 n = 0; n < kNTiles; ++n) {
      const ptx::F32x2 delta = ptx::load_shared_f32x2(sDelta + (8 * n + lane % 4 * 2) * 4);
#pragma unroll
      for (i32 m = 0; m < kMTiles; ++m) {
#pragma unroll
        for (i32 c = 0; c < 4; ++c) {
          const float score = __int_as_float(acc_s[m][n][c]) - kScoreBias;
          acc_s[m][n][c] = __float_as_int(fmaf(score, scale[2 * m + c / 2], c % 2 ? delta.y : delta.x));
        }
      }
    }
  }

  __device__ __forceinline__ static void mma(i32 (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, const i32 (&c)[4]) {
    if constexpr (Config::kQk == Qk::kInt8) ptx::mma_m16n8k32_s8s8s32(d, a, b0, b1, c);
    else ptx::mma_m16n8k64_s4s4s32(d, a, b0, b1, c);
  }
};

template <class Config, Qk kQk = Config::kQk>
struct SelectScores : IntegerScores<Config> {
  using IntegerScores<Config>::IntegerScores;
};

}  // namespace sage
