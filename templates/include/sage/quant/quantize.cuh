// Quantization of Q, K and V in one launch, into the tiles of tile/layout.cuh.
//   Q  s8 or s4, a scale per thread of the attention kernel: rows m of a warp with equal m % 8. Multiplied by
//      softmax_scale · log2 e first, so that scores come out in log2 units and any sign of the scale is right. Smoothed:
//      less the mean of its tile's rows.
//   K  s8 or s4, a scale per thread: keys n of a tile with equal n % 8 / 2. Smoothed: less its mean per channel.
//   V  e4m3 with a scale per channel, or f16 with a power of two per channel that keeps any bf16 within range. Smoothed:
//      less its mean per channel.
// Values are divided by amax / limit (127 for s8, v_limit for e4m3) and rounded to the nearest, ties to even. s4 has so few
// steps that finer ones are worth losing the largest values: 0.8 · amax / 7, and what lies beyond [-8, 7] is cut off.
// What is not finite is quantized as zero, so that it leaves the scale it would share alone. The attention kernel puts NaN
// where it belongs: in the rows that see the first key of k_finite and v_finite, and in a row whose row_bias is not finite.
// Source: SageAttention2, sections 3.1 to 3.4 and appendix A.6.
#pragma once

#include "sage/ptx/warp.cuh"
#include "sage/quant/arithmetic.cuh"
#include "sage/quant/source.cuh"
#include "sage/tile/layout.cuh"

namespace sage {

// A scale and its reciprocal; the reciprocal of a group of zeros is zero.
struct Scale {
  float scale, inv_scale;
};

// Below this a group counts as zeros: its reciprocal would overflow.
constexpr float kSmallestAbsMax = 1e-35f;

constexpr u32 kMantissaBits = 23, kExponentBias = 127;

// Added to a number below 2^22 it leaves, rounded to the nearest even, an integer in the low bits of the sum: 1.5 · 2^23.
constexpr float kIntegerBias = 12582912.0f;

// Scale that takes [-amax, amax] to [-limit, limit].
__device__ __forceinline__ Scale scale_to(float limit, float amax) {
  if (amax < kSmallestAbsMax) return {1.0f, 0.0f};
  // limit / amax by way of amax in [1, 2): the power of two between them only moves the exponent.
  const u32 exponent = (__float_as_uint(amax) >> kMantissaBits) - kExponentBias;
  const float mantissa = __uint_as_float(__float_as_uint(amax) - (exponent << kMantissaBits));
  const u32 inv_scale = __float_as_uint(divide(limit, mantissa)) - (exponent << kMantissaBits);
  return {divide(amax, limit), __uint_as_float(inv_scale)};
}

// Power of two that takes amax into [2^14, 2^15): all bits of a bf16 survive, and P · V stays far inside f32.
__device__ __forceinline__ Scale power_of_two_scale(float amax) {
  if (amax < kSmallestAbsMax) return {1.0f, 0.0f};
  constexpr u32 kLargestExponent = 14;
  const u32 exponent = __float_as_uint(amax) >> kMantissaBits;                        // biased; amax is positive
  const u32 scale_exponent = max(exponent, kLargestExponent + 1) - kLargestExponent;  // at least the least normal
  return {__uint_as_float(scale_exponent << kMantissaBits),
          __uint_as_float((2 * kExponentBias - scale_exponent) << kMantissaBits)};
}

// Config: kHeadDim, kQkBits, kPv, kBlockM, kBlockN, kWarpM, kThreads.
template <class Config>
struct Quantize {
  using Layout = TileLayout<Config>;
  static constexpr i32 kHeadDim = Config::kHeadDim;
  static constexpr i32 kVectors = kHeadDim / kVector;  // lanes side by side on a row
  static constexpr i32 kWarps = Config::kThreads / kWarpSize;
  // Tiles of K or V that a block takes: at most kInFlight loads a thread, all issued before the first is used, since
  // only loads in flight hide the memory's latency; and at least a warp for each scale group of K.
  static constexpr i32 kInFlight = 8;
  static constexpr i32 kMostTiles = kWarps / kKeyGroups;
  static constexpr i32 kTilesInFlight = kInFlight * Config::kThreads / (Config::kBlockN * kVectors);
  static constexpr i32 kTilesPerBlock = kTilesInFlight < kMostTiles ? kTilesInFlight : kMostTiles;
  static constexpr i32 kWarpsPerGroup = kMostTiles / kTilesPerBlock;
  static constexpr float kLimit = Config::kQkBits == 8 ? 127.0f : 7.0f;
  static constexpr float kClip = Config::kQkBits == 8 ? 1.0f : 0.8f;  // share of amax that kLimit stands for
  static_assert(Config::kQkBits == 8 || Config::kQkBits == 4);
  static_assert(kTilesPerBlock >= 1 && kWarpsPerGroup * kTilesPerBlock * kKeyGroups == kWarps,
                "a block takes whole KV tiles");

