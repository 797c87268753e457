// V as e4m3, f16 or NVFP4, with a scale per channel and a factor per KV tile. Smoothed: less the mean per channel of a
// sample.
//
// The scale takes the mean magnitude of a sample to a value that leaves room above. For e4m3 and NVFP4, floating-point
// formats that need no tight scale, that value is v_typical. For f16 the scale is a power of two, so that a bf16 keeps
// all its bits. Where a tile's largest value lies beyond the room, or far below, the tile is divided by v_factor, a
// power of two, by which attention multiplies the tile's P·V. A huge value costs precision in its own tile. Beyond
// kLargestScaled a value counts as that, so that sums of P·V stay finite. Values that are not finite are quantized as
// minus zero, which marks them. The tile's line has their channels.
// Source: SageAttention2, sections 3.3 and 3.4.
#pragma once

#include "sage/ptx/shared.cuh"
#include "sage/ptx/warp.cuh"
#include "sage/quant/kept_sums.cuh"
#include "sage/quant/rows.cuh"
#include "sage/quant/v_pieces.cuh"

namespace sage {

template <class Config>
struct QuantizeV {
  using Block = QuantBlock<Config>;
  using Layout = typename Block::Layout;
  using Piece = typename SelectPiece<Config>::Type;
  static constexpr i32 kTilesAtOnce = Block::kTilesOfV, kPairs = kVector / 2;
  static_assert(KvLine::kChannelsOfMark == kVector, "a thread marks the channels that it takes of a key");

  const QuantParams& params;
  typename Block::Shared& shared;

  // Block::kTiles tiles of one head from first_tile on, kTilesAtOnce at a time.
  template <SourceRows kSource>
  __device__ __forceinline__ void run(i32 batch, i32 head, i32 first_tile) const {
    const Source<kSource> source = Block::template kv_source<kSource>(params, params.v, batch, head);
    if (!Block::has_keys(source.rows, first_tile)) return;
    Held<kSource> rows;
    const auto load = [&](i32 tile) { rows.load([&](i32 i) { return load_row(source, tile, i); }); };
    load(first_tile);
    load_scales(channel_index<Config>(batch * params.num_kv_heads + head));
#pragma unroll 1
    for (i32 round = 0; round < Block::kTiles / kTilesAtOnce; ++round) {
      const i32 tile = first_tile + round * kTilesAtOnce;
      if (!Block::has_keys(source.rows, tile)) return;
      if (round > 0) {
        __syncthreads();  // what the block shares of the tiles before has been read
        load(tile);
      }
      quantize(source, first_kv_tile_of(params, batch, head, Config::kBlockN), tile, rows);
    }
  }

 private:
  // Rows of the block's tiles.
  template <SourceRows kSource>
  using Held = HeldRows<kSource, kSource != SourceRows::kAny, Piece::kSteps * Piece::kKeys>;

  template <class Source>
  __device__ __forceinline__ static auto load_row(const Source& source, i32 first_tile, i32 i) {
    const Piece piece(i / Piece::kKeys);
    const i32 key = (first_tile + piece.tile) * Config::kBlockN + piece.key(i % Piece::kKeys);
    return source.load(key, Piece::first_channel());
  }

  // (V less its mean) / v_scale / v_factor, for this thread's channels. SourceRows::kAny, whose rows are f32, leaves no
  // registers for factors and shifts: they are read from shared memory each time.
  template <SourceRows kSource>
  struct Map {
    static constexpr bool kHeld = kSource != SourceRows::kAny;

    const typename Block::Shared& shared;
    float inv_v_factor;
    float factors[kHeld ? kVector : 1], shifts[kHeld ? kVector : 1];

    __device__ __forceinline__ Map(const typename Block::Shared& shared_, float inv_v_factor_)
        : shared(shared_), inv_v_factor(inv_v_factor_) {
      if constexpr (kHeld) {
#pragma unroll
        for (i32 i = 0; i < kVector; ++i) factors[i] = factor(i), shifts[i] = shift(i);
      }
    }
    __device__ __forceinline__ float operator()(float x, i32 i) const {
      if constexpr (kHeld) return fmaf(x, factors[i], shifts[i]);
      else return fmaf(x, factor(i), shift(i));
    }

   private:
    __device__ __forceinline__ float factor(i32 i) const {
      return shared.factor[Piece::first_channel() + i] * inv_v_factor;
    }
    __device__ __forceinline__ float shift(i32 i) const {
      return shared.shift[Piece::first_channel() + i] * inv_v_factor;
    }
  };

