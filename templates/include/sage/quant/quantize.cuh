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

// a / b to the nearest, for b and 1 / b well inside the normal range. What the compiler makes of a division, less the
// call for the other operands, which would cost registers.
__device__ __forceinline__ float divide(float a, float b) {
  float r = ptx::rcp(b);
  r = fmaf(fmaf(-b, r, 1.0f), r, r);
  float q = a * r;
  q = fmaf(fmaf(-b, q, a), r, q);
  return fmaf(fmaf(-b, q, a), r, q);
}

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
  const u32 exponent = __float_as_uint(amax) >> kMantissaBits;  // biased; amax is positive
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
  static constexpr i32 kWarpsPerTile = kKeyGroups;     // a warp quantizes one group of a KV tile
  static constexpr i32 kTilesPerBlock = Config::kThreads / (kWarpsPerTile * kWarpSize);
  static constexpr float kLimit = Config::kQkBits == 8 ? 127.0f : 7.0f;
  static constexpr float kClip = Config::kQkBits == 8 ? 1.0f : 0.8f;  // share of amax that kLimit stands for
  static_assert(Config::kQkBits == 8 || Config::kQkBits == 4);
  static_assert(Config::kThreads % (kWarpsPerTile * kWarpSize) == 0, "a block takes whole KV tiles");

  // What a block knows of the channels of its head.
  struct Channels {
    float k_mean[kHeadDim];       // blocks of Q and K
    float q_mean[kHeadDim];       // blocks of Q
    float v_mean[kHeadDim];       // blocks of V
    float inv_v_scale[kHeadDim];  // blocks of V
    float parts[Config::kThreads / kVectors][kHeadDim];  // blocks of Q: the sums of each thread
  };

  const QuantParams& params;
  Channels& channels;  // shared

  // The branch is uniform over the grid.
  __device__ __forceinline__ void run() const {
    if (params.aligned) run<true>();
    else run<false>();
  }

  // blockIdx.x: the tiles of Q, then those of K, then those of V, kTilesPerBlock at once.
  template <bool kAligned>
  __device__ __forceinline__ void run() const {
    const i64 q_blocks = static_cast<i64>(params.batch) * params.num_q_heads * params.q_tiles;
    const i32 kv_blocks_per_head = ceil_div(params.kv_tiles, kTilesPerBlock);
    const i64 kv_blocks = static_cast<i64>(params.batch) * params.num_kv_heads * kv_blocks_per_head;
    i64 block = blockIdx.x;
    if (block < q_blocks) {
      quantize_q<kAligned>(static_cast<i32>(block / params.q_tiles), static_cast<i32>(block % params.q_tiles));
      return;
    }
    block -= q_blocks;
    const bool is_v = block >= kv_blocks;
    if (is_v) block -= kv_blocks;
    const i32 head = static_cast<i32>(block / kv_blocks_per_head);
    const i32 first_tile = static_cast<i32>(block % kv_blocks_per_head) * kTilesPerBlock;
    if (is_v) {
      const bool finite = prepare_v_scale(head, first_tile == 0);
      if constexpr (Config::kPv == Pv::kE4m3) quantize_v_e4m3<kAligned>(head, first_tile, finite);
      else quantize_v_f16<kAligned>(head, first_tile, finite);
    } else {
      prepare_k_mean(head, first_tile == 0);
      quantize_k<kAligned>(head, first_tile);
    }
  }

  template <bool kAligned>
  __device__ __forceinline__ Source<kAligned> kv_source(const Tensor& tensor, i32 head) const {
    return Source<kAligned>(tensor, head / params.num_kv_heads, head % params.num_kv_heads, params.seqlen_kv,
                            params.headdim, params.dtype);
  }

  __device__ __forceinline__ u8* kv_tile(i32 head, i32 tile) const {
    return params.kv_hat + (static_cast<i64>(head) * params.kv_tiles + tile) * Layout::kKvBytes;
  }

  // --- per channel, from the statistics -----------------------------------------------------------------------------

  // Statistic `which` of a channel in one chunk: 0 the sum, 1 the largest, 2 the smallest value, 3 the first not finite.
  __device__ __forceinline__ float statistic(const float* stats, i32 head, i32 chunk, i32 which, i32 c) const {
    return stats[((static_cast<i64>(head) * params.num_chunks + chunk) * kStatistics + which) * kHeadDim + c];
  }

  // Zero where the sum is beyond f32: what is subtracted is a choice, as long as it is known.
  __device__ __forceinline__ float mean_over_keys(const float* stats, i32 head, i32 c) const {
    float sum = 0.0f;
    for (i32 chunk = 0; chunk < params.num_chunks; ++chunk) sum += statistic(stats, head, chunk, 0, c);
    return finite_or_zero(divide(sum, static_cast<float>(params.seqlen_kv)));
  }

  // `store`: one block of each head leaves the mean for whoever needs it next.
  __device__ __forceinline__ void prepare_k_mean(i32 head, bool store) const {
    for (i32 c = threadIdx.x; c < kHeadDim; c += Config::kThreads) {
      const float mean = params.smooth_k ? mean_over_keys(params.k_stats, head, c) : 0.0f;
      channels.k_mean[c] = mean;
      if (store) params.k_mean[static_cast<i64>(head) * kHeadDim + c] = mean;
    }
    __syncthreads();
  }

  // Returns whether all of the head's V is finite.
  __device__ __forceinline__ bool prepare_v_scale(i32 head, bool store) const {
    bool all_finite = true;
    for (i32 c = threadIdx.x; c < kHeadDim; c += Config::kThreads) {
      float mean = params.smooth_v ? mean_over_keys(params.v_stats, head, c) : 0.0f;
      float largest = -ptx::infinity(), smallest = ptx::infinity();
      i32 finite = kAllFinite;
      for (i32 chunk = 0; chunk < params.num_chunks; ++chunk) {
        largest = fmaxf(largest, statistic(params.v_stats, head, chunk, 1, c));
        smallest = fminf(smallest, statistic(params.v_stats, head, chunk, 2, c));
        finite = min(finite, __float_as_int(statistic(params.v_stats, head, chunk, 3, c)));
      }
      if (!(fmaxf(largest - mean, mean - smallest) < ptx::infinity())) mean = 0.0f;  // likewise: a choice
      const float amax = fmaxf(largest - mean, mean - smallest);
      const Scale scale = Config::kPv == Pv::kE4m3 ? scale_to(params.v_limit, amax) : power_of_two_scale(amax);
      channels.v_mean[c] = mean;
      channels.inv_v_scale[c] = scale.inv_scale;
      all_finite &= finite == kAllFinite;
      if (store) {
        params.v_mean[static_cast<i64>(head) * kHeadDim + c] = mean;
        params.v_scale[static_cast<i64>(head) * kHeadDim + c] = scale.scale;
        params.v_finite[static_cast<i64>(head) * kHeadDim + c] = finite;
      }
    }
    return __syncthreads_and(all_finite);
  }

  // --- Q ------------------------------------------------------------------------------------------------------------

  // kVectors lanes quantize the rows of one scale group.
  template <bool kAligned>
  __device__ __forceinline__ void quantize_q(i32 head, i32 tile) const {
    constexpr i32 kRows = Config::kWarpM / kRowGroups;  // rows that share a scale
    constexpr i32 kGroups = Config::kBlockM / kRows;
    const i32 batch = head / params.num_q_heads, q_head = head % params.num_q_heads;
    const i32 kv_head = q_head / (params.num_q_heads / params.num_kv_heads);
    const Source<kAligned> source(params.q, batch, q_head, params.seqlen_q, params.headdim, params.dtype);
    const i64 tile_index = static_cast<i64>(head) * params.q_tiles + tile;
    prepare_k_mean(batch * params.num_kv_heads + kv_head, false);
    prepare_q_mean(source, tile, params.q_mean + tile_index * kHeadDim);

    const i32 lane = threadIdx.x % kVectors;
    for (i32 group = threadIdx.x / kVectors; group < kGroups; group += Config::kThreads / kVectors) {
      const i32 first_row = group / kRowGroups * Config::kWarpM + group % kRowGroups;
      Raw raw[kRows];
#pragma unroll
      for (i32 r = 0; r < kRows; ++r) {
        raw[r] = source.load(tile * Config::kBlockM + first_row + r * kRowGroups, lane * kVector);
      }
      float x[kRows][kVector], bias[kRows] = {};
#pragma unroll
      for (i32 r = 0; r < kRows; ++r) {
        source.convert(raw[r], x[r]);
#pragma unroll
        for (i32 i = 0; i < kVector; ++i) {
          x[r][i] *= params.softmax_scale_log2;
          bias[r] = fmaf(x[r][i], channels.k_mean[lane * kVector + i], bias[r]);
        }
        const bool exists = tile * Config::kBlockM + first_row + r * kRowGroups < params.seqlen_q;
        subtract(x[r], channels.q_mean + lane * kVector, exists);
      }
      float amax = abs_max(x);
      if (ptx::any(!(amax < ptx::infinity()))) amax = make_finite(x);
      const Scale scale = scale_to(kLimit, kClip * ptx::max_over_lanes<kVectors>(amax));
#pragma unroll
      for (i32 r = 0; r < kRows; ++r) {
        const i32 row = first_row + r * kRowGroups;
        store_row<typename Layout::QRows>(params.q_hat + tile_index * Layout::kQBytes, row, lane, x[r], scale.inv_scale);
        const float row_bias = ptx::sum_over_lanes<kVectors>(bias[r]);
        if (lane == 0) params.row_bias[tile_index * Config::kBlockM + row] = row_bias;
      }
      if (lane == 0) params.q_scale[tile_index * kGroups + group] = scale.scale;
    }
  }

  // q_mean = mean of the tile's rows, summed like the statistics: a thread's rows ascending, then the threads ascending.
  template <class Source>
  __device__ __forceinline__ void prepare_q_mean(const Source& source, i32 tile, float* q_mean) const {
    if (!params.smooth_q) {
      for (i32 c = threadIdx.x; c < kHeadDim; c += Config::kThreads) channels.q_mean[c] = 0.0f;
      __syncthreads();
      return;
    }
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
    __syncthreads();
  }

  // --- K ------------------------------------------------------------------------------------------------------------

  // A warp quantizes the keys of one scale group.
  template <bool kAligned>
  __device__ __forceinline__ void quantize_k(i32 head, i32 first_tile) const {
    constexpr i32 kKeys = Config::kBlockN / kKeyGroups;      // keys that share a scale
    constexpr i32 kKeysAtOnce = kWarpSize / kVectors;        // rows that a warp reads side by side
    constexpr i32 kSteps = kKeys / kKeysAtOnce;
    const i32 warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
    const i32 tile = first_tile + warp / kWarpsPerTile, group = warp % kWarpsPerTile;
    if (tile >= params.kv_tiles) return;

    const Source<kAligned> source = kv_source<kAligned>(params.k, head);
    const i32 vector = lane % kVectors;
    const auto key_of_step = [&](i32 step) {
      const i32 n = step * kKeysAtOnce + lane / kVectors;
      return n / 2 * 8 + group * 2 + n % 2;
    };
    Raw raw[kSteps];
#pragma unroll
    for (i32 s = 0; s < kSteps; ++s) raw[s] = source.load(tile * Config::kBlockN + key_of_step(s), vector * kVector);

    // Anew for each use: all of them at once would take too many registers.
    const auto smoothed = [&](i32 s, float (&x)[1][kVector]) {
      source.convert(raw[s], x[0]);
      const bool exists = tile * Config::kBlockN + key_of_step(s) < params.seqlen_kv;
      subtract(x[0], channels.k_mean + vector * kVector, exists);
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
    const Scale scale = scale_to(kLimit, kClip * ptx::max_over_lanes<kWarpSize>(amax));
    u8* tile_data = kv_tile(head, tile);
#pragma unroll
    for (i32 s = 0; s < kSteps; ++s) {
      smoothed(s, x);
      if (!finite) make_finite(x);
      store_row<typename Layout::KRows>(tile_data, key_of_step(s), vector, x[0], scale.inv_scale);
    }
    if (lane == 0) reinterpret_cast<float*>(tile_data + Layout::kKScales)[group] = scale.scale;
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
    subtract(x, channels.v_mean + first_channel, key < params.seqlen_kv);
    if (finite) return;
#pragma unroll
    for (i32 i = 0; i < kVector; ++i) x[i] = finite_or_zero(x[i]);
  }

  // Transposes: a thread takes four neighbouring columns of the P operand, that is four keys, in eight channels.
  template <bool kAligned>
  __device__ __forceinline__ void quantize_v_e4m3(i32 head, i32 first_tile, bool finite) const {
    constexpr i32 kQuads = Config::kBlockN / 4;  // lanes side by side on a row of the tile: consecutive words
    constexpr i32 kTasks = kQuads * kVectors;
    const Source<kAligned> source = kv_source<kAligned>(params.v, head);
    for (i32 task = threadIdx.x; task < kTilesPerBlock * kTasks; task += Config::kThreads) {
      const i32 tile = first_tile + task / kTasks;
      if (tile >= params.kv_tiles) return;
      const i32 column = task % kQuads * 4, first_channel = task / kQuads % kVectors * kVector;
      Raw raw[4];
#pragma unroll
      for (i32 e = 0; e < 4; ++e) {
        raw[e] = source.load(tile * Config::kBlockN + key_of_column(column + e), first_channel);
      }
      float x[4][kVector];
#pragma unroll
      for (i32 e = 0; e < 4; ++e) {
        source.convert(raw[e], x[e]);
        smooth_v(x[e], first_channel, tile * Config::kBlockN + key_of_column(column + e), finite);
      }
      u8* tile_data = kv_tile(head, tile) + Layout::kV;
#pragma unroll
      for (i32 i = 0; i < kVector; ++i) {
        const float inv = channels.inv_v_scale[first_channel + i];
        u8* to = tile_data + Layout::VRows::offset(first_channel + i, column / 16) + column % 16;
        *reinterpret_cast<u32*>(to) = ptx::e4m3x4(x[0][i] * inv, x[1][i] * inv, x[2][i] * inv, x[3][i] * inv);
      }
    }
  }

  // All loads of a tile before the first use: rows are short, and only loads in flight hide the memory's latency.
  template <bool kAligned>
  __device__ __forceinline__ void quantize_v_f16(i32 head, i32 first_tile, bool finite) const {
    static_assert(Config::kBlockN * kVectors % Config::kThreads == 0, "every thread takes equally many keys");
    constexpr i32 kSteps = Config::kBlockN * kVectors / Config::kThreads;
    constexpr i32 kKeysAtOnce = Config::kThreads / kVectors;
    const Source<kAligned> source = kv_source<kAligned>(params.v, head);
    const i32 vector = threadIdx.x % kVectors, first_key = threadIdx.x / kVectors;
    const i32 end = min(first_tile + kTilesPerBlock, params.kv_tiles);
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
