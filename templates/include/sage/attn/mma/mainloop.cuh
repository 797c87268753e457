// Attention of one query tile with mma.sync and cp.async.
//
// A warp owns kWarpM query rows, and goes over all KV tiles that its block sees. With a mask and f16 P·V it skips
// those that its own rows do not see. Loads run kStages - 1 tiles ahead of the products. One barrier a tile publishes
// the stage that arrived and frees the stage that was used last; where stages have no V, a second one publishes that.
// Source: SageAttention2, Algorithm 1.
#pragma once

#include "sage/attn/apply_mask.cuh"
#include "sage/attn/epilogue.cuh"
#include "sage/attn/kv_scales.cuh"
#include "sage/attn/mma/kv_stream.cuh"
#include "sage/attn/mma/nvfp4.cuh"
#include "sage/attn/spoilt.cuh"
#include "sage/problem/work_tile.cuh"
#include "sage/ptx/shared.cuh"
#include "sage/ptx/special.cuh"

namespace sage {

// Config: kHeadDim, kQk, kPv, kPvAccum, kP, kMask, kSmoothQ, kSmoothV, kBlockM, kBlockN, kWarpM, kStages, kVStages.
template <class Config>
class AttentionMma {
 public:
  static constexpr i32 kThreads = Config::kBlockM / Config::kWarpM * kWarpSize;

  // Figures for the host: to launch the kernel and to emulate it.
  static constexpr auto facts() {
    return sage::facts(
        Fact{"threads", kThreads}, Fact{"shared_bytes", kOwnRows + kThreads * sizeof(VisibleKeys<Config::kMask>)},
        Fact{"p_top", Product::kTop}, Fact{"lazy_rise", Product::kLazyRise},
        Fact{"whole_reference", Product::kWholeReference}, Fact{"may_fall", Product::kMayFall},
        Fact{"lazy_fall", Product::kLazyFall}, Fact{"most_fall", kMostFall}, Fact{"largest_sum", kLargestSum},
        Fact{"no_reference", kNoReference}, Fact{"smallest_scale", kSmallestScale<Config::kQk>},
        Fact{"largest_scale", kLargestScoreScale<Config::kQk>}, Fact{"largest_folded", Product::kLargestFolded},
        Fact{"score_bias", Softmax::kFolds ? kScoreBias : 0}, Fact{"line_room", kLineRoom},
        Fact{"line_zero", kByteOfOne}, Fact{"line_most", Softmax::template kMost<P::kLinear>},
        Fact{"line_far", Softmax::template kFar<P::kLinear>},
        Fact{"line_farthest", Softmax::template kFarthest<P::kLinear>}, Fact{"sums_rounded", Product::kSumsRounded},
        Fact{"sums_in_threads", Product::kSumsInThreads}, Fact{"sum_unit", Product::kSumUnit},
        Fact{"v_typical", Product::kVTypical}, Fact{"v_least", Product::kVLeast}, Fact{"v_limit", Product::kVLimit});
  }

  // Shared memory: sQ [kBlockM] rows, the stages of the KV stream, then a VisibleKeys a thread.
  __device__ __forceinline__ static void run(const AttnParams& params, u8* shared) {
    const i32 warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
    const WorkTile work = work_tile<Config>(params, ptx::block_index());
    if (!work.has_queries()) return;
    const i32 row = work.first_row + warp * Config::kWarpM + lane % Config::kWarpM;
    own_row(shared) = visible_keys<Config::kMask>(work.seqlen(params), row).from(work.first_key);
    const i64 q_tile = q_tile_index(work.q_head, params.q_tiles, work.q_tile);
    const u32 sQ = ptx::shared_address(shared);
    copy_async<Layout::kQBytes, kThreads>(sQ, params.q_hat + q_tile * Layout::kQBytes + threadIdx.x * 16);
    Stream stream(params, work, sQ + Layout::kQBytes);
#pragma unroll
    for (i32 i = 0; i < Config::kStages - 1; ++i) stream.load(params, work, i, i < work.kv.end);

    const i64 warp_index = q_tile * (Config::kBlockM / Config::kWarpM) + warp;
    WarpState state(shared, warp, lane, params.q_scale + warp_index * kRowGroups<Config> + lane / 4);
    // A log-sum-exp is of exponentials. The weight of a split is the sum of P, whatever that is.
    if (Config::kP == P::kExp2 || params.returns_lse) state.template attend<P::kExp2>(params, work, stream);
    else state.template attend<Config::kP>(params, work, stream);
    state.softmax.finish();
    if (Config::kP == P::kLinear && !params.returns_lse) state.softmax.drop_lse_sums();
    const WorkTile done = work_tile<Config>(params, ptx::block_index());
    const ConstantsInMemory<Config> constants(params, done);
    const bool spoilt = stream.met_spoilt();
    store_output<Config>(params, done, warp, lane, state.acc_o, state.unit, state.softmax, state.softmax.lse_sum,
                         constants, StoreFragments<Config>{});
    // Where Q is smoothed, warp and lane would be spilt if they were kept till here; elsewhere reading them again
    // spills.
    const i32 thread = Config::kSmoothQ ? ptx::thread_index() : threadIdx.x;
    SpoilRows<Config>(params, done, thread / kWarpSize, thread % kWarpSize).run(spoilt);
  }