  // The block's tiles from first_tile on, whose rows are loaded.
  template <SourceRows kSource>
  __device__ __forceinline__ void quantize(const Source<kSource>& source, i32 first_kv_tile, i32 first_tile,
                                           Held<kSource>& rows) const {
    const auto load = [&](i32 i) { return load_row(source, first_tile, i); };
    [[maybe_unused]] constexpr i32 kUnroll = Held<kSource>::kUnroll;
    const Map<kSource> map(shared, 1.0f);
    float largest[kTilesAtOnce] = {};
#pragma unroll kUnroll
    for (i32 s = 0; s < Piece::kSteps; s += Piece::kStepsOfTile) {
      Extremes extremes(source, rows.get(s * Piece::kKeys, load));
#pragma unroll kUnroll
      for (i32 i = 1; i < Piece::kStepsOfTile * Piece::kKeys; ++i) extremes.add(rows.get(s * Piece::kKeys + i, load));
      note_largest(Piece(s).tile, extremes.abs_max(map), largest);
    }
    const bool usual = share_largest(largest);
    if (!usual) {
      find_spoilt(source, load, map, largest);
      rows.load(load);  // ends the rows' live range in front of find_spoilt(); this path does not read them
    }
    float inv_factor[kTilesAtOnce];
#pragma unroll
    for (i32 t = 0; t < kTilesAtOnce; ++t) {
      const Scale factor = tile_factor(largest[t], params.v_least, params.v_limit);
      inv_factor[t] = factor.inv_scale;
      if (Block::has_keys(source.rows, first_tile + t)) {
        store_line(first_kv_tile + first_tile + t, t, factor.scale, usual);
      }
    }
    if (usual && Piece::kKeepsSums) {
      store_keeping_sums(source, first_kv_tile, first_tile, inv_factor, [&](i32 i) { return rows.get(i, load); });
    } else if (usual) {
#pragma unroll kUnroll
      for (i32 s = 0; s < Piece::kSteps; ++s) {
        const auto row = [&](i32 e) { return rows.get(s * Piece::kKeys + e, load); };
        store_piece<kSource>(source, first_kv_tile, first_tile, Piece(s), inv_factor, row,
                             [](float, float x, float) { return x; });
      }
    } else {  // rare: reloads the rows, which keeps its temporaries out of the common path's registers
#pragma unroll 1
      for (i32 s = 0; s < Piece::kSteps; ++s) {
        const auto row = [&](i32 e) { return load(s * Piece::kKeys + e); };
        store_piece<SourceRows::kAny>(source, first_kv_tile, first_tile, Piece(s), inv_factor, row, bounded_or_mark);
      }
    }
  }

  // Rounds the thread's pieces, which are of one tile, and keeps the sums of a tile whose keys all exist. row(i): a key
  // of the thread. Call with all threads.
  template <SourceRows kSource, class Row>
  __device__ __forceinline__ void store_keeping_sums(const Source<kSource>& source, i32 first_kv_tile, i32 first_tile,
                                                     const float (&inv_factor)[kTilesAtOnce], Row row) const {
    if constexpr (Piece::kKeepsSums) {
      const i32 own_tile = Piece(0).tile;
      OpenKeys keys[Piece::kSteps][kPairs];
      u32 error[kPairs] = {};
      round_keys(source, of_tile(inv_factor, own_tile), row, keys, error);
      sum_over_tile(own_tile, error);
      if (!Block::has_keys(source.rows, first_tile + own_tile)) return;
      const bool whole = (first_tile + own_tile + 1) * Config::kBlockN <= source.rows;
      constexpr float kOpenOfTile = 1.0f * Config::kBlockN * OpenKeys::kOpen / OpenKeys::kKeys;
      const float part = whole ? 1.0f / kOpenOfTile : 0.0f;
      u8* tile = kv_tile_address<Config>(params.kv_hat, first_kv_tile + first_tile + own_tile);
#pragma unroll
      for (i32 w = 0; w < kPairs; ++w) {
        const u32 parts = ptx::mul_f16x2(error[w], ptx::f16x2(part, part));
#pragma unroll
        for (i32 s = 0; s < Piece::kSteps; ++s) {
#pragma unroll
          for (i32 c = 0; c < 2; ++c) *Piece(s).word(tile + Layout::kV, 2 * w + c) = keys[s][w].bytes(c, parts);
        }
      }
    }
  }

