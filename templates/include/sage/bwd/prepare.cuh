// The sides of the tiles that the backward kernels read, bwd/tile.cuh: D = sum of dO · O of every query; Q̂ and K̂
// transposed, and dO as s8 with a scale per group of rows. With kHalves, instead of both: Q̂ and K̂ in bf16, and dO
// with zeros for rows that are not finite. P of such a row is NaN for keys that it sees and zero for others; zero
// times NaN would spoil the dV of these.
// Source: SageAttention3, Algorithm 3; FlashAttention-2, Algorithm 2, for D.
#pragma once

#include "sage/bwd/entry.cuh"
#include "sage/bwd/tile.cuh"
#include "sage/constants.cuh"
#include "sage/numerics/integers.cuh"
#include "sage/numerics/scale.cuh"
#include "sage/ptx/global.cuh"
#include "sage/ptx/special.cuh"
#include "sage/ptx/warp.cuh"
#include "sage/quant/source.cuh"

namespace sage {

// Config: kHeadDim, kQk, kPv, kBlockM, kBlockN, kWarpM of the forward pass; kHalves; kThreads.
template <class Config>
struct BwdPrepare {
  using Tile = BwdTile<Config>;
  using Forward = TileLayout<Config>;
  static constexpr i32 kVectors = Config::kHeadDim / kVector;  // lanes of a row
  static constexpr i32 kRowsAtOnce = Config::kThreads / kVectors;
  static constexpr i32 kPitch = Config::kHeadDim / 4 + 1;  // words of a row in shared memory: columns in other banks
  static_assert(kTileRows % kRowsAtOnce == 0);
  // A lane's keys of a tile, 8n + 2t and 8n + 2t + 1, share a scale, and of 16 queries in a row those 8 apart.
  static_assert(Config::kQk == Qk::kInt8 && kKeyGroups == 4 && kRowGroups<Config> == 8 && Config::kWarpM % 16 == 0);
  // A tile of codes is a part of a tile of the forward pass.
  static_assert(Config::kBlockM % kTileRows == 0 && Config::kBlockN % kTileRows == 0 && Config::kHeadDim <= 128);

  static constexpr i32 kSteps = kTileRows / kRowsAtOnce;
  // The margin that is taken off a log-sum-exp, relative to it: more than it and the scores lose by rounding. The P of
  // a key that alone has weight is then 1 and not less, however large the scores.
  static constexpr float kLseMargin = 0x1p-21f;
  // The largest scale of Q, and of K: dP and D, up to 2^47, times a scale are finite.
  static constexpr float kLargestPart = 0x1p80f;
  // A scale of Q or K up to this, times any scale of the other, is at most kLargestScale, as in the forward pass.
  static constexpr float kUsualPart = 0x1p20f;
  // A scale of Q or K up to this stays as it is. Where both sides have larger ones, this bounds both.
  static constexpr float kEqualPart = 0x1p50f;
  static_assert(kLargestPart * kUsualPart == kLargestScale && kEqualPart * kEqualPart == kLargestScale);

  using Rows = u32[kTileRows][kPitch];
  struct Shared {
    Rows rows[2];           // Q̂ and dÔ, or K̂
    float amax[kTileRows];  // of rows of dO, infinite or NaN where one is not finite
    float minus_delta[kTileRows];
    float minus_lse[kTileRows];
    u32 key_has_codes[kTileRows];
  };

  static constexpr auto facts() {
    return sage::facts(Fact{"threads", Config::kThreads}, Fact{"shared_bytes", 0}, Fact{"tile_rows", kTileRows},
                       Fact{"q_side_bytes", Tile::kQSideBytes}, Fact{"kv_side_bytes", Tile::kKvSideBytes},
                       Fact{"k_tile_bytes", Forward::kKBytes}, Fact{"k_line_bytes", KvLine::kBytes});
  }

  const BwdParams& params;
  Shared& shared;

