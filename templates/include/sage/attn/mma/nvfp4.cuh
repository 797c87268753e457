// Both products in NVFP4: block-scaled mma.sync of sm120, whose accumulators keep f32.
//
// Source: SageAttention3, Algorithm 1 and section 3.2.
#pragma once

#include "sage/attn/mma/pv.cuh"
#include "sage/attn/mma/scores.cuh"
#include "sage/numerics/nvfp4.cuh"
#include "sage/ptx/warp.cuh"

namespace sage {

// The lane of a quad that has the scales of an n8 tile's columns of B. Consecutive tiles take the four lanes one after
// another, so that one word a lane holds the scales of 32 columns.
__device__ constexpr u16 scale_lane(i32 n_tile) { return static_cast<u16>(n_tile % 4); }

// The column of these 32 whose scales a lane has.
__device__ __forceinline__ i32 scaled_column(i32 lane) { return lane % 4 * 8 + lane / 4; }

// Scores in f32. delta_s starts the accumulators, in their units: scales of scores are powers of two.
template <class Config>
struct Nvfp4Scores {
  using Layout = TileLayout<Config>;
  using QRows = typename Layout::QRows;
  using KRows = typename Layout::KRows;
  static constexpr i32 kNTiles = Config::kBlockN / 8, kSteps = Config::kHeadDim / 64;  // channels a product: 64
  static constexpr i32 kScaleWords = Layout::kQkRowScales / 4;                         // of a row; one a step
  static_assert(Config::kWarpM == 16 && kNTiles % 4 == 0 && kScaleWords == kSteps);
  static_assert(Config::kSmoothQ, "delta_s starts the accumulators");

  using Accumulator = i32[1][kNTiles][4];  // bits of f32

  u32 q_row, k_offset;     // what this lane hands ldmatrix, as in IntegerScores
  u32 q_scales, k_scales;  // where its scales are: in shared memory, and from the beginning of a tile of K

  __device__ __forceinline__ Nvfp4Scores(u32 sQ, i32 warp, i32 lane)
      : q_row(sQ + warp * Config::kWarpM * QRows::kPitch + QRows::offset(lane % 16, lane / 16)),
        k_offset(KRows::offset(lane / 16 * 8 + lane % 8, lane / 8 % 2)),
        q_scales(sQ + Layout::kQScales + (warp * Config::kWarpM + lane / 4 + lane % 2 * 8) * Layout::kQkRowScales),
        k_scales(Layout::kKScales + scaled_column(lane) * Layout::kQkRowScales) {}

  template <class Stream>
  __device__ __forceinline__ RowScales<Config> multiply(Accumulator& acc_s, const RowScales<Config>& q_scale,
                                                        const Stream& stream, u32 stage, i32 lane) const {
    const u32 sK = stream.k(stage), sDelta = stream.delta(stage);
    const RowScales<Config> scale = q_scale.score_scales(fabsf(KvTileScales(stream.line(stage), lane).k_scale));
    float acc[kNTiles][4];
#pragma unroll
    for (i32 n = 0; n < kNTiles; ++n) {
      const ptx::F32x2 delta = ptx::load_shared_f32x2(sDelta + (8 * n + lane % 4 * 2) * 4);
#pragma unroll
      for (i32 c = 0; c < 4; ++c) acc[n][c] = (c % 2 ? delta.y : delta.x) * reciprocal_of_power_of_two(scale[c / 2]);
    }
    const u32 k_row = sK + k_offset;
#pragma unroll
    for (i32 step = 0; step < kSteps; ++step) {
      u32 q[4];
      ptx::ldmatrix_x4(q, QRows::moved(q_row, 0, 2 * step));
      const u32 q_word = ptx::load_shared_u32(q_scales + 4 * step);
      u32 k_word = 0;
#pragma unroll
      for (i32 n = 0; n < kNTiles; n += 2) {
        if (n % 4 == 0) k_word = ptx::load_shared_u32(sK + k_scales + 8 * n * Layout::kQkRowScales + 4 * step);
        u32 k[4];
        ptx::ldmatrix_x4(k, KRows::moved(k_row, 8 * n, 2 * step));
        ptx::mma_m16n8k64_nvfp4_e2m1e2m1f32(acc[n], q, k[0], k[1], acc[n], q_word, k_word, scale_lane(n));
        ptx::mma_m16n8k64_nvfp4_e2m1e2m1f32(acc[n + 1], q, k[2], k[3], acc[n + 1], q_word, k_word, scale_lane(n + 1));
      }
    }
#pragma unroll
    for (i32 n = 0; n < kNTiles; ++n) {
#pragma unroll
      for (i32 c = 0; c < 4; ++c) acc_s[0][n][c] = __float_as_int(acc[n][c]);
    }
    return scale;
  }
};

// P in two levels: a row's reference takes its largest P to the largest magnitude of NVFP4, and 16 columns share a
// scale. Row sums are of P before rounding: those of the rounded P cost a language model more (docs/decisions.md).
template <class Config>
struct PvNvfp4 {
  using Layout = TileLayout<Config>;
  using Swizzle = typename Layout::VRows;
  static constexpr i32 kOTiles = Config::kHeadDim / 8, kNTiles = Config::kBlockN / 8;
  static constexpr i32 kSteps = Config::kBlockN / 64;  // keys a product: 64
  static_assert(Config::kWarpM == 16 && kOTiles % 4 == 0);