  // Rounds the thread's keys but those that stay open. error: of their sums, two channels a word.
  template <SourceRows kSource, class Row>
  __device__ __forceinline__ void round_keys(const Source<kSource>& source, float inv_v_factor, Row row,
                                             OpenKeys (&keys)[Piece::kSteps][kPairs], u32 (&error)[kPairs]) const {
    const Map<kSource> in_tile(shared, inv_v_factor);
#pragma unroll
    for (i32 s = 0; s < Piece::kSteps; ++s) {
      typename Source<kSource>::Raw own[OpenKeys::kKeys];
#pragma unroll
      for (i32 e = 0; e < OpenKeys::kKeys; ++e) own[e] = row(s * OpenKeys::kKeys + e);
#pragma unroll
      for (i32 w = 0; w < kPairs; ++w) {
        float x[2][OpenKeys::kKeys];
#pragma unroll
        for (i32 e = 0; e < OpenKeys::kKeys; ++e) {
          source.convert(own[e], w, x[0][e], x[1][e]);
#pragma unroll
          for (i32 c = 0; c < 2; ++c) x[c][e] = in_tile(x[c][e], 2 * w + c);
        }
        error[w] = ptx::add_f16x2(error[w], keys[s][w].round(x));
      }
    }
  }

  // The sums over all threads of a tile that share the thread's channels. Call with all threads.
  __device__ __forceinline__ void sum_over_tile(i32 own_tile, u32 (&error)[kPairs]) const {
#pragma unroll
    for (i32 w = 0; w < kPairs; ++w) {
#pragma unroll
      for (i32 mask = 1; mask < 8; mask *= 2) error[w] = ptx::add_f16x2(error[w], ptx::shuffle_xor(error[w], mask));
    }
    if constexpr (Piece::kWarpsOfTile > 1) {
      const auto of_warp = [&](i32 warp) { return shared.v_error[own_tile][warp] + Piece::first_channel() / 2; };
      if (ptx::thread_index() % 8 == 0) {
        *reinterpret_cast<ptx::U32x4*>(of_warp(Piece::warp_of_tile())) = {error[0], error[1], error[2], error[3]};
      }
      __syncthreads();
#pragma unroll
      for (i32 w = 0; w < kPairs; ++w) {
        error[w] = of_warp(0)[w];
#pragma unroll
        for (i32 warp = 1; warp < Piece::kWarpsOfTile; ++warp) error[w] = ptx::add_f16x2(error[w], of_warp(warp)[w]);
      }
    }
  }

  __device__ __forceinline__ static float of_tile(const float (&of_tiles)[kTilesAtOnce], i32 tile) {
    float own = of_tiles[0];
#pragma unroll
    for (i32 t = 1; t < kTilesAtOnce; ++t) own = tile == t ? of_tiles[t] : own;
    return own;
  }

  // row(e): key e of the piece. finish(v, x, inv): what is rounded of a value v, of which Map makes x by the reciprocal
  // of the tile's factor. kMap: kAny where Map should take few registers.
  template <SourceRows kMap, SourceRows kSource, class Row, class Finish>
  __device__ __forceinline__ void store_piece(const Source<kSource>& source, i32 first_kv_tile, i32 first_tile,
                                              const Piece& piece, const float (&inv_factor)[kTilesAtOnce], Row row,
                                              Finish finish) const {
    if (!Block::has_keys(source.rows, first_tile + piece.tile)) return;
    const float inv = of_tile(inv_factor, piece.tile);
    const Map<kMap> in_tile(shared, inv);
    typename Source<kSource>::Raw own[Piece::kKeys];
#pragma unroll
    for (i32 e = 0; e < Piece::kKeys; ++e) own[e] = row(e);
    const auto read = [&](i32 e, i32 w, float (&x)[2]) {
      source.convert(own[e], w, x[0], x[1]);
#pragma unroll
      for (i32 c = 0; c < 2; ++c) x[c] = finish(x[c], in_tile(x[c], 2 * w + c), inv);
    };
    u8* tile = kv_tile_address<Config>(params.kv_hat, first_kv_tile + first_tile + piece.tile);
    piece.store(tile + Layout::kV, read);
  }

  // The factor and the shift of each channel, as Statistics found them, into shared memory, behind a barrier. `first`:
  // index of the head's first channel.
  __device__ __forceinline__ void load_scales(i64 first) const {
    for (i32 c = ptx::thread_index(); c < Config::kHeadDim; c += Config::kThreads) {
      const float inv_scale = params.v_inv_scale[first + c];
      shared.factor[c] = inv_scale;
      shared.shift[c] = -params.v_mean[first + c] * inv_scale;
    }
    __syncthreads();
  }