  // blockIdx.x: tiles of Q and dO, then those of K and V; tiles fastest.
  template <SourceRows kSource, bool kPacked>
  __device__ __forceinline__ void run() const {
    const i32 block = ptx::block_index();
    if (block < params.q_side_blocks) {
      prepare_q<kSource, kPacked>(block / params.q_side_tiles, block % params.q_side_tiles);
    } else {
      prepare_kv<kPacked>(block - params.q_side_blocks);
    }
  }

 private:
  static constexpr i32 kOfCodes = 0, kOfGrad = 1;
  static_assert(Tile::kGrad - Tile::kTransposed == Tile::kCodeBytes, "dÔ lies behind Q̂, transposed too");

  __device__ __forceinline__ static i32 first_channel() { return ptx::thread_index() % kVectors * kVector; }
  __device__ __forceinline__ static i32 own_row(i32 step) {
    return step * kRowsAtOnce + ptx::thread_index() / kVectors;
  }

  // tile: of the head's run.
  template <SourceRows kSource, bool kPacked>
  __device__ __forceinline__ void prepare_q(i32 head_of_all, i32 tile) const {
    const i32 batch = head_of_all / params.num_q_heads, head = head_of_all % params.num_q_heads;
    const BwdEntry<kPacked> entry(params, batch, params.cu_seqlens_q, Config::kBlockM,
                                  tile / (Config::kBlockM / kTileRows));
    const CallerRows rows = entry.queries();
    const i32 first_row = (tile - entry.first_q_tile()) * kTileRows;
    if (first_row >= rows.count) return;
    constexpr Dtype kDtype = dtype_of(kSource);
    const Source<kSource> grad_out(params.grad_out, batch, head, rows.begin, rows.count, params.headdim, kDtype);
    const Source<kSource> out(params.out, batch, head, rows.begin, rows.count, params.headdim, kDtype);
    const i32 tile_of_all = head_of_all * params.q_side_tiles + tile;
    u8* const to = Tile::q_side(params, tile_of_all);
    // All loads stand in front of all stores, which the compiler does not move them across.
    typename Source<kSource>::Raw grad[kSteps], o[kSteps];
    u64 codes[kSteps];
#pragma unroll
    for (i32 step = 0; step < kSteps; ++step) {
      grad[step] = grad_out.load(first_row + own_row(step), first_channel());
      o[step] = out.load(first_row + own_row(step), first_channel());
      codes[step] = load_codes(Tile::q_codes(params, tile_of_all), own_row(step));
    }
    const i32 query = ptx::thread_index() % kTileRows;
    const float lse = minus_lse(head_of_all, rows, first_row + query);
    const auto largest_k = [&] { return largest_k_scale(entry, head_of_all / params.q_heads_per_kv_head); };
    const float forward_scale = bounded(q_scale(tile_of_all, query), largest_k);

#pragma unroll
    for (i32 step = 0; step < kSteps; ++step) {
      const i32 own = own_row(step);
      float x[kVector], y[kVector], amax = 0.0f, delta = 0.0f;
      convert(grad_out, grad[step], first_row + own, x);
      convert(out, o[step], first_row + own, y);
#pragma unroll
      for (i32 i = 0; i < kVector; ++i) {
        amax = ptx::max_nan(amax, fabsf(x[i]));
        delta = fmaf(x[i], y[i], delta);
      }
#pragma unroll
      for (i32 mask = kVectors / 2; mask > 0; mask /= 2) amax = ptx::max_nan(amax, ptx::shuffle_xor(amax, mask));
      delta = ptx::sum_over_lanes<kVectors>(delta);
      if (ptx::thread_index() % kVectors == 0) shared.amax[own] = amax, shared.minus_delta[own] = -delta;
      put(shared.rows[kOfCodes], own, static_cast<u32>(codes[step]), static_cast<u32>(codes[step] >> 32));
    }
    if (ptx::thread_index() < kTileRows) shared.minus_lse[query] = lse;
    __syncthreads();
    if (ptx::thread_index() < kTileRows) {
      const float minus_delta = shared.minus_delta[query];
      // Groups of zeros contribute nothing: scales of zero leave the steps of their tile's sums to others.
      const i32 queries = rows.count - first_row;
      const float scale = has_codes(query, queries) || has_codes(query ^ 8, queries) ? forward_scale : 0.0f;
      of_query(to, Tile::kQueryScales, query) = scale;
      // Integers hold no NaN. The log-sum-exp of a row of dO that is not finite is NaN, and thereby P of what it sees.
      of_query(to, Tile::kMinusLse, query) = is_finite(query) ? lse : ptx::quiet_nan();
      of_query(to, Tile::kMinusDelta, query) = minus_delta;
      of_query(to, Tile::kMinusScaledDelta, query) = minus_delta * scale;
      if constexpr (!Config::kHalves) {
        if (query < kGradGroups) {
          const Scale grad = grad_scale(query);
          of_query(to, Tile::kGradScales, query) = grad.inv_scale > 0.0f ? grad.scale : 0.0f;
        }
      }
    }
    if constexpr (Config::kHalves) {
      if (params.q_counts != nullptr && ptx::thread_index() == 0) *q_count(params, tile_of_all) = 0;
#pragma unroll
      for (i32 step = 0; step < kSteps; ++step) {
        const i32 own = own_row(step);
        store_half_row(to + (Tile::kHalves - Tile::kQSide), own, grad[step],
                       first_row + own < rows.count && is_finite(own));
      }
      store_halves(to + (Tile::kQHalfCodes - Tile::kQSide), codes);
    } else {
#pragma unroll
      for (i32 step = 0; step < kSteps; ++step) {
        const i32 own = own_row(step);
        float x[kVector];
        convert(grad_out, grad[step], first_row + own, x);
        const float inv = grad_scale(own % kGradGroups).inv_scale, inv_scale[2] = {inv, inv};
#pragma unroll
        for (i32 i = 0; i < kVector; ++i) x[i] = counts(own) ? x[i] : 0.0f;
        put(shared.rows[kOfGrad], own, rounded_bytes(reinterpret_cast<const float (&)[4]>(x[0]), inv_scale),
            rounded_bytes(reinterpret_cast<const float (&)[4]>(x[4]), inv_scale));
      }
      __syncthreads();
      store_transposed<2>(to + (Tile::kTransposed - Tile::kQSide));
    }
  }