 private:
  using Layout = TileLayout<Config>;
  using Scores = SelectScores<Config>;
  using Product = SelectPv<Config>;
  using Softmax = OnlineSoftmax<Config, Product>;
  using Stream = KvStream<Config, kThreads>;
  static constexpr i32 kRows = Config::kWarpM / 8;  // of a thread
  static constexpr i32 kOwnRows = Layout::kQBytes + Stream::kBytes;

  // Whether warps skip KV tiles. With FP8 P·V and exponentials it was slower (docs/decisions.md).
  template <P kOwnP>
  static constexpr bool kSkips = Config::kMask != Mask::kFull && (Config::kPv == Pv::kF16 || kOwnP == P::kLinear);

  // Whether O follows its references where a product is added to it: of a linear P, where registers allow it.
  template <P kOwnP>
  __device__ static constexpr bool takes_alpha() {
    if constexpr (kOwnP == P::kLinear) return Product::kTakesAlpha;
    else return false;
  }

  // The keys that a row of the warp sees, for apply_mask(). In registers they would be spilt through the main loop.
  __device__ __forceinline__ static VisibleKeys<Config::kMask>& own_row(u8* shared) {
    return reinterpret_cast<VisibleKeys<Config::kMask>*>(shared + kOwnRows)[ptx::thread_index()];
  }

  // FragmentBits of the thread's rows, of the KV tile at a place of a sparse mask.
  struct SeenRows {
    u32 of_row[kRows];

    __device__ __forceinline__ SeenRows(const AttnParams& params, const WorkTile& work, u8* shared, i32 place) {
      using Bits = FragmentBits<Config::kBlockN>;
      const TileEntry entry = entry_at<Config>(params, work, place);
      const i32 thread = ptx::thread_index(), lane = thread % kWarpSize, first = thread / kWarpSize * Config::kWarpM;
      if (entry.has_elements()) {
        const u8* bits = tile_bits<Config>(params, work, entry.tile()) + (first + lane / 4) * Bits::kRowBytes;
#pragma unroll
        for (i32 r = 0; r < kRows; ++r) of_row[r] = Bits::load(bits + 8 * r * Bits::kRowBytes, lane % 4);
        return;
      }
      const auto keys = own_row(shared);
#pragma unroll
      for (i32 r = 0; r < kRows; ++r) {
        of_row[r] = bits_of_blocks<Config>(entry, first / kMaskBlock);
        if (!entry.is_cut()) continue;
        const auto own = keys.of_lane(lane / 4 + 8 * r).from(entry.tile() * Config::kBlockN);
        of_row[r] &= Bits::before(own.end, lane % 4) & ~Bits::before(own.begin, lane % 4);
      }
    }
    __device__ __forceinline__ u32 operator[](i32 r) const { return of_row[r]; }
  };

  // Whether any row of the warp sees any key of the KV tile at a place. Call with all lanes of the warp.
  __device__ __forceinline__ static bool warp_sees(const AttnParams& params, const WorkTile& work, u8* shared,
                                                   i32 place) {
    i32 tile = place;
    if constexpr (Config::kMask == Mask::kSparse) {
      const TileEntry entry = entry_at<Config>(params, work, place);
      const i32 row_block = ptx::thread_index() / kWarpSize * Config::kWarpM / kMaskBlock;
      if (!entry.template sees<kKeyBlocks<Config>>(row_block)) return false;
      if (entry.has_elements()) return true;
      tile = entry.tile();
    }
    return sage::warp_sees<Config>(own_row(shared), tile);
  }

  // The state of a warp from tile to tile.
  struct WarpState {
    Softmax softmax;
    OutputAccumulator<Config> acc_o = {};
    float unit = 1.0f;  // of O
    const Scores scores;
    u8* const shared;
    const i32 lane;
    const u32 v_offset;
    RowScales<Config> q_scale;  // of this thread's rows g, g + 8, ...