  __device__ __forceinline__ static void note_largest(i32 tile, float amax, float (&largest)[kTilesAtOnce]) {
#pragma unroll
    for (i32 t = 0; t < kTilesAtOnce; ++t) largest[t] = tile == t ? ptx::max_nan(largest[t], amax) : largest[t];
  }

  // Reduces the largest magnitudes of each thread to those of the block. Returns whether all are finite and at most
  // kLargestScaled. Call with all threads.
  __device__ __forceinline__ bool share_largest(float (&largest)[kTilesAtOnce]) const {
    bool usual = true;
#pragma unroll
    for (i32 t = 0; t < kTilesAtOnce; ++t) {
      usual &= largest[t] <= kLargestScaled;
      largest[t] = ptx::max_over_lanes<kWarpSize>(largest[t]);
      if (ptx::thread_index() % kWarpSize == 0) shared.amax[t][ptx::thread_index() / kWarpSize] = largest[t];
    }
    usual = __syncthreads_and(usual);
#pragma unroll
    for (i32 t = 0; t < kTilesAtOnce; ++t) {
      largest[t] = shared.amax[t][0];
#pragma unroll
      for (i32 w = 1; w < Block::kWarps; ++w) largest[t] = fmaxf(largest[t], shared.amax[t][w]);
    }
    return usual;
  }

  // Runs where a value is not finite or beyond kLargestScaled: finds the channels of values that are not finite, and
  // the largest magnitude of the others, bounded. Call with all threads.
  template <class Source, class Load, class Map>
  __device__ __forceinline__ void find_spoilt(const Source& source, Load load, const Map& map,
                                              float (&largest)[kTilesAtOnce]) const {
    Block::clear_spoilt(shared);
    __syncthreads();
#pragma unroll
    for (i32 t = 0; t < kTilesAtOnce; ++t) largest[t] = 0.0f;
#pragma unroll 1
    for (i32 s = 0; s < Piece::kSteps; ++s) {
      const Piece piece(s);
#pragma unroll 1
      for (i32 e = 0; e < Piece::kKeys; ++e) {
        float x[kVector], amax = 0.0f;
        source.convert(load(s * Piece::kKeys + e), x);
        bool finite = true;
#pragma unroll
        for (i32 i = 0; i < kVector; ++i) {
          const bool own = fabsf(x[i]) < ptx::infinity();
          if (own) amax = fmaxf(amax, fminf(fabsf(map(x[i], i)), kLargestScaled));
          finite &= own;
        }
        if (!finite) Block::mark_spoilt(shared, piece.tile, Piece::first_channel() / KvLine::kChannelsOfMark);
        note_largest(piece.tile, amax, largest);
      }
    }
    share_largest(largest);
  }

  // What is rounded of a value v, of which Map makes x: x within its bound, or minus zero where v is not finite. Every
  // other x that rounds to minus zero becomes zero.
  __device__ __forceinline__ static float bounded_or_mark(float v, float x, float inv_factor) {
    // Half of the smallest magnitude; e2m1() itself makes minus zero of minus zero alone.
    constexpr float kVanishes = Config::kPv == Pv::kNvfp4 ? 0.0f : Config::kPv == Pv::kE4m3 ? 0x1p-10f : 0x1p-25f;
    if (!(fabsf(v) < ptx::infinity())) return -0.0f;
    return fabsf(x) <= kVanishes ? 0.0f : fminf(fmaxf(x, -kLargestScaled * inv_factor), kLargestScaled * inv_factor);
  }

  // Stores V's part of a tile's line. index: of kv_hat; own_tile: of the block's tiles.
  __device__ __forceinline__ void store_line(i32 index, i32 own_tile, float factor, bool usual) const {
    auto& line = *reinterpret_cast<KvLine*>(kv_tile_address<Config>(params.kv_hat, index) + Layout::kLine);
    bool spoilt = false;
    if (!usual) spoilt = Block::store_spoilt(shared, own_tile, ptx::thread_index(), line.v_spoilt);
    if (ptx::thread_index() < kKeyGroups) line.group[ptx::thread_index()].v_factor = spoilt ? -factor : factor;
  }

  // Bound of V / v_scale, so that attention's sums of a few such values stay within f32: of 2^6 with an f16 P, at most
  // 2^15 each, and of 2^10 with an e4m3 P, below 2^9 each. Sums of the latter grow by up to 2^kMostFall when references
  // fall (attn/row_references.cuh).
  static constexpr float kLargestScaled = Config::kPv == Pv::kF16 ? 0x1p106f : 0x1p68f;
};

}  // namespace sage