  // tile_of_all: of all heads.
  template <bool kPacked>
  __device__ __forceinline__ void prepare_kv(i32 tile_of_all) const {
    const i32 kv_head_of_all = tile_of_all / params.kv_side_tiles, batch = kv_head_of_all / params.num_kv_heads;
    const i32 tile = tile_of_all % params.kv_side_tiles;
    const BwdEntry<kPacked> entry(params, batch, params.cu_seqlens_k, Config::kBlockN,
                                  tile / (Config::kBlockN / kTileRows));
    const i32 keys = entry.keys().count - (tile - entry.first_kv_tile()) * kTileRows;  // from the tile's first on
    if (keys <= 0) return;
    u8* const to = Tile::kv_side(params, tile_of_all);
    u64 codes[kSteps];
#pragma unroll
    for (i32 step = 0; step < kSteps; ++step) {
      codes[step] = load_codes(Tile::k_codes(params, tile_of_all), own_row(step));
    }
    const i32 key = ptx::thread_index();
    const auto largest_q = [&] { return largest_q_scale(entry, kv_head_of_all); };
    const float forward_scale = key < kTileRows ? bounded(key_scale(tile_of_all, key), largest_q) : 0.0f;
#pragma unroll
    for (i32 step = 0; step < kSteps; ++step) {
      put(shared.rows[kOfCodes], own_row(step), static_cast<u32>(codes[step]), static_cast<u32>(codes[step] >> 32));
    }
    __syncthreads();
    if (key < kTileRows) shared.key_has_codes[key] = has_codes(key, keys);
    __syncthreads();
    if (key < kTileRows) {  // zero for a group of zeros, as for queries
      reinterpret_cast<float*>(to + (Tile::kKeyScales - Tile::kSide))[key] =
          group_has_codes(key) ? forward_scale : 0.0f;
    }
    if constexpr (Config::kHalves) store_halves(to + (Tile::kHalfCodes - Tile::kSide), codes);
    else store_transposed<1>(to + (Tile::kTransposed - Tile::kSide));
  }