  // What the host needs to launch the kernel, to lay out what it writes, and to emulate it.
  static constexpr auto facts() {
    return sage::facts(Fact{"threads", Config::kThreads}, Fact{"shared_bytes", 0},
                       Fact{"kv_tiles_per_block", kTilesPerBlock}, Fact{"rows_at_once", Config::kThreads / kVectors},
                       Fact{"vector", kVector}, Fact{"q_tile_bytes", Layout::kQBytes},
                       Fact{"kv_tile_bytes", Layout::kKvBytes}, Fact{"row_groups", kRowGroups},
                       Fact{"key_groups", kKeyGroups}, Fact{"limit", kLimit}, Fact{"clip", kClip},
                       Fact{"smallest_abs_max", kSmallestAbsMax}, Fact{"all_finite", kAllFinite});
  }

  // What a block knows of the channels of its head; read four channels at once.
  struct alignas(16) Channels {
    float mean[kHeadDim];                                // of K in blocks of Q and K, of V in blocks of V
    float q_mean[kHeadDim];                              // blocks of Q
    float inv_v_scale[kHeadDim];                         // blocks of V
    float parts[Config::kThreads / kVectors][kHeadDim];  // blocks of Q: the sums of each thread
    float amax[kWarps];                                  // blocks of K
  };

  const QuantParams& params;
  Channels& channels;  // shared

  // The branch is uniform over the grid.
  __device__ __forceinline__ void run() const {
    if (params.aligned) run<true>();
    else run<false>();
  }

  // blockIdx.x: per KV head, the last first, its tiles of K, then of V, kTilesPerBlock at once; then the tiles of Q.
  // The statistics read the heads in ascending order: the last of them are in the L2 cache.
  template <bool kAligned>
  __device__ __forceinline__ void run() const {
    const i32 kv_heads = params.batch * params.num_kv_heads;
    const i32 blocks_per_tensor = ceil_div(params.kv_tiles, kTilesPerBlock);
    const i32 kv_blocks = kv_heads * 2 * blocks_per_tensor;
    const i32 block = blockIdx.x;
    if (block >= kv_blocks) {
      quantize_q<kAligned>((block - kv_blocks) / params.q_tiles, (block - kv_blocks) % params.q_tiles);
      return;
    }
    const i32 head = kv_heads - 1 - block / blocks_per_tensor / 2;
    const i32 first_tile = block % blocks_per_tensor * kTilesPerBlock;
    if (block / blocks_per_tensor % 2 == 0) quantize_k<kAligned>(head, first_tile);
    else if constexpr (Config::kPv == Pv::kE4m3) quantize_v_e4m3<kAligned>(head, first_tile);
    else quantize_v_f16<kAligned>(head, first_tile);
  }

  template <bool kAligned>
  __device__ __forceinline__ Source<kAligned> kv_source(const Tensor& tensor, i32 head) const {
    return Source<kAligned>(tensor, head / params.num_kv_heads, head % params.num_kv_heads, params.seqlen_kv,
                            params.headdim, params.dtype);
  }

  __device__ __forceinline__ u8* kv_tile(i32 head, i32 tile) const {
    return params.kv_hat + (static_cast<i64>(head) * params.kv_tiles + tile) * Layout::kKvBytes;
  }

  // --- per channel, from the statistics; but for f16 V after the loads of rows, whose latency hides theirs ----------

  __device__ __forceinline__ void prepare_k_mean(i32 head) const {
    const float* mean = params.k_mean + static_cast<i64>(head) * kHeadDim;
    for (i32 c = threadIdx.x; c < kHeadDim; c += Config::kThreads) channels.mean[c] = mean[c];
    __syncthreads();
  }

