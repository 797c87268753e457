// K as s8, s4 or NVFP4 with a scale per thread of the attention kernel: keys n of a tile with equal n % 8 / 2.
// Smoothed: less the mean per channel of a sample, and balanced with Q. Rotated: times the Hadamard matrix.
// Source: SageAttention2, sections 3.1 and 3.2.
#pragma once

#include "sage/numerics/rotation.cuh"
#include "sage/ptx/warp.cuh"
#include "sage/quant/clip.cuh"
#include "sage/quant/rows.cuh"

namespace sage {

template <class Config>
struct QuantizeK {
  using Block = QuantBlock<Config>;
  using Layout = typename Block::Layout;
  static constexpr i32 kVectors = Block::kVectors;
  static constexpr i32 kWarpsPerGroup = Block::kWarpsPerGroup, kWarpsPerTile = kKeyGroups * kWarpsPerGroup;
  static constexpr i32 kKeys = Config::kBlockN / kKeyGroups;  // keys that share a scale
  static constexpr i32 kKeysAtOnce = kWarpSize / kVectors;    // rows that a warp reads side by side
  static constexpr i32 kSteps = kKeys / kKeysAtOnce / kWarpsPerGroup;
  static_assert(kKeysAtOnce > 1 || kSteps % 2 == 0, "the first key of a warp is an even one of its group");
  static_assert(kClips<Config> == 1 || kWarpsPerGroup == 1, "a warp knows the errors of its group");

  const QuantParams& params;
  typename Block::Shared& shared;

  // kTiles tiles of one head from first_tile on.
  template <SourceRows kSource>
  __device__ __forceinline__ void run(i32 batch, i32 head, i32 first_tile) const {
    const Source<kSource> source = Block::template kv_source<kSource>(params, params.k, batch, head);
    if (!Block::has_keys(source.rows, first_tile)) return;
    if (kAlwaysChanged<Config, kSource> || params.rotate) quantize_tiles<true>(source, batch, head, first_tile);
    else quantize_tiles<false>(source, batch, head, first_tile);
  }

 private:
  __device__ __forceinline__ static i32 first_channel() { return ptx::thread_index() % kVectors * kVector; }

  // kRotatable: rows are rotated if the call asks for rotation. Rotated rows are read again: code that rotates all rows
  // at once would take as long to compile as everything else.
  template <bool kRotatable, SourceRows kSource>
  using Held = HeldRows<kSource, !kRotatable, kSteps>;

  template <bool kRotatable, SourceRows kSource>
  __device__ __forceinline__ void quantize_tiles(const Source<kSource>& source, i32 batch, i32 head,
                                                 i32 first_tile) const {
    Held<kRotatable, kSource> rows;
    const Keys keys;
    rows.load([&](i32 s) { return load_row(source, first_tile, keys, s); });
    load_factors(channel_index<Config>(batch * params.num_kv_heads + head));
    quantize<kRotatable>(source, first_kv_tile_of(params, batch, head, Config::kBlockN), first_tile, rows);
  }

  // K's factor of each channel, and minus its mean times that, into shared memory, behind a barrier. `first`: index of
  // the head's first channel.
  __device__ __forceinline__ void load_factors(i64 first) const {
    for (i32 c = ptx::thread_index(); c < Config::kHeadDim; c += Config::kThreads) {
      const float factor = params.k_factor[first + c];
      shared.factor[c] = factor;
      shared.shift[c] = -params.k_mean[first + c] * factor;
    }
    __syncthreads();
  }

  // The offset of a scale group's key n from its key 0.
  __device__ __forceinline__ static constexpr i32 kth_key(i32 n) { return n / 2 * 8 + n % 2; }

  // The keys that this thread quantizes: kWarpsPerGroup warps take those of one scale group.
  struct Keys {
    i32 tile;   // of the block's tiles
    i32 first;  // of the tile's keys, that of step 0

    __device__ __forceinline__ Keys() {
      const i32 warp = ptx::thread_index() / kWarpSize, lane = ptx::thread_index() % kWarpSize;
      const i32 group = warp / kWarpsPerGroup % kKeyGroups;
      const i32 n = warp % kWarpsPerGroup * (kSteps * kKeysAtOnce) + lane / kVectors;  // of the group's keys
      tile = warp / kWarpsPerTile;
      first = kth_key(n) + group * 2;
    }
    __device__ __forceinline__ i32 of_step(i32 step) const { return first + kth_key(step * kKeysAtOnce); }
  };