  // Zeros for a row that does not exist.
  template <SourceRows kSource>
  __device__ __forceinline__ static void convert(
      const Source<kSource>& source, const typename Source<kSource>::Raw& raw, i32 row, float (&x)[kVector]) {
    source.convert(raw, x);
#pragma unroll
    for (i32 i = 0; i < kVector; ++i) x[i] = row < source.rows ? x[i] : 0.0f;
  }

  // Whether a row of dO is.
  __device__ __forceinline__ bool is_finite(i32 row) const { return shared.amax[row] < ptx::infinity(); }

  // Whether a row of dO is rounded with the others. A row that sees no key has no part in any gradient.
  __device__ __forceinline__ bool counts(i32 row) const {
    return is_finite(row) && shared.minus_lse[row] != -ptx::infinity();
  }

  __device__ __forceinline__ static float& of_query(u8* side, i32 array, i32 query) {
    return reinterpret_cast<float*>(side + (array - Tile::kQSide))[query];
  }

  // The scale of a group of rows of dO.
  __device__ __forceinline__ Scale grad_scale(i32 group) const {
    float amax = 0.0f;
#pragma unroll
    for (i32 row = group; row < kTileRows; row += kGradGroups) {
      amax = fmaxf(amax, counts(row) ? shared.amax[row] : 0.0f);
    }
    return scale_to(127.0f, amax);
  }

  // This thread's eight channels of a row of a tile of codes.
  __device__ __forceinline__ static u64 load_codes(const u8* tile, i32 row) {
    const i32 chunk = first_channel() / 16, half = first_channel() % 16;
    return *reinterpret_cast<const u64*>(tile + Tile::Codes::offset(row, chunk) + half);
  }
  __device__ __forceinline__ static void put(Rows& rows, i32 row, u32 first_four, u32 last_four) {
    rows[row][first_channel() / 4] = first_four, rows[row][first_channel() / 4 + 1] = last_four;
  }

  // Whether a row, of `rows` that there are, has a code other than zero.
  __device__ __forceinline__ bool has_codes(i32 row, i32 rows) const {
    u32 any = 0;
#pragma unroll 4
    for (i32 word = 0; word < Config::kHeadDim / 4; ++word) any |= shared.rows[kOfCodes][row][word];
    return row < rows && any != 0;
  }

  // The same of the keys that share a key's scale.
  __device__ __forceinline__ bool group_has_codes(i32 key) const {
    u32 any = 0;
#pragma unroll
    for (i32 first = key % 8 / 2 * 2; first < kTileRows; first += 8) {
      any |= shared.key_has_codes[first] | shared.key_has_codes[first + 1];
    }
    return any != 0;
  }

  // The scales of a tile of the forward pass are those of its warps, one behind the other.
  __device__ __forceinline__ float q_scale(i32 tile_of_all, i32 row) const {
    const i64 warp = (static_cast<i64>(tile_of_all) * kTileRows + row) / Config::kWarpM;
    return fminf(params.q_scale[warp * kRowGroups<Config> + row % kRowGroups<Config>], kLargestPart);
  }

  __device__ __forceinline__ float minus_lse(i32 head_of_all, const CallerRows& rows, i32 row) const {
    if (row >= rows.count) return -ptx::infinity();
    const float lse = params.lse[static_cast<i64>(head_of_all) * params.q_rows + rows.at(row)];
    const float lse_log2 = lse * kLog2E;
    return lse == -ptx::infinity() ? lse : fmaf(fabsf(lse_log2), kLseMargin, -lse_log2);
  }

  // A scale of Q, or of K, bounded so that its product with each scale of the other is within kLargestScale.
  // largest_of_other(): the largest of these. Call with whole warps.
  template <class LargestOfOther>
  __device__ __forceinline__ static float bounded(float scale, LargestOfOther largest_of_other) {
    if (!ptx::any(scale > kUsualPart)) return scale;
    const float most = divide(kLargestScale, fmaxf(largest_of_other(), kUsualPart));
    return fminf(scale, fmaxf(most, kEqualPart));
  }

