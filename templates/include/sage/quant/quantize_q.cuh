// Q as s8 with a scale per thread of the attention kernel, rows m of a warp with equal m % 8, or as s4 or NVFP4 with a
// scale per row. The scale holds softmax_scale · log2 e, so that scores come out in log2 units; Q̂ has its sign. For
// NVFP4, whose scales are powers of two, the rows themselves are multiplied by it. Smoothed: less the mean of its
// tile's rows. Balanced: times what K's channels are divided by. Rotated: times the Hadamard matrix.
// Source: SageAttention2, sections 3.1 and 3.2.
#pragma once

#include "sage/numerics/rotation.cuh"
#include "sage/numerics/scale.cuh"
#include "sage/ptx/warp.cuh"
#include "sage/quant/clip.cuh"
#include "sage/quant/rows.cuh"

namespace sage {

// Query tiles of a height: two attention kernels that share a quantizer may have tiles of two heights.
template <class Config, i32 kOwnBlockM>
struct TilesOfHeight : Config {
  static constexpr i32 kBlockM = kOwnBlockM;
};

template <class Config, i32 kBlockM>
struct QuantizeQ {
  using Block = QuantBlock<Config>;
  using Layout = TileLayout<TilesOfHeight<Config, kBlockM>>;
  static constexpr i32 kVectors = Block::kVectors;
  static constexpr i32 kGroupsOfWarp = kRowGroups<Config>;
  static constexpr i32 kRows = Config::kWarpM / kGroupsOfWarp;  // rows that share a scale
  static constexpr i32 kGroups = kBlockM / kRows, kGroupsAtOnce = Config::kThreads / kVectors;
  static constexpr i32 kSteps = kGroups / kGroupsAtOnce;
  static constexpr i32 kStepRows = kGroupsAtOnce * kRows;               // from step to step
  static constexpr i32 kStepBytes = kStepRows * Layout::QRows::kPitch;  // whole periods of the swizzle
  static constexpr i32 kStepsAtOnce = kSteps * kRows <= Block::kInFlight ? kSteps : Block::kInFlight / kRows;
  static constexpr bool kPrescaled = Config::kQk == Qk::kNvfp4;  // rows, by softmax_scale · log2 e
  static_assert(kSteps % kStepsAtOnce == 0);
  static_assert(kGroups % kGroupsAtOnce == 0 && (kGroupsAtOnce % kGroupsOfWarp == 0 || kRows == 1),
                "every thread takes equally many groups, and the rows of a step are neighbours");

  const QuantParams& params;
  typename Block::Shared& shared;

  template <SourceRows kSource>
  __device__ __forceinline__ void run(i32 batch, i32 q_head, i32 tile) const {
    const auto seqlen = seqlen_of(params, batch);
    const i32 rows = seqlen.q();
    if (tile * kBlockM >= rows) return;  // an empty slot
    const Source<kSource> source(params.q, batch, q_head, seqlen.q_begin(), rows, params.headdim, params.dtype);
    const i32 kv_head = kv_head_of(params, batch, q_head);
    const i64 channels = channel_index<Config>(kv_head),
              tile_index = first_q_tile_of(params, batch, q_head, kBlockM) + tile;
    const float unit = params.q_unit[kv_head];
    const bool biased = params.wants_row_bias;
    if (biased) load_k_mean(channels);
    if (params.smooth_q) prepare_mean(source, batch, tile, params.q_mean + tile_index * Config::kHeadDim);
    if (kAlwaysChanged<Config, kSource> || params.smooth_q || params.rotate || unit != 1.0f) {
      load_factors(channels, unit);
      quantize<true>(source, tile, tile_index, biased, unit);
    } else {
      quantize<false>(source, tile, tile_index, biased, 1.0f);
    }
  }

 private:
  __device__ __forceinline__ static i32 first_channel() { return ptx::thread_index() % kVectors * kVector; }

  // The mean of K, into shared memory, behind a barrier. channels: index of the head's first channel.
  __device__ __forceinline__ void load_k_mean(i64 channels) const {
    for (i32 c = ptx::thread_index(); c < Config::kHeadDim; c += Config::kThreads) {
      shared.k_mean[c] = params.k_mean[channels + c];
    }
    __syncthreads();
  }