  // Returns whether all of the head's V is finite. `store`: one block of each head leaves the scale for the epilogue.
  __device__ __forceinline__ bool prepare_v_scale(i32 head, bool store) const {
    bool all_finite = true;
    for (i32 c = threadIdx.x; c < kHeadDim; c += Config::kThreads) {
      const i64 channel = static_cast<i64>(head) * kHeadDim + c;
      const float amax = params.v_amax[channel];
      const Scale scale = Config::kPv == Pv::kE4m3 ? scale_to(params.v_limit, amax) : power_of_two_scale(amax);
      channels.mean[c] = params.v_mean[channel];
      channels.inv_v_scale[c] = scale.inv_scale;
      all_finite &= params.v_finite[channel] == kAllFinite;
      if (store) params.v_scale[channel] = scale.scale;
    }
    return __syncthreads_and(all_finite);
  }

  // --- Q ------------------------------------------------------------------------------------------------------------

  // kVectors lanes quantize the rows of one scale group.
  template <bool kAligned>
  __device__ __forceinline__ void quantize_q(i32 head, i32 tile) const {
    constexpr i32 kRows = Config::kWarpM / kRowGroups;  // rows that share a scale
    constexpr i32 kGroups = Config::kBlockM / kRows, kGroupsAtOnce = Config::kThreads / kVectors;
    constexpr i32 kSteps = kGroups / kGroupsAtOnce;
    static_assert(kGroups % kGroupsAtOnce == 0, "every thread takes equally many groups");
    const i32 batch = head / params.num_q_heads, q_head = head % params.num_q_heads;
    const i32 kv_head = q_head / (params.num_q_heads / params.num_kv_heads);
    const Source<kAligned> source(params.q, batch, q_head, params.seqlen_q, params.headdim, params.dtype);
    const i64 tile_index = static_cast<i64>(head) * params.q_tiles + tile;
    if (params.smooth_q) prepare_q_mean(source, tile, params.q_mean + tile_index * kHeadDim);

    const i32 lane = threadIdx.x % kVectors;
    const auto group_of_step = [&](i32 step) { return step * kGroupsAtOnce + threadIdx.x / kVectors; };
    const auto first_row_of = [&](i32 group) { return group / kRowGroups * Config::kWarpM + group % kRowGroups; };
    Raw raw[kSteps][kRows];
#pragma unroll
    for (i32 s = 0; s < kSteps; ++s) {
#pragma unroll
      for (i32 r = 0; r < kRows; ++r) {
        const i32 row = first_row_of(group_of_step(s)) + r * kRowGroups;
        raw[s][r] = source.load(tile * Config::kBlockM + row, lane * kVector);
      }
    }
    prepare_k_mean(batch * params.num_kv_heads + kv_head);

#pragma unroll
    for (i32 s = 0; s < kSteps; ++s) {
      const i32 group = group_of_step(s), first_row = first_row_of(group);
      float x[kRows][kVector], bias[kRows] = {};
#pragma unroll
      for (i32 r = 0; r < kRows; ++r) {
        source.convert(raw[s][r], x[r]);
#pragma unroll
        for (i32 i = 0; i < kVector; ++i) {
          x[r][i] *= params.softmax_scale_log2;
          bias[r] = fmaf(x[r][i], channels.mean[lane * kVector + i], bias[r]);
        }
        const bool exists = tile * Config::kBlockM + first_row + r * kRowGroups < params.seqlen_q;
        if (params.smooth_q) subtract(x[r], channels.q_mean + lane * kVector, exists);
      }
      float amax = abs_max(x);
      if (ptx::any(!(amax < ptx::infinity()))) amax = make_finite(x);
      const Scale scale = scale_to(kLimit, kClip * ptx::max_over_lanes<kVectors>(amax));
#pragma unroll
      for (i32 r = 0; r < kRows; ++r) {
        const i32 row = first_row + r * kRowGroups;
        u8* tile_data = params.q_hat + tile_index * Layout::kQBytes;
        store_row<typename Layout::QRows>(tile_data, row, lane, x[r], scale.inv_scale);
        const float row_bias = ptx::sum_over_lanes<kVectors>(bias[r]);
        if (lane == 0) params.row_bias[tile_index * Config::kBlockM + row] = row_bias;
      }
      if (lane == 0) params.q_scale[tile_index * kGroups + group] = scale.scale;
    }
  }

