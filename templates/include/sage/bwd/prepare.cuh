// The tiles that the backward kernels read, bwd/tile.cuh: Q̂ and K̂ from the forward pass, dO and V from the caller,
// D = sum of dO · O of every query, and dO as s8 with a scale per group of rows.
// Source: SageAttention3, Algorithm 3; FlashAttention-2, Algorithm 2, for D.
#pragma once

#include "sage/bwd/tile.cuh"
#include "sage/constants.cuh"
#include "sage/numerics/integers.cuh"
#include "sage/ptx/global.cuh"
#include "sage/ptx/special.cuh"
#include "sage/ptx/warp.cuh"
#include "sage/quant/source.cuh"

namespace sage {

// Config: kHeadDim, kQk, kPv, kBlockM, kBlockN, kWarpM of the forward pass; kThreads.
template <class Config>
struct BwdPrepare {
  using Tile = BwdTile<Config>;
  using Forward = TileLayout<Config>;
  static constexpr i32 kVectors = Config::kHeadDim / kVector;  // lanes of a row
  static constexpr i32 kRowsAtOnce = Config::kThreads / kVectors;
  static constexpr i32 kPitch = Config::kHeadDim / 4 + 1;  // words of a row in shared memory: columns in other banks
  static_assert(kTileRows % kRowsAtOnce == 0);
  // A lane's keys of a tile, 8n + 2t and 8n + 2t + 1, share a scale, and of 16 queries in a row those 8 apart.
  static_assert(Config::kQk == Qk::kInt8 && Config::kBlockN % kTileRows == 0 && kKeyGroups == 4);
  static_assert(Config::kWarpM % 16 == 0 && kRowGroups<Config> == 8);

  static constexpr i32 kSteps = kTileRows / kRowsAtOnce;

  using Rows = u32[kTileRows][kPitch];
  struct Shared {
    Rows codes, grad;
    float amax[kTileRows];  // of rows of dO
  };

  static constexpr auto facts() {
    return sage::facts(Fact{"threads", Config::kThreads}, Fact{"shared_bytes", 0}, Fact{"tile_rows", kTileRows},
                       Fact{"q_side_bytes", Tile::kQBytes}, Fact{"kv_side_bytes", Tile::kKvBytes},
                       Fact{"k_tile_bytes", Forward::kKBytes}, Fact{"k_line_bytes", KvLine::kBytes});
  }

  const BwdParams& params;
  Shared& shared;

  // blockIdx.x: tiles of Q and dO, then those of K and V; tiles fastest.
  template <SourceRows kSource>
  __device__ __forceinline__ void run() const {
    const i32 block = ptx::block_index();
    if (block < params.q_side_blocks) prepare_q<kSource>(block / params.q_side_tiles, block % params.q_side_tiles);
    else
      prepare_kv<kSource>((block - params.q_side_blocks) / params.kv_side_tiles,
                          (block - params.q_side_blocks) % params.kv_side_tiles);
  }

 private:
  __device__ __forceinline__ static i32 first_channel() { return ptx::thread_index() % kVectors * kVector; }
  __device__ __forceinline__ static i32 own_row(i32 step) {
    return step * kRowsAtOnce + ptx::thread_index() / kVectors;
  }