  // Q's factor of each channel, and in the place of its mean minus that times the factor, into shared memory, behind a
  // barrier.
  __device__ __forceinline__ void load_factors(i64 channels, float unit) const {
    for (i32 c = ptx::thread_index(); c < Config::kHeadDim; c += Config::kThreads) {
      const float factor = reciprocal_of_power_of_two(unit * params.k_factor[channels + c]);
      shared.shift[c] = params.smooth_q ? -shared.shift[c] * factor : -0.0f;
      shared.factor[c] = factor;
    }
    __syncthreads();
  }

  // kVectors lanes quantize the rows of one scale group. kChanged: channels are x * factor + shift, and rows are
  // rotated if the call asks for rotation. Such groups are read one after another: unrolled code for them would take as
  // long to compile as everything else.
  template <bool kChanged, SourceRows kSource>
  __device__ __forceinline__ void quantize(const Source<kSource>& source, i32 tile, i64 tile_index, bool biased,
                                           float unit) const {
    const i32 group = ptx::thread_index() / kVectors;  // of the first step
    const i32 first_row = group / kGroupsOfWarp * Config::kWarpM + group % kGroupsOfWarp;
    const auto row_of = [&](i32 step, i32 r) { return first_row + step * kStepRows + r * kGroupsOfWarp; };
    const auto load = [&](i32 i) {
      return source.load(tile * kBlockM + row_of(i / kRows, i % kRows), first_channel());
    };
    u8* first = params.q_hat + tile_index * Layout::kQBytes +
                QuantizedRows<Config>::template offset<typename Layout::QRows>(first_row, first_channel());
    u8* const group_scale =
        QuantizedRows<Config>::group_scale(params.q_hat + tile_index * Layout::kQBytes + Layout::kQScales, first_row);
    float* q_scale = params.q_scale + tile_index * kGroups + group;
    bool finite = true;
#pragma unroll 1
    for (i32 done = 0; done < kSteps; done += kStepsAtOnce) {
      const auto load_step = [&](i32 i) { return load(done * kRows + i); };
      finite &= quantize_steps<kChanged>(source, load_step, first + done * kStepBytes,
                                         group_scale + done * kStepRows * Layout::kQkRowScales,
                                         q_scale + done * kGroupsAtOnce, unit);
    }
    float* row_bias = params.row_bias + tile_index * kBlockM;
    if (biased || !finite) {  // reloads the rows: keeping their products live costs registers
#pragma unroll 2
      for (i32 i = 0; i < kSteps * kRows; ++i) {
        store_bias(source, load(i), biased, row_bias + row_of(i / kRows, i % kRows));
      }
    } else {
      const i32 own = ptx::thread_index() % kVectors;
      static_assert(kSteps * kRows <= kVectors, "a lane for each row of the group's");
      if (own < kSteps * kRows) row_bias[row_of(own / kRows, own % kRows)] = 0.0f;
    }
  }