  // q_mean = mean of the tile's rows, summed like the statistics: a thread's rows ascending, then the threads. In shared
  // memory it is for all to read after the barrier of prepare_k_mean().
  template <class Source>
  __device__ __forceinline__ void prepare_q_mean(const Source& source, i32 tile, float* q_mean) const {
    constexpr i32 kRowsAtOnce = Config::kThreads / kVectors;
    const i32 lane = threadIdx.x % kVectors, first_row = threadIdx.x / kVectors;
    float sum[kVector] = {};
#pragma unroll 4
    for (i32 row = 0; row < Config::kBlockM; row += kRowsAtOnce) {
      float x[kVector];
      source.convert(source.load(tile * Config::kBlockM + first_row + row, lane * kVector), x);
#pragma unroll
      for (i32 i = 0; i < kVector; ++i) sum[i] += finite_or_zero(x[i] * params.softmax_scale_log2);
    }
#pragma unroll
    for (i32 i = 0; i < kVector; ++i) channels.parts[first_row][lane * kVector + i] = sum[i];
    __syncthreads();
    const i32 rows = min(Config::kBlockM, params.seqlen_q - tile * Config::kBlockM);
    for (i32 c = threadIdx.x; c < kHeadDim; c += Config::kThreads) {
      float total = channels.parts[0][c];
      for (i32 r = 1; r < kRowsAtOnce; ++r) total += channels.parts[r][c];
      const float mean = finite_or_zero(divide(total, static_cast<float>(rows)));
      channels.q_mean[c] = mean;
      q_mean[c] = mean;
    }
  }

  // --- K ------------------------------------------------------------------------------------------------------------

  // kWarpsPerGroup warps quantize the keys of one scale group.
  template <bool kAligned>
  __device__ __forceinline__ void quantize_k(i32 head, i32 first_tile) const {
    constexpr i32 kKeys = Config::kBlockN / kKeyGroups;  // keys that share a scale
    constexpr i32 kKeysAtOnce = kWarpSize / kVectors;    // rows that a warp reads side by side
    constexpr i32 kSteps = kKeys / kKeysAtOnce / kWarpsPerGroup;
    const i32 warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
    const i32 tile = first_tile + warp / (kKeyGroups * kWarpsPerGroup), group = warp / kWarpsPerGroup % kKeyGroups;

    const Source<kAligned> source = kv_source<kAligned>(params.k, head);
    const i32 vector = lane % kVectors;
    const auto key_of_step = [&](i32 step) {
      const i32 n = (warp % kWarpsPerGroup * kSteps + step) * kKeysAtOnce + lane / kVectors;
      return n / 2 * 8 + group * 2 + n % 2;
    };
    Raw raw[kSteps];
#pragma unroll
    for (i32 s = 0; s < kSteps; ++s) raw[s] = source.load(tile * Config::kBlockN + key_of_step(s), vector * kVector);
    prepare_k_mean(head);

    // Anew for each use: all of them at once would take too many registers.
    const auto smoothed = [&](i32 s, float (&x)[1][kVector]) {
      source.convert(raw[s], x[0]);
      const bool exists = tile * Config::kBlockN + key_of_step(s) < params.seqlen_kv;
      subtract(x[0], channels.mean + vector * kVector, exists);
    };
    float amax = 0.0f, x[1][kVector];
#pragma unroll
    for (i32 s = 0; s < kSteps; ++s) {
      smoothed(s, x);
      amax = ptx::max_nan(amax, abs_max(x));
    }
    const bool finite = !ptx::any(!(amax < ptx::infinity()));
    if (!finite) {
      amax = 0.0f;
#pragma unroll
      for (i32 s = 0; s < kSteps; ++s) {
        smoothed(s, x);
        if (!(abs_max(x) < ptx::infinity())) atomicMin(params.k_finite + head, tile * Config::kBlockN + key_of_step(s));
        amax = fmaxf(amax, make_finite(x));
      }
    }
    amax = ptx::max_over_lanes<kWarpSize>(amax);
    if constexpr (kWarpsPerGroup > 1) {
      if (lane == 0) channels.amax[warp] = amax;
      __syncthreads();
      const float* of_group = channels.amax + warp / kWarpsPerGroup * kWarpsPerGroup;
#pragma unroll
      for (i32 w = 0; w < kWarpsPerGroup; ++w) amax = fmaxf(amax, of_group[w]);
    }
    if (tile >= params.kv_tiles) return;
    const Scale scale = scale_to(kLimit, kClip * amax);
    u8* tile_data = kv_tile(head, tile);
#pragma unroll
    for (i32 s = 0; s < kSteps; ++s) {
      smoothed(s, x);
      if (!finite) make_finite(x);
      store_row<typename Layout::KRows>(tile_data, key_of_step(s), vector, x[0], scale.inv_scale);
    }
    if (lane == 0 && warp % kWarpsPerGroup == 0) {
      reinterpret_cast<float*>(tile_data + Layout::kKScales)[group] = scale.scale;
    }
  }