  template <SourceRows kSource>
  __device__ __forceinline__ void prepare_q(i32 head_of_all, i32 tile) const {
    const i32 batch = head_of_all / params.num_q_heads, head = head_of_all % params.num_q_heads;
    const Source<kSource> grad_out(params.grad_out, batch, head, 0, params.seqlen_q, params.headdim, params.dtype);
    const Source<kSource> out(params.out, batch, head, 0, params.seqlen_q, params.headdim, params.dtype);
    u8* const to = params.q_side + (static_cast<i64>(head_of_all) * params.q_side_tiles + tile) * Tile::kQBytes;
    float grad[kSteps][kVector];
#pragma unroll
    for (i32 step = 0; step < kSteps; ++step) {
      const i32 own = own_row(step), row = tile * kTileRows + own;
      float o[kVector];
      load_or_zeros(grad_out, row, grad[step]);
      load_or_zeros(out, row, o);
      store_halves(to + Tile::kHalves, own, grad[step]);
      const i32 existing = min(row, params.seqlen_q - 1);
      copy_codes<typename Forward::QRows, Config::kBlockM>(params.q_hat + static_cast<i64>(head_of_all) *
                                                                              params.q_tiles * Forward::kQBytes,
                                                           Forward::kQBytes, existing, own, to);

      float amax = 0.0f, delta = 0.0f;
#pragma unroll
      for (i32 i = 0; i < kVector; ++i) {
        amax = ptx::max_nan(amax, fabsf(grad[step][i]));
        delta = fmaf(grad[step][i], o[i], delta);
      }
#pragma unroll
      for (i32 mask = kVectors / 2; mask > 0; mask /= 2) amax = ptx::max_nan(amax, ptx::shuffle_xor(amax, mask));
      delta = ptx::sum_over_lanes<kVectors>(delta);
      // Integers hold no NaN. The log-sum-exp of a row of dO that is not finite is NaN, and thereby P of what it sees.
      const bool finite = amax < ptx::infinity();
#pragma unroll
      for (i32 i = 0; i < kVector; ++i) grad[step][i] = finite ? grad[step][i] : 0.0f;
      if (ptx::thread_index() % kVectors == 0) {
        shared.amax[own] = finite ? amax : 0.0f;
        of_query(to, Tile::kQueryScales, own) = q_scale(head_of_all, existing);
        of_query(to, Tile::kMinusLse, own) = finite ? minus_lse(head_of_all, row) : ptx::quiet_nan();
        of_query(to, Tile::kMinusDelta, own) = -delta;
        of_query(to, Tile::kMinusScaledDelta, own) = -delta * q_scale(head_of_all, existing);
      }
    }
    __syncthreads();
#pragma unroll
    for (i32 step = 0; step < kSteps; ++step) {
      const i32 own = own_row(step);
      const Scale scale = grad_scale(own % kGradGroups);
      u32* const codes = &shared.grad[own][first_channel() / 4];
      const float inv_scale[2] = {scale.inv_scale, scale.inv_scale};
      codes[0] = rounded_bytes(reinterpret_cast<const float (&)[4]>(grad[step][0]), inv_scale);
      codes[1] = rounded_bytes(reinterpret_cast<const float (&)[4]>(grad[step][4]), inv_scale);
      if (own < kGradGroups && ptx::thread_index() % kVectors == 0) of_query(to, Tile::kGradScales, own) = scale.scale;
    }
    __syncthreads();
    store_transposed(shared.codes, to + Tile::kTransposed);
    store_transposed(shared.grad, to + Tile::kGrad);
  }

  template <SourceRows kSource>
  __device__ __forceinline__ void prepare_kv(i32 head_of_all, i32 tile) const {
    const i32 batch = head_of_all / params.num_kv_heads, head = head_of_all % params.num_kv_heads;
    const Source<kSource> v(params.v, batch, head, 0, params.seqlen_kv, params.headdim, params.dtype);
    u8* const to = params.kv_side + (static_cast<i64>(head_of_all) * params.kv_side_tiles + tile) * Tile::kKvBytes;
    const u8* const from = params.k_hat + static_cast<i64>(head_of_all) * params.kv_tiles * kKeyTileBytes;
#pragma unroll
    for (i32 step = 0; step < kSteps; ++step) {
      const i32 own = own_row(step), row = tile * kTileRows + own;
      float x[kVector];
      load_or_zeros(v, row, x);
      store_halves(to + Tile::kHalves, own, x);
      const i32 existing = min(row, params.seqlen_kv - 1);
      copy_codes<typename Forward::KRows, Config::kBlockN>(from, kKeyTileBytes, existing, own, to);
      if (ptx::thread_index() % kVectors == 0) {
        reinterpret_cast<float*>(to + Tile::kKeyScales)[own] = key_scale(from, existing);
      }
    }
    __syncthreads();
    store_transposed(shared.codes, to + Tile::kTransposed);
  }

  static constexpr i32 kKeyTileBytes = Forward::kKBytes + KvLine::kBytes;

  // Zeros for a row that does not exist.
  template <SourceRows kSource>
  __device__ __forceinline__ static void load_or_zeros(const Source<kSource>& source, i32 row, float (&x)[kVector]) {
    source.convert(source.load(row, first_channel()), x);
#pragma unroll
    for (i32 i = 0; i < kVector; ++i) x[i] = row < source.rows ? x[i] : 0.0f;
  }

  __device__ __forceinline__ static float& of_query(u8* tile, i32 array, i32 query) {
    return reinterpret_cast<float*>(tile + array)[query];
  }

  // Of a group of rows of dO.
  __device__ __forceinline__ Scale grad_scale(i32 group) const {
    float amax = 0.0f;
#pragma unroll
    for (i32 row = group; row < kTileRows; row += kGradGroups) amax = fmaxf(amax, shared.amax[row]);
    return scale_to(127.0f, amax);
  }