  // The largest scale of a batch entry's queries, in all q heads that read a KV head; or of its keys.
  template <class Entry>
  __device__ __forceinline__ float largest_q_scale(const Entry& entry, i32 kv_head_of_all) const {
    const i32 heads = params.q_heads_per_kv_head;
    float largest = 0.0f;
    for (i32 head = kv_head_of_all * heads; head < (kv_head_of_all + 1) * heads; ++head) {
      const i32 tile = head * params.q_side_tiles + entry.first_q_tile();
      const auto scale_of = [&](i32 row) { return q_scale(tile + row / kTileRows, row % kTileRows); };
      largest = fmaxf(largest, largest_of_rows(entry.queries().count, scale_of));
    }
    return largest;
  }
  template <class Entry>
  __device__ __forceinline__ float largest_k_scale(const Entry& entry, i32 kv_head_of_all) const {
    const i32 tile = kv_head_of_all * params.kv_side_tiles + entry.first_kv_tile();
    const auto scale_of = [&](i32 row) { return key_scale(tile + row / kTileRows, row % kTileRows); };
    return largest_of_rows(entry.keys().count, scale_of);
  }

  // The largest scale_of(row), found by a warp.
  template <class ScaleOf>
  __device__ __forceinline__ static float largest_of_rows(i32 rows, ScaleOf scale_of) {
    float largest = 0.0f;
    for (i32 row = ptx::thread_index() % kWarpSize; row < rows; row += kWarpSize) {
      largest = fmaxf(largest, scale_of(row));
    }
    return ptx::max_over_lanes<kWarpSize>(largest);
  }

  // Its sign says whether the forward pass met a key that is not finite; the log-sum-exp of rows that see it is NaN.
  __device__ __forceinline__ float key_scale(i32 tile_of_all, i32 key) const {
    constexpr i32 kParts = Config::kBlockN / kTileRows;
    const u8* const end_of_part = Tile::k_codes(params, tile_of_all) + Tile::kCodeBytes;
    const u8* const line = end_of_part + (kParts - 1 - tile_of_all % kParts) * Tile::kCodeBytes;
    const float scale = reinterpret_cast<const KvLine*>(line)->group[key % (2 * kKeyGroups) / 2].k_scale;
    return fminf(fabsf(scale), kLargestPart);
  }

  // Stores this thread's channels of a row in 16 bits; zeros unless it counts.
  __device__ __forceinline__ static void store_half_row(u8* to, i32 row, const Halves& x, bool counts) {
    const auto word = [&](i32 w) { return counts ? x.word[w] : 0; };
    ptx::store_global_u32x4(to + Tile::Halves::offset(row, first_channel() / kVector),
                            {word(0), word(1), word(2), word(3)});
  }

  // Stores this thread's codes as bf16.
  __device__ __forceinline__ static void store_halves(u8* to, const u64 (&codes)[kSteps]) {
#pragma unroll
    for (i32 step = 0; step < kSteps; ++step) {
      u32 pair[kVector / 2];
#pragma unroll
      for (i32 i = 0; i < kVector / 2; ++i) {
        const auto code = [&](i32 e) { return static_cast<float>(static_cast<i8>(codes[step] >> 8 * (2 * i + e))); };
        pair[i] = ptx::bf16x2(code(0), code(1));
      }
      ptx::store_global_u32x4(to + Tile::Halves::offset(own_row(step), first_channel() / kVector),
                              {pair[0], pair[1], pair[2], pair[3]});
    }
  }

  // Stores the first kCount of the rows, one transposed array behind the other. Each thread takes four channels of 16
  // rows at a time; lanes side by side take the same channels, so that a store fills whole sectors.
  template <i32 kCount>
  __device__ __forceinline__ void store_transposed(u8* to) const {
    constexpr i32 kWords = Config::kHeadDim / 4, kChunks = kTileRows / 16, kTasks = kWords * kChunks;
    for (i32 task = ptx::thread_index(); task < kCount * kTasks; task += Config::kThreads) {
      const i32 chunk = task % kChunks, word = task / kChunks % kWords;
      const Rows& rows = shared.rows[task / kTasks];
      u8* const transposed = to + task / kTasks * Tile::kCodeBytes;
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