  // --- rows of Q and K ----------------------------------------------------------------------------------------------

  // x less a mean; what does not exist stays zero.
  __device__ __forceinline__ static void subtract(float (&x)[kVector], const float* mean, bool exists) {
    const float factor = exists ? -1.0f : 0.0f;
#pragma unroll
    for (i32 i = 0; i < kVector; ++i) x[i] = fmaf(mean[i], factor, x[i]);
  }

  // Largest magnitude; NaN or infinity where an element is not finite.
  template <i32 kRows>
  __device__ __forceinline__ static float abs_max(const float (&x)[kRows][kVector]) {
    float amax = 0.0f;
#pragma unroll
    for (i32 r = 0; r < kRows; ++r) {
#pragma unroll
      for (i32 i = 0; i < kVector; ++i) amax = ptx::max_nan(amax, fabsf(x[r][i]));
    }
    return amax;
  }

  // Zeros for what is not finite; returns the largest magnitude left.
  template <i32 kRows>
  __device__ __forceinline__ static float make_finite(float (&x)[kRows][kVector]) {
#pragma unroll
    for (i32 r = 0; r < kRows; ++r) {
#pragma unroll
      for (i32 i = 0; i < kVector; ++i) x[r][i] = finite_or_zero(x[r][i]);
    }
    return abs_max(x);
  }

  // Rounds eight channels and stores them as part of a chunk of their row.
  template <class Rows>
  __device__ __forceinline__ static void store_row(u8* tile, i32 row, i32 vector, const float (&x)[kVector],
                                                   float inv_scale) {
    constexpr i32 kBytes = kVector * Config::kQkBits / 8;
    u8* to = tile + Rows::offset(row, vector * kBytes / 16) + vector * kBytes % 16;
    const u32 lo = rounded<0>(x, inv_scale), hi = rounded<4>(x, inv_scale);
    if constexpr (Config::kQkBits == 8) *reinterpret_cast<u64*>(to) = static_cast<u64>(hi) << 32 | lo;
    else *reinterpret_cast<u32*>(to) = nibbles(hi) << 16 | nibbles(lo);
  }

  // x[kFirst..kFirst+3] · inv_scale as four bytes, the first the lowest.
  template <i32 kFirst>
  __device__ __forceinline__ static u32 rounded(const float (&x)[kVector], float inv_scale) {
    u32 bits[4];
#pragma unroll
    for (i32 i = 0; i < 4; ++i) {
      float y = fmaf(x[kFirst + i], inv_scale, kIntegerBias);
      if constexpr (kClip < 1.0f) y = fminf(fmaxf(y, kIntegerBias - kLimit - 1.0f), kIntegerBias + kLimit);
      bits[i] = __float_as_uint(y);
    }
    return ptx::prmt(ptx::prmt(bits[0], bits[1], 0x0040), ptx::prmt(bits[2], bits[3], 0x0040), 0x5410);
  }

  // The low halves of four bytes, side by side.
  __device__ __forceinline__ static u32 nibbles(u32 bytes) {
    const u32 pairs = (bytes & 0x000f000f) | (bytes >> 4 & 0x00f000f0);
    return (pairs | pairs >> 8) & 0xffff;
  }

  // --- V ------------------------------------------------------------------------------------------------------------

  // Eight channels of one key less their means, finite.
  __device__ __forceinline__ void smooth_v(float (&x)[kVector], i32 first_channel, i32 key, bool finite) const {
    if (params.smooth_v) subtract(x, channels.mean + first_channel, key < params.seqlen_kv);
    if (finite) return;
#pragma unroll
    for (i32 i = 0; i < kVector; ++i) x[i] = finite_or_zero(x[i]);
  }

  // What a thread transposes in one step: four neighbouring columns of the P operand, that is four keys, in kVector
  // channels. A warp takes 32 columns of 32 channels, so that it reads 64 bytes of a row of V and writes 32 of a row
  // of V̂: whole sectors.
  struct Square {
    static constexpr i32 kEdge = 32;
    static constexpr i32 kAcross = Config::kBlockN / kEdge, kDown = kHeadDim / kEdge;  // squares of a tile