  // Quantizes as many steps as there are registers for their rows. `first`: where this thread's first vector goes;
  // `group_scale`: where the scale of its NVFP4 group goes; `q_scale`: where its scale group's scale goes. Returns
  // whether the rows of the warp are finite.
  template <bool kChanged, SourceRows kSource, class Load>
  __device__ __forceinline__ bool quantize_steps(const Source<kSource>& source, Load load, u8* first, u8* group_scale,
                                                 float* q_scale, float unit) const {
    using Held = HeldRows<kSource, !kChanged, kStepsAtOnce * kRows>;
    Held rows;
    rows.load(load);
    const float sign = !kPrescaled && params.softmax_scale_log2 < 0.0f ? -1.0f : 1.0f;
    bool finite = true;
#pragma unroll Held::kUnroll
    for (i32 s = 0; s < kStepsAtOnce; ++s) {
      float x[kRows][kVector];
#pragma unroll
      for (i32 r = 0; r < kRows; ++r) {
        source.convert(rows.get(s * kRows + r, load), x[r]);
        if constexpr (kChanged) {
#pragma unroll
          for (i32 i = 0; i < kVector; ++i) {
            x[r][i] = fmaf(x[r][i], shared.factor[first_channel() + i], shared.shift[first_channel() + i]);
          }
        }
        if constexpr (kPrescaled) {
#pragma unroll
          for (i32 i = 0; i < kVector; ++i) x[r][i] *= params.softmax_scale_log2;
        }
      }
      float amax = abs_max(x);
      const bool step_finite = !ptx::any(!(amax < ptx::infinity()));
      if (!step_finite) amax = make_finite(x);
      finite &= step_finite;
      if (kChanged && params.rotate) {
#pragma unroll
        for (i32 r = 0; r < kRows; ++r) rotate<kVectors>(x[r]);
        amax = abs_max(x);
      }
      Scale scale = QuantizedRows<Config>::scale(ptx::max_over_lanes<kVectors>(amax));
      scale.inv_scale *= sign;
      if constexpr (kClips<Config> > 1) {
        if (params.clip) {
          ClipSearch<Config> search(scale);
#pragma unroll
          for (i32 r = 0; r < kRows; ++r) search.add(x[r]);
          search.template sum_over_lanes<kVectors>();
          scale = search.best();
        }
      }
#pragma unroll
      for (i32 r = 0; r < kRows; ++r) {
        const i32 row = s * kStepRows + r * kGroupsOfWarp;
        QuantizedRows<Config>::store(first + s * kStepBytes + r * kGroupsOfWarp * Layout::QRows::kPitch,
                                     group_scale + row * Layout::kQkRowScales, x[r], scale.inv_scale);
      }
      if (first_channel() == 0) {
        const float length = kChanged && params.rotate ? Config::kHeadDim : 1.0f;
        const float of_scores = kPrescaled ? 1.0f : fabsf(params.softmax_scale_log2) * unit;
        q_scale[s * kGroupsAtOnce] = fminf(scale.scale * of_scores * length, kLargestF32);
      }
    }
    return finite;
  }

  // row_bias = q · mean of k, in log2 units: the term of a row's scores that smoothing K takes off, for the
  // log-sum-exp. Without a log-sum-exp row_bias is zero times the row: zero or, where the row is not finite, NaN. A
  // finite row's is finite: each lane's part is clamped to kLargestTerm. Call with all lanes of a row.
  template <class Source>
  __device__ __forceinline__ void store_bias(const Source& source, const typename Source::Raw& raw, bool biased,
                                             float* to) const {
    float x[1][kVector], bias = 0.0f;
    source.convert(raw, x[0]);
#pragma unroll
    for (i32 i = 0; i < kVector; ++i) {
      const float mean = biased ? shared.k_mean[first_channel() + i] : 0.0f;
      bias = fmaf(x[0][i] * params.softmax_scale_log2, mean, bias);
    }
    bias = abs_max(x) < ptx::infinity() ? clamped_term(bias) : ptx::quiet_nan();
    bias = ptx::sum_over_lanes<kVectors>(bias);
    if (first_channel() == 0) *to = bias;
  }

  // q_mean = softmax_scale · log2 e · mean of the tile's rows. The sum takes a thread's rows in ascending order, then
  // the threads. shared.shift has the mean without the factors, behind a barrier.
  template <class Source>
  __device__ __forceinline__ void prepare_mean(const Source& source, i32 batch, i32 tile, float* q_mean) const {
    constexpr i32 kRowsAtOnce = Config::kThreads / kVectors;
    const i32 own_row = ptx::thread_index() / kVectors;
    const i32 rows = min(kBlockM, seqlen_of(params, batch).q() - tile * kBlockM);
    float sum[kVector] = {};
#pragma unroll 4
    for (i32 row = own_row; row < kBlockM; row += kRowsAtOnce) {
      float x[kVector];
      source.convert(source.load(tile * kBlockM + row, first_channel()), x);
#pragma unroll
      for (i32 i = 0; i < kVector; ++i) sum[i] += row < rows ? finite_or_zero(x[i]) : 0.0f;
    }
#pragma unroll
    for (i32 i = 0; i < kVector; ++i) shared.sums[own_row][first_channel() + i] = sum[i];
    __syncthreads();
    for (i32 c = ptx::thread_index(); c < Config::kHeadDim; c += Config::kThreads) {
      float total = shared.sums[0][c];
      for (i32 r = 1; r < kRowsAtOnce; ++r) total += shared.sums[r][c];
      const float mean = subtractable(divide(total, static_cast<float>(rows)));
      shared.shift[c] = mean;
      q_mean[c] = mean * params.softmax_scale_log2;
    }
    __syncthreads();
  }
};

}  // namespace sage