  template <class Source>
  __device__ __forceinline__ static auto load_row(const Source& source, i32 first_tile, const Keys& keys, i32 step) {
    return source.load((first_tile + keys.tile) * Config::kBlockN + keys.of_step(step), first_channel());
  }

  // The block's tiles from first_tile on, whose rows are loaded.
  template <bool kRotatable, SourceRows kSource>
  __device__ __forceinline__ void quantize(const Source<kSource>& source, i32 first_kv_tile, i32 first_tile,
                                           Held<kRotatable, kSource>& rows) const {
    const i32 warp = ptx::thread_index() / kWarpSize, lane = ptx::thread_index() % kWarpSize;
    const Keys keys;
    const i32 tile = first_tile + keys.tile;
    const auto load = [&](i32 s) { return load_row(source, first_tile, keys, s); };
    constexpr i32 kUnroll = kRotatable && kSource != SourceRows::kAny ? 2 : Held<kRotatable, kSource>::kUnroll;
    Block::clear_spoilt(shared);
    const float *factor = shared.factor + first_channel(), *shift = shared.shift + first_channel();
    const auto smooth = [&](float x, i32 i) { return fmaf(x, factor[i], shift[i]); };
    const auto convert = [&](const auto& row, float (&x)[1][kVector]) {
      source.convert(row, x[0]);
#pragma unroll
      for (i32 i = 0; i < kVector; ++i) x[0][i] = smooth(x[0][i], i);
    };
    float amax = largest<kRotatable, kUnroll>(source, rows, load, convert, smooth);
    __syncthreads();  // shared.spoilt is clear
    const bool finite = !ptx::any(!(amax < ptx::infinity()));
    if (!finite) {  // rare: reloads the rows, which keeps its temporaries out of the common path's registers
      amax = mark_spoilt<kRotatable>(keys, [&](i32 s, float (&x)[1][kVector]) { convert(load(s), x); });
      rows.load(load);
    }
    amax = largest_of_group(warp, lane, keys.tile, amax);
    const auto prepare = [&](i32 s, float (&x)[1][kVector]) {
      convert(rows.get(s, load), x);
      if (!finite) make_finite(x);
      if (kRotatable && params.rotate) rotate<kVectors>(x[0]);
    };
    Scale scale = QuantizedRows<Config>::scale(amax);
    if constexpr (kClips<Config> > 1) {
      if (params.clip) scale = clipped(scale, keys, tile * Config::kBlockN, source.rows, prepare);
    }
    if (!Block::has_keys(source.rows, tile)) return;
    u8* tile_data = kv_tile_address<Config>(params.kv_hat, first_kv_tile + tile);
    const i32 squares = store_rows<kUnroll>(tile_data, keys, scale, prepare);
    store_line(tile_data, scale);
    if constexpr (Config::kKeyNorms) store_norm(tile_data, scale, squares);
  }

  // The largest magnitude of this thread's rows as they are quantized; NaN or infinity where one is not finite.
  // convert(row, x): a row times factor + shift; smooth(x, i): one of its channels.
  template <bool kRotatable, i32 kUnroll, SourceRows kSource, class Load, class Convert, class Smooth>
  __device__ __forceinline__ float largest(const Source<kSource>& source, const Held<kRotatable, kSource>& rows,
                                           Load load, Convert convert, Smooth smooth) const {
    if constexpr (kRotatable) {
      float amax = 0.0f;
#pragma unroll kUnroll
      for (i32 s = 0; s < kSteps; ++s) {
        float x[1][kVector];
        convert(rows.get(s, load), x);
        if (params.rotate) rotate<kVectors>(x[0]);
        amax = ptx::max_nan(amax, abs_max(x));
      }
      return amax;
    } else {
      Extremes extremes(source, rows.get(0, load));
#pragma unroll
      for (i32 s = 1; s < kSteps; ++s) extremes.add(rows.get(s, load));
      return extremes.abs_max(smooth);
    }
  }

  // Runs where a key is not finite: marks such keys, and returns the largest magnitude of the finite values.
  // load(s, x): row s times factor + shift.
  template <bool kRotatable, class Load>
  __device__ __forceinline__ float mark_spoilt(const Keys& keys, Load load) const {
    float amax = 0.0f;
#pragma unroll 1
    for (i32 s = 0; s < kSteps; ++s) {
      float x[1][kVector];
      load(s, x);
      if (!(abs_max(x) < ptx::infinity())) Block::mark_spoilt(shared, keys.tile, keys.of_step(s));
      make_finite(x);
      if (kRotatable && params.rotate) rotate<kVectors>(x[0]);
      amax = fmaxf(amax, abs_max(x));
    }
    return amax;
  }