  static constexpr float kTop = 11.392317f;  // log2 of 6 · 448, the largest magnitude of NVFP4
  static constexpr float kLazyRise = 0.0f;
  static constexpr bool kWholeReference = false;
  static constexpr bool kMayFall = true;  // where all P of a group are below 2^-10 · 6, its scale is zero
  static constexpr float kLazyFall = 6.0f;
  static constexpr float kLargestFolded = 0.0f;
  static constexpr bool kSumsInThreads = true, kSumsRounded = false;
  static constexpr float kSumUnit = 1.0f;
  static constexpr bool kScalesGroups = true;
  static constexpr float kVTypical = 16.0f, kVLeast = 1.0f, kVLimit = kLargestScaled;

  struct Operand {
    u32 codes[kSteps][4];
    u32 scales[kSteps];
  };

  // A row's keys in a step are those of eight n8 tiles. The first four tiles and the last four make the columns 8t to
  // 8t + 7 of two halves; in each half the columns of two neighbouring lanes are a group.
  __device__ __forceinline__ static void exponentiate(Operand& p, RowSums<Config>& lse_sum,
                                                      const i32 (&acc_s)[1][kNTiles][4], const RowScales<Config>& scale,
                                                      const float (&offset)[2]) {
#pragma unroll
    for (i32 step = 0; step < kSteps; ++step) {
      u32 own = 0;  // scales of this lane's groups: of row g in the lower half, of row g + 8 in the upper
#pragma unroll
      for (i32 r = 0; r < 2; ++r) {
        const auto score = [&](i32 half, i32 e) {
          return __int_as_float(acc_s[0][8 * step + 4 * half + e / 2][2 * r + e % 2]);
        };
        const u32 pair = group_scales(score, scale[r], offset[r] - kLog2E2m1);
        own |= pair << 16 * r;
#pragma unroll
        for (i32 half = 0; half < 2; ++half) {
          const float group_scale = f32_from_ue4m3(pair >> 8 * half & 0xff);
          const float in_group = offset[r] - ptx::lg2(group_scale);  // where the scale is zero, products and sums are
          float x[8], sum = 0.0f;
#pragma unroll
          for (i32 e = 0; e < 8; ++e) {  // P in units of the scale
            sum += x[e] = ptx::ex2(fminf(fmaf(score(half, e), scale[r], in_group), kMostLog2InGroup));
          }
          lse_sum[r] = fmaf(sum, group_scale, lse_sum[r]);
          p.codes[step][r + 2 * half] = ptx::e2m1x8(x);
        }
      }
      // Columns run through the lanes of a half, then through the halves. Even lanes hand in row g, odd lanes g + 8.
      const u32 other = ptx::shuffle_xor(own, 2);
      p.scales[step] = ptx::prmt(own, other, ptx::thread_index() % 2 == 0 ? 0x5140 : 0x7362);
    }
  }

  // Two groups of 8 channels by two chunks of 32 keys, chunks first.
  __device__ __forceinline__ static u32 offset(i32 lane) {
    return Swizzle::offset(lane / 16 * 8 + lane % 8, lane / 8 % 2);
  }

  __device__ __forceinline__ static void accumulate(OutputAccumulator<Config>& acc_o, RowSums<Config>&,
                                                    const Operand& p, u32 sV, u32 v_offset, float v_factor) {
    if (v_factor != 1.0f) rescale_all<Config>(acc_o, reciprocal_of_power_of_two(v_factor));
    const u32 v_row = sV + v_offset, v_scales = sV + Layout::kVScales + scaled_column(ptx::thread_index() % 32) * 4;
#pragma unroll
    for (i32 step = 0; step < kSteps; ++step) {
      u32 v_word = 0;
#pragma unroll
      for (i32 n = 0; n < kOTiles; n += 2) {
        if (n % 4 == 0) v_word = ptx::load_shared_u32(v_scales + (step * Config::kHeadDim + 8 * n) * 4);
        u32 v[4];
        ptx::ldmatrix_x4(v, Swizzle::moved(v_row, 8 * n, 2 * step));
        ptx::mma_m16n8k64_nvfp4_e2m1e2m1f32(acc_o[0][n], p.codes[step], v[0], v[1], acc_o[0][n], p.scales[step], v_word,
                                            scale_lane(n));
        ptx::mma_m16n8k64_nvfp4_e2m1e2m1f32(acc_o[0][n + 1], p.codes[step], v[2], v[3], acc_o[0][n + 1], p.scales[step],
                                            v_word, scale_lane(n + 1));
      }
    }
    if (v_factor != 1.0f) rescale_all<Config>(acc_o, v_factor);
  }

 private:
  // The largest log2 of P in units of its group's scale: log2 of 6.4, since the scale rounds by up to 1/16. Clamped to
  // it, P is finite for scores of any size (attn/row_references.cuh), and for a scale of zero, whose logarithm is
  // infinite.
  static constexpr float kMostLog2InGroup = 2.678072f;
  static constexpr float kLog2E2m1 = 2.5849625f;  // of kLargestE2m1

  // The scales of a row's two groups in a step, those of the first half in the lower byte. score(half, e): of the
  // lane's own keys.
  template <class Score>
  __device__ __forceinline__ static u32 group_scales(Score score, float scale, float offset) {
    float wanted[2];
#pragma unroll
    for (i32 half = 0; half < 2; ++half) {
      float largest = score(half, 0);
#pragma unroll
      for (i32 e = 1; e < 8; ++e) largest = fmaxf(largest, score(half, e));
      wanted[half] = ptx::ex2(ptx::max_over_lanes<2>(fmaf(largest, scale, offset)));  // lanes' scales differ
    }
    return ptx::e4m3x2(wanted[0], wanted[1]);
  }
};

template <class Config>
struct SelectScores<Config, Qk::kNvfp4> : Nvfp4Scores<Config> {
  using Nvfp4Scores<Config>::Nvfp4Scores;
};
template <class Config>
struct SelectPv<Config, Pv::kNvfp4, false> : PvNvfp4<Config> {};

}  // namespace sage