  // Exact: they came from this type.
  __device__ __forceinline__ void store_halves(u8* halves, i32 row, const float (&x)[kVector]) const {
    u32 word[kVector / 2];
#pragma unroll
    for (i32 w = 0; w < kVector / 2; ++w) {
      word[w] = params.dtype == Dtype::kBf16 ? ptx::bf16x2(x[2 * w], x[2 * w + 1]) : ptx::f16x2(x[2 * w], x[2 * w + 1]);
    }
    ptx::store_global_u32x4(halves + Tile::Halves::offset(row, first_channel() / kVector),
                            {word[0], word[1], word[2], word[3]});
  }

  // Eight channels of a row of the forward pass's tiles of kRows rows, to this tile and to shared memory.
  template <class Swizzle, i32 kRows>
  __device__ __forceinline__ void copy_codes(const u8* head, i32 tile_bytes, i32 row, i32 own, u8* to) const {
    const i32 chunk = first_channel() / 16, half = first_channel() % 16;
    const u8* from = head + static_cast<i64>(row / kRows) * tile_bytes + Swizzle::offset(row % kRows, chunk) + half;
    const u64 codes = *reinterpret_cast<const u64*>(from);
    *reinterpret_cast<u64*>(to + Tile::kCodes + Tile::Codes::offset(own, chunk) + half) = codes;
    shared.codes[own][first_channel() / 4] = static_cast<u32>(codes);
    shared.codes[own][first_channel() / 4 + 1] = static_cast<u32>(codes >> 32);
  }

  __device__ __forceinline__ float q_scale(i32 head_of_all, i32 row) const {
    constexpr i32 kGroups = Config::kBlockM / Config::kWarpM * kRowGroups<Config>;
    const i32 own = row % Config::kBlockM;
    const i64 tile = static_cast<i64>(head_of_all) * params.q_tiles + row / Config::kBlockM;
    return params.q_scale[tile * kGroups + own / Config::kWarpM * kRowGroups<Config> + own % kRowGroups<Config>];
  }

  __device__ __forceinline__ float minus_lse(i32 head_of_all, i32 row) const {
    if (row >= params.seqlen_q) return -ptx::infinity();
    const float lse = params.lse[static_cast<i64>(head_of_all) * params.seqlen_q + row];
    return lse == -ptx::infinity() ? lse : -(lse * kLog2E);
  }

  // Its sign says whether the forward pass met a key that is not finite; the log-sum-exp of rows that see it is NaN.
  __device__ __forceinline__ static float key_scale(const u8* head, i32 key) {
    const auto* line = reinterpret_cast<const KvLine*>(head + static_cast<i64>(key / Config::kBlockN) * kKeyTileBytes +
                                                       Forward::kKBytes);
    return fabsf(line->group[key % (2 * kKeyGroups) / 2].k_scale);
  }

  // Each thread takes four channels of 16 rows at a time.
  __device__ __forceinline__ static void store_transposed(const Rows& rows, u8* transposed) {
    constexpr i32 kWords = Config::kHeadDim / 4, kTasks = kWords * kTileRows / 16;
    static_assert(kTasks % Config::kThreads == 0 || kTasks < Config::kThreads);
    for (i32 task = ptx::thread_index(); task < kTasks; task += Config::kThreads) {
      const i32 word = task % kWords, chunk = task / kWords;
      u32 of_channel[4][4];
#pragma unroll
      for (i32 w = 0; w < 4; ++w) {
        u32 row[4];
#pragma unroll
        for (i32 i = 0; i < 4; ++i) row[i] = rows[key_of_column<Pv::kE4m3>(16 * chunk + 4 * w + i)][word];
        const u32 low01 = ptx::prmt(row[0], row[1], 0x5140), high01 = ptx::prmt(row[0], row[1], 0x7362);
        const u32 low23 = ptx::prmt(row[2], row[3], 0x5140), high23 = ptx::prmt(row[2], row[3], 0x7362);
        of_channel[0][w] = ptx::prmt(low01, low23, 0x5410), of_channel[1][w] = ptx::prmt(low01, low23, 0x7632);
        of_channel[2][w] = ptx::prmt(high01, high23, 0x5410), of_channel[3][w] = ptx::prmt(high01, high23, 0x7632);
      }
#pragma unroll
      for (i32 c = 0; c < 4; ++c) {
        ptx::store_global_u32x4(transposed + Tile::Transposed::offset(4 * word + c, chunk),
                                {of_channel[c][0], of_channel[c][1], of_channel[c][2], of_channel[c][3]});
      }
    }
  }
};

}  // namespace sage