    __device__ __forceinline__ WarpState(u8* shared_, i32 warp, i32 lane_, const float* q_scale_)
        : scores(ptx::shared_address(shared_), warp, lane_),
          shared(shared_),
          lane(lane_),
          v_offset(Product::offset(lane_)) {
      softmax.clear();
#pragma unroll
      for (i32 r = 0; r < RowScales<Config>::kCount; ++r) q_scale.of[r] = q_scale_[8 * r];
    }

    // The KV tiles of the block. kOwnP: Config::kP, or exponentials.
    template <P kOwnP>
    __device__ __forceinline__ void attend(const AttnParams& params, const WorkTile& work, Stream& stream) {
      i32 place = 0;
#pragma unroll 1
      for (; place < work.kv.template whole<Config::kMask>(); ++place) {
        step<kOwnP, false>(params, work, stream, place);
      }
#pragma unroll 1
      for (; place < work.kv.end; ++place) step<kOwnP, true>(params, work, stream, place);
    }

    // `place`: of the KV tile among those of the block.
    template <P kOwnP, bool kMasked>
    __device__ __forceinline__ void step(const AttnParams& params, const WorkTile& work, Stream& stream, i32 place) {
      // Whether the warp's rows see the tile; asked in front of the wait, which hides it.
      const bool seen = !(kMasked && kSkips<kOwnP>) || warp_sees(params, work, shared, place);
      // Wait for the stage.
      const u32 stage = Stream::stage_of(place);
      ptx::cp_async_wait<Config::kStages - 2>();
      __syncthreads();  // every thread's part of this tile is there, and every warp is done with the tile before
      // Load ahead.
      if constexpr (Stream::kOneV) stream.load_v(params, work, place);
      const i32 ahead = place + Config::kStages - 1;
      stream.load(params, work, ahead, ahead < work.kv.end);
      if (!seen) {
        if constexpr (Stream::kOneV) Stream::wait_for_v();
        return;
      }

      // S = Q · K, delta_s, mask.
      typename Scores::Accumulator acc_s;
      auto scale = scores.multiply(acc_s, q_scale, stream, stage, lane);
      if constexpr (kMasked && Config::kMask == Mask::kSparse) {
        apply_mask<Config>(acc_s, SeenRows(params, work, shared, place));
      } else if constexpr (kMasked) {
        apply_mask<Config>(acc_s, own_row(shared), lane, place);
      }
      // P, relative to references that rarely move.
      float offset[kRows];
      typename Product::Operand p;
      const bool fits = softmax.template fits<kOwnP>(acc_s, scale, offset);
      float alpha[kRows];
#pragma unroll
      for (float& of_row : alpha) of_row = 1.0f;
      if constexpr (kOwnP == P::kLinear) {
        if (!fits) {
          move_references<kOwnP>(acc_s, scale, offset, alpha);
          if (!softmax.template fits<kOwnP, true>(acc_s, scale, offset)) softmax.finish_line(acc_s, scale, offset);
        }
        softmax.pack_line(acc_s, scale, offset, p);
      } else if (fits) {
        softmax.template exponentiate<true>(acc_s, scale, offset, p);
      } else {
        move_references<kOwnP>(acc_s, scale, offset, alpha);
        softmax.template exponentiate<false>(acc_s, scale, offset, p);
      }
      // O += P · V.
      if constexpr (Stream::kOneV) Stream::wait_for_v();
      const KvTileScales scales(stream.line(stage), lane);  // reloaded: keeping them costs registers
      if (scales.spoilt()) stream.note_spoilt();
      const float v_factor = fabsf(scales.v_factor);
      // In wide kernels of a linear P, which hold two main loops, keeping the offset would spill.
      constexpr bool kAnew = Config::kP == P::kLinear && Config::kHeadDim > 64;
      const u32 offset_in_v = kAnew ? Product::offset(lane) : v_offset;
      if constexpr (takes_alpha<kOwnP>()) {
        Product::accumulate(acc_o, softmax.row_sum, alpha, unit, p, stream.v(stage), offset_in_v, v_factor);
      } else {
        Product::accumulate(acc_o, softmax.row_sum, p, stream.v(stage), offset_in_v, v_factor);
      }
    }

    // Moves references, and O with them where its promotion does not. `alpha`: the factor of O.
    template <P kOwnP>
    __device__ __forceinline__ void move_references(const typename Scores::Accumulator& acc_s,
                                                    const RowScales<Config>& scale, float (&offset)[kRows],
                                                    float (&alpha)[kRows]) {
      softmax.template move_references<kOwnP>(acc_s, scale, offset, alpha);
      if constexpr (!takes_alpha<kOwnP>()) rescale<Config>(acc_o, alpha);
    }
  };
};

}  // namespace sage