    i32 tile, column, first_channel;

    __device__ __forceinline__ Square(i32 first_tile, i32 step) {
      const i32 square = step * kWarps + threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
      tile = first_tile + square / (kAcross * kDown);
      column = square % kAcross * kEdge + lane % 8 * 4;
      first_channel = square / kAcross % kDown * kEdge + lane / 8 * kVector;
    }

    __device__ __forceinline__ i32 key(i32 e) const { return tile * Config::kBlockN + key_of_column(column + e); }
  };

  template <bool kAligned>
  __device__ __forceinline__ void quantize_v_e4m3(i32 head, i32 first_tile) const {
    constexpr i32 kSquares = kTilesPerBlock * Square::kAcross * Square::kDown, kSteps = kSquares / kWarps;
    static_assert(kSquares % kWarps == 0, "every warp takes equally many squares");
    const Source<kAligned> source = kv_source<kAligned>(params.v, head);
    Raw raw[kSteps][4];
#pragma unroll
    for (i32 s = 0; s < kSteps; ++s) {
      const Square square(first_tile, s);
#pragma unroll
      for (i32 e = 0; e < 4; ++e) raw[s][e] = source.load(square.key(e), square.first_channel);
    }
    const bool finite = prepare_v_scale(head, first_tile == 0);
#pragma unroll
    for (i32 s = 0; s < kSteps; ++s) {
      const Square square(first_tile, s);
      if (square.tile >= params.kv_tiles) return;
      store_transposed(source, head, square, raw[s], finite);
    }
  }

  template <class Source>
  __device__ __forceinline__ void store_transposed(const Source& source, i32 head, const Square& square,
                                                   const Raw (&raw)[4], bool finite) const {
    float x[4][kVector];
#pragma unroll
    for (i32 e = 0; e < 4; ++e) {
      source.convert(raw[e], x[e]);
      smooth_v(x[e], square.first_channel, square.key(e), finite);
    }
    u8* tile_data = kv_tile(head, square.tile) + Layout::kV;
#pragma unroll
    for (i32 i = 0; i < kVector; ++i) {
      const float inv = channels.inv_v_scale[square.first_channel + i];
      u8* to = tile_data + Layout::VRows::offset(square.first_channel + i, square.column / 16) + square.column % 16;
      *reinterpret_cast<u32*>(to) = ptx::e4m3x4(x[0][i] * inv, x[1][i] * inv, x[2][i] * inv, x[3][i] * inv);
    }
  }

  // All loads of a tile before the first use: rows are short, and only loads in flight hide the memory's latency.
  template <bool kAligned>
  __device__ __forceinline__ void quantize_v_f16(i32 head, i32 first_tile) const {
    static_assert(Config::kBlockN * kVectors % Config::kThreads == 0, "every thread takes equally many keys");
    constexpr i32 kSteps = Config::kBlockN * kVectors / Config::kThreads;
    constexpr i32 kKeysAtOnce = Config::kThreads / kVectors;
    const Source<kAligned> source = kv_source<kAligned>(params.v, head);
    const i32 vector = threadIdx.x % kVectors, first_key = threadIdx.x / kVectors;
    const i32 end = min(first_tile + kTilesPerBlock, params.kv_tiles);
    const bool finite = prepare_v_scale(head, first_tile == 0);
    for (i32 tile = first_tile; tile < end; ++tile) {
      Raw raw[kSteps];
#pragma unroll
      for (i32 s = 0; s < kSteps; ++s) {
        raw[s] = source.load(tile * Config::kBlockN + first_key + s * kKeysAtOnce, vector * kVector);
      }
      u8* tile_data = kv_tile(head, tile) + Layout::kV;
#pragma unroll
      for (i32 s = 0; s < kSteps; ++s) {
        float x[kVector];
        source.convert(raw[s], x);
        smooth_v(x, vector * kVector, tile * Config::kBlockN + first_key + s * kKeysAtOnce, finite);
        Raw out;
#pragma unroll
        for (i32 i = 0; i < kVector; i += 2) {
          const float* inv_scale = channels.inv_v_scale + vector * kVector + i;
          out.word[i / 2] = ptx::f16x2(x[i] * inv_scale[0], x[i + 1] * inv_scale[1]);
        }
        *reinterpret_cast<Raw*>(tile_data + Layout::VRows::offset(first_key + s * kKeysAtOnce, vector)) = out;
      }
    }
  }
};

}  // namespace sage