  // The largest magnitude of a scale group, from that of each thread. Call with all threads.
  __device__ __forceinline__ float largest_of_group(i32 warp, i32 lane, i32 tile, float amax) const {
    amax = ptx::max_over_lanes<kWarpSize>(amax);
    if (lane == 0) shared.amax[tile][warp] = amax;
    __syncthreads();
    const float* of_group = shared.amax[tile] + warp / kWarpsPerGroup * kWarpsPerGroup;
#pragma unroll
    for (i32 w = 0; w < kWarpsPerGroup; ++w) amax = fmaxf(amax, of_group[w]);
    return amax;
  }

  // The scale of a group with the clip that has the least error. prepare(s, x): row s as it is quantized. first_key: of
  // the tile; rows: of the head, behind which no row counts.
  template <class Prepare>
  __device__ __forceinline__ static Scale clipped(const Scale& whole, const Keys& keys, i32 first_key, i32 rows,
                                                  Prepare prepare) {
    ClipSearch<Config> search(whole);
#pragma unroll 1
    for (i32 s = 0; s < kSteps; ++s) {
      float x[1][kVector];
      prepare(s, x);
      if (first_key + keys.of_step(s) < rows) search.add(x[0]);
    }
    search.template sum_over_lanes<kWarpSize>();
    return search.best();
  }

  // Stores this thread's rows in a tile. prepare(s, x): row s as it is quantized. Returns the largest sum of squares of
  // the thread's channels of a row.
  template <i32 kUnroll, class Prepare>
  __device__ __forceinline__ static i32 store_rows(u8* tile_data, const Keys& keys, const Scale& scale,
                                                   Prepare prepare) {
    const auto offset = [&](i32 key) {
      return QuantizedRows<Config>::template offset<typename Layout::KRows>(key, first_channel());
    };
    // Where a warp reads one row at a time, rows of odd steps have another swizzle XOR than those of even steps.
    u8* const even = tile_data + offset(keys.first);
    u8* const odd = tile_data + offset(keys.first + 1);
    u8* const group_scale = QuantizedRows<Config>::group_scale(tile_data + Layout::kKScales, keys.first);
    i32 largest = 0;
#pragma unroll kUnroll
    for (i32 s = 0; s < kSteps; ++s) {
      float x[1][kVector];
      prepare(s, x);
      const i32 n = s * kKeysAtOnce, period = n / 2 * 8 * Layout::KRows::kPitch;  // of the swizzle: whole ones
      u8* const to = (n % 2 ? odd : even) + period;
      largest = max(largest, QuantizedRows<Config>::store(to, group_scale + kth_key(n) * Layout::kQkRowScales, x[0],
                                                          scale.inv_scale));
    }
    return largest;
  }

  // Stores a bound on the norms of the warp's keys: the sum over the channels of the largest squares of each thread,
  // whatever their rows.
  __device__ __forceinline__ void store_norm(u8* tile_data, const Scale& scale, i32 squares) const {
    const u32 of_row = ptx::sum_over_lanes<kVectors>(static_cast<u32>(squares));
    const float largest = ptx::max_over_lanes<kWarpSize>(static_cast<float>(of_row));
    auto& line = *reinterpret_cast<KvLine*>(tile_data + Layout::kLine);
    const i32 warp = ptx::thread_index() / kWarpSize;
    if (ptx::thread_index() % kWarpSize == 0) {
      const float norm = scale.scale * ptx::sqrt(largest);
      KvLine::Norms& norms = line.norms[warp / kWarpsPerGroup % kKeyGroups];
      if constexpr (kWarpsPerGroup == 1) norms.of_warp[0] = norms.of_warp[1] = norm;
      else norms.of_warp[warp % kWarpsPerGroup] = norm;
    }
  }

  // Stores K's part of a tile's line. Reads the thread's index again: keeping the warp live across the loops costs
  // registers.
  __device__ __forceinline__ void store_line(u8* tile_data, const Scale& scale) const {
    auto& line = *reinterpret_cast<KvLine*>(tile_data + Layout::kLine);
    const i32 warp = ptx::thread_index() / kWarpSize;
    const bool spoilt = Block::store_spoilt(shared, warp / kWarpsPerTile,
                                            ptx::thread_index() % (kWarpsPerTile * kWarpSize), line.k_spoilt);
    if (ptx::thread_index() % (kWarpsPerGroup * kWarpSize) == 0) {
      line.group[warp / kWarpsPerGroup % kKeyGroups].k_scale = spoilt ? -scale.scale : scale.scale;
    }
  }
};

}  // namespace sage
