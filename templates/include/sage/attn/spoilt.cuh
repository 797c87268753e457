// Overwrites with NaN what keys and values that are not finite spoil: rows that see such a key, and channel c of rows
// that see such a value v[j, c]. Runs behind the store of a warp's rows, off the fast path: only where a KV tile that
// the warp went over is spoilt.
#pragma once

#include "sage/problem/sparse_mask.cuh"
#include "sage/ptx/math.cuh"
#include "sage/tile/layout.cuh"

namespace sage {

template <class Config>
struct SpoilRows {
  using Layout = TileLayout<Config>;
  using Keys = VisibleKeys<Config::kMask>;
  static constexpr i32 kKeyWords = Config::kBlockN / 32;
  static_assert(Config::kWarpM <= kWarpSize);

  const AttnParams& params;
  const WorkTile& work;
  i32 first_row, rows, lane;  // rows of the warp, as many as there are

  __device__ __forceinline__ SpoilRows(const AttnParams& params_, const WorkTile& work_, i32 warp, i32 lane_)
      : params(params_), work(work_), first_row(work_.first_row + warp * Config::kWarpM), lane(lane_) {
    rows = min(Config::kWarpM, work.lengths.q - first_row);
  }

  // Call with all lanes of the warp, whether a tile is spoilt or not: behind a barrier in a branch the compiler would
  // take no warp for converged, and spill registers in the main loop.
  __device__ __forceinline__ void run(bool spoilt) const {
    __syncwarp();  // the stores of the rows come before those of NaN
    if (!spoilt) return;
    u32 done = 0;
#pragma unroll 1
    for (i32 place = work.kv.begin; place < work.kv.end; ++place) {
      const Place at(params, work, place);
      const u8* data = work.template kv_tile<Config>(params, at.tile());
      const auto& line = *reinterpret_cast<const KvLine*>(data + Layout::kLine);
      if (line.group[0].k_scale < 0.0f) spoil_rows(line, at);
      if (line.group[0].v_factor < 0.0f) spoil_channels(line, data + Layout::kV, at, done);
    }
  }

 private:
  // The KV tile at a place.
  struct Place {
    TileEntry entry;
    bool whole;  // every row sees it whole

    __device__ __forceinline__ Place(const AttnParams& params, const WorkTile& work, i32 place)
        : entry{static_cast<u32>(place)}, whole(place < work.kv.template whole<Config::kMask>()) {
      if constexpr (Config::kMask == Mask::kSparse) entry = entry_at<Config>(params, work, place);
    }
    __device__ __forceinline__ i32 tile() const {
      return Config::kMask == Mask::kSparse ? entry.tile() : static_cast<i32>(entry.word);
    }
  };

  // A bit for each key of a KV tile, from key 32w on: whether the row of the warp sees it.
  __device__ __forceinline__ u32 keys_of(i32 row, const Place& at, i32 w) const {
    const Keys keys = visible_keys<Config::kMask>(work.seqlen(params), first_row + row).from(work.first_key);
    if constexpr (Config::kMask == Mask::kSparse) {
      return at.whole ? ~0u : visible_word<Config>(params, work, first_row + row, keys, at.entry, w);
    } else {
      return keys.from(at.tile() * Config::kBlockN + 32 * w).word();
    }
  }

  __device__ __forceinline__ void store_nan(i32 row, i32 channel) const {
    constexpr u16 kNan = 0x7fff;  // in f16 and in bf16
    if (params.dtype == Dtype::kF32) work.template output_row<float>(params, row)[channel] = ptx::quiet_nan();
    else work.template output_row<u16>(params, row)[channel] = kNan;
  }

  // A lane looks at one row.
  __device__ __forceinline__ void spoil_rows(const KvLine& line, const Place& at) const {
    if (lane >= rows) return;
    u32 seen = 0;
#pragma unroll 1
    for (i32 w = 0; w < kKeyWords; ++w) seen |= line.k_spoilt[w] & keys_of(lane, at, w);
    if (seen == 0) return;
#pragma unroll 1
    for (i32 c = 0; c < params.headdim; ++c) store_nan(first_row + lane, c);
    if (params.lse != nullptr) {
      *work.lse_row(params, first_row + lane) = ptx::quiet_nan();
    }
  }

  // A lane looks at every 32nd channel. done: a bit for each of these that is spoilt in all rows.
  __device__ __forceinline__ void spoil_channels(const KvLine& line, const u8* v_hat, const Place& at,
                                                 u32& done) const {
#pragma unroll 1
    for (i32 i = 0; i < Config::kHeadDim / kWarpSize; ++i) {
      const i32 channel = i * kWarpSize + lane;
      if (!(line.v_spoilt[0] >> channel / KvLine::kChannelsOfMark & 1) || (done >> i & 1) || channel >= params.headdim)
        continue;
      i32 spoilt_rows = 0;
#pragma unroll 1
      for (i32 w = 0; w < kKeyWords; ++w) {
        const u32 spoilt = spoilt_keys(v_hat, channel, w);
        if (spoilt == 0) continue;
        i32 seen = 0;
#pragma unroll 1
        for (i32 row = 0; row < rows; ++row) {
          if (!(spoilt & keys_of(row, at, w))) continue;
          store_nan(first_row + row, channel);
          ++seen;
        }
        spoilt_rows = max(spoilt_rows, seen);
      }
      if (spoilt_rows == rows) done |= 1u << i;
    }
  }

  // A bit for each of the tile's keys 32w to 32w + 31: whether its value in this channel is not finite.
  __device__ __forceinline__ static u32 spoilt_keys(const u8* v_hat, i32 channel, i32 w) {
    u32 spoilt = 0;
#pragma unroll 8
    for (i32 i = 0; i < 32; ++i) {  // a column where V̂ is transposed, else a key
      const u8* at = v_hat + Layout::v_offset(Layout::kTransposedV ? channel : 32 * w + i,
                                              Layout::kTransposedV ? 32 * w + i : channel);
      u32 value = Layout::kTransposedV ? *at : *reinterpret_cast<const u16*>(at);
      if constexpr (Layout::kVBits == 4) value = value >> 4 * (i % 2) & 15;
      if (value == kSpoiltValue<Config::kPv>)
        spoilt |= 1u << (Layout::kTransposedV ? key_of_column<Config::kPv>(i) : i);
    }
    return spoilt;
  }
};

}  // namespace sage
