// The main loop of a consumer warpgroup: 64 rows of a query tile over the KV tiles that they see. Consumers that
// ping-pong take equally many steps: each goes over all KV tiles that the query tile sees.
//
// A step at KV tile t:
//   issue P·V of tile t - 1, then Q·K of tile t;
//   promote: O = alpha · O + R, while Q·K runs; of slices (head dim 256) the last. Slice i < last is promoted before,
//     while slice i + 1 is in the tensor cores;
//   softmax of tile t, with no product of this consumer in flight: under an FP8 product, which works on registers,
//   other instructions run at a quarter of their rate.
// R is the accumulator of P·V. R takes two KV tiles where registers allow, so that every other step promotes.
// O and R count in v_factor of the last KV tile. A tile with another v_factor, which few have, rescales both.
// V has eight constant channels behind its own, of kSumUnit. Their output is the sum of the rounded P in that unit, by
// which O is divided: accumulators cut off both alike. The log-sum-exp takes the sum of P before rounding. The weight
// of a split takes that too, or of a linear P the sum as rounded.
// Source: SageAttention2, Algorithm 1; "FlashAttention-3", section 3.2.
#pragma once

#include "sage/attn/apply_mask.cuh"
#include "sage/attn/kv_scales.cuh"
#include "sage/attn/p_operand.cuh"
#include "sage/attn/wgmma/pingpong.cuh"
#include "sage/attn/wgmma/shared_storage.cuh"
#include "sage/attn/wgmma/softmax.cuh"
#include "sage/attn/wgmma/traits.cuh"
#include "sage/ptx/mbarrier.cuh"
#include "sage/ptx/special.cuh"
#include "sage/ptx/warp.cuh"
#include "sage/ptx/wgmma.cuh"
#include "sage/tile/matrix_descriptor.cuh"

namespace sage {

// Config: kHeadDim, kQk, kPv, kPvAccum, kP, kMask, kSmoothQ, kSmoothV, kBlockM, kBlockN, kWarpM, kStages.
template <class Config>
struct Mainloop {
  using Traits = WgmmaTraits<Config>;
  using Layout = TileLayout<Config>;
  using Shared = SharedStorage<Config>;
  using KvStage = PipelineState<Config::kStages>;
  using Product = E4m3Operand<Config>;
  using Softmax = TileSoftmax<Config, Product, Traits::kRoom>;
  static constexpr bool kTogether = Traits::kTogether, kPairs = Traits::kPairs, kOpenEnd = Traits::kOpenEnd;
  static constexpr i32 kFullBehindPair = kOpenEnd ? 0 : 1;  // full tiles that must follow a pair's first tile
  static constexpr i32 kRows = Config::kWarpM / 8;          // of a thread
  static constexpr i32 kNTiles = Config::kBlockN / 8;
  static constexpr i32 kSlices = Traits::kSlices, kSliceChannels = Config::kHeadDim / kSlices;
  static constexpr i32 kOutputs = kSliceChannels / 2;  // registers of a thread for the outputs of a slice
  static_assert(kSlices == 1 || kOutputs == Config::kBlockN / 2, "a slice takes the registers of the scores");

  const AttnParams& params;
  const Shared shared;
  const WorkTile& work;
  i32 warp, lane;  // warp of the consumers
  u32 q_rows;      // shared address of the warpgroup's rows of Q
  float q_scale;
  PingPong<kTogether> pingpong;
  KvStage stage;        // of the next KV tile
  KvRange own_kv = {};  // KV tiles that the consumer's rows see; only where consumers do not ping-pong
  i32 first = 0;        // of these the first; only where the consumer passes over others

  // Read by the epilogue.
  Softmax softmax = {};
  OutputAccumulator<Config> acc_o = {};
  float o_factor = 1.0f;        // unit of O; equals v_factor at every promotion
  float exact_sum[kRows] = {};  // of this thread's P before it is rounded; zero where that is not taken
  u32 signs = 0;                // of the tiles' scales, in the sign bit: whether one held what is not finite

  // Left by one step to the next.
  // R as the bits of f32: P·V of one KV tile or two, then the sums of P. With slices, every other slice (r_of()).
  u32 acc_r[kOutputs + 4];
  float alpha[kRows] = {};  // rescales O at the next promotion
  typename Softmax::Scores acc_s;
  typename Product::Operand p;
  i32 previous;    // stage of the tile whose P this is
  float v_factor;  // of that tile

  __device__ __forceinline__ Mainloop(const AttnParams& params_, const Shared& shared_, const WorkTile& work_,
                                      i32 warp_, i32 lane_, u32 q_rows_, float q_scale_, i32 consumer,
                                      const KvStage& stage_)
      : params(params_),
        shared(shared_),
        work(work_),
        warp(warp_),
        lane(lane_),
        q_rows(q_rows_),
        q_scale(q_scale_),
        pingpong{consumer},
        stage(stage_) {
    if constexpr (!kTogether) {
      own_kv = work.template kv_of_rows<Config, kWarpgroupRows>(params, consumer * kWarpgroupRows);
    }
    softmax.clear();
  }

  // The KV tiles that this consumer goes over, from the first of the query tile on.
  __device__ __forceinline__ i32 kv_end() const { return kTogether ? work.kv.end : own_kv.end; }
  __device__ __forceinline__ i32 kv_whole() const {
    return kTogether ? work.kv.template whole<Config::kMask>() : own_kv.template whole<Config::kMask>();
  }

  __device__ __forceinline__ i32 first_place() const { return Traits::kPasses ? first : 0; }

  // The P·V that a step issues. kOpens, kCloses: the first and the second of a pair. kAlone: the only one of R, or in a
  // masked step the second of a pair where R is open.
  enum Sum { kAlone, kOpens, kCloses };

  // The consumer's KV tiles, at least one. kOwnP: Config::kP, or exponentials.
  template <bool kLse, P kOwnP>
  __device__ __forceinline__ void attend() {
    if constexpr (!Traits::kBoundsScores) issue_qk();
    const KvStage here = stage;
    stage.advance();
    const float scale = score_scale(scales_of(here));
    ptx::wgmma_wait<0>();
    float own_largest[kRows];
    const SeenRows seen = seen_of<kOwnP>(first_place(), here);
    if (kv_whole() > 0) {
      finish_scores<kOwnP, false>(first_place(), scale, here, seen, own_largest);
      exponentiate<kLse, kOwnP, false, true>(scale, own_largest, here, seen);
    } else {
      finish_scores<kOwnP, true>(first_place(), scale, here, seen, own_largest);
      exponentiate<kLse, kOwnP, true, true>(scale, own_largest, here, seen);
    }
    o_factor = v_factor;
    const i32 full_tiles = ptx::uniform(kv_whole()), tiles = ptx::uniform(kv_end());
    i32 tile = first_place() + 1;
    bool open = false;  // R holds P·V of one tile of two
    bool waits = true;  // P of the tile before waits for its product
    if constexpr (kPairs) {
#pragma unroll 1
      for (; tile + kFullBehindPair < full_tiles; tile += 2) {
        step<kLse, kOwnP, false, kOpens>(tile, false);
        if (kOpenEnd && tile + 1 == full_tiles) {
          ++tile, open = true;
          __syncwarp();  // keeps ptxas from hoisting this exit's register moves into the loop
          break;
        }
        step<kLse, kOwnP, false, kCloses>(tile + 1, true);
      }
      change_factor();
    } else {
#pragma unroll 1
      for (; tile < full_tiles; ++tile) {
        step<kLse, kOwnP, false, kAlone>(tile, false);
      }
    }
#pragma unroll 1
    for (; tile < tiles; ++tile, open = false) {
      if constexpr (Traits::kPasses) step_or_pass<kLse, kOwnP>(tile, open, waits);
      else step<kLse, kOwnP, true, kAlone>(tile, open);
    }
    if (waits) finish_pv(open);
    // Head dim 256: O takes o_factor here. Passed to the epilogue, it makes ptxas serialize the products (C7511).
    if constexpr (kSlices > 1) scale_output(o_factor);
  }

  // The unit of O after attend().
  __device__ __forceinline__ float output_factor() const { return kSlices > 1 ? 1.0f : o_factor; }

  // Frees the stages of the query tile's KV tiles behind the consumer's.
  __device__ __forceinline__ void skip_unseen() {
#pragma unroll 1
    for (i32 tile = kv_end(); tile < work.kv.end; ++tile) pass_stage();
  }

  // Frees a stage that the consumer leaves alone.
  __device__ __forceinline__ void pass_stage() {
    ptx::mbarrier_wait(shared.full(stage.index), stage.phase);
    ptx::mbarrier_arrive(shared.empty(stage.index));
    stage.advance();
  }

  // Goes to the first KV tile that the consumer's rows see. False where there is none.
  __device__ __forceinline__ bool find_first() {
    const i32 tiles = kv_whole() > 0 ? 0 : kv_end();
#pragma unroll 1
    for (; ptx::any(first < tiles) && !sees_stage(); ++first) pass_stage();
    return first < kv_end();
  }

  // P·V of the last tile.
  __device__ __forceinline__ void finish_pv(bool open) {
    issue_pv(open);
    wait_pv<0>();
    promote();
  }

  // A step at a tile that is seen in part, or none where the consumer's rows see nothing of it. waits: P of the tile
  // before waits for its product.
  template <bool kLse, P kOwnP>
  __device__ __forceinline__ void step_or_pass(i32 tile, bool open, bool& waits) {
    KvStage next = stage;
    next.advance();
    if (!sees_stage()) {
      if (waits) finish_pv(open);  // gives its stage back, which the producer may need for a tile that is passed over
      waits = false;
      ptx::mbarrier_arrive(shared.empty(stage.index));
    } else if (waits) {
      step<kLse, kOwnP, true, kAlone>(tile, open);
    } else {
      step_anew<kLse, kOwnP>(tile);
      waits = true;
    }
    stage = next;  // whichever way, which the compiler would not see
  }

  // P of a tile behind some that the consumer passed over.
  template <bool kLse, P kOwnP>
  __device__ __forceinline__ void step_anew(i32 tile) {
    issue_qk();
    const KvStage here = stage;
    stage.advance();
    const float scale = score_scale(scales_of(here));
    const SeenRows seen = seen_of<kOwnP>(tile, here);
    ptx::wgmma_wait<0>();
    float own_largest[kRows];
    finish_scores<kOwnP, true>(tile, scale, here, seen, own_largest);
    exponentiate<kLse, kOwnP, true, true>(scale, own_largest, here, seen);
    change_factor();
  }

  // P·V of the tile before, and P of this tile. `open`: R holds P·V of the first tile of a pair.
  template <bool kLse, P kOwnP, bool kMasked, Sum kSum>
  __device__ __forceinline__ void step(i32 tile, bool open) {
    pingpong.wait();  // the other consumer has issued its products and reduced its scores
    issue_pv(open);   // R (+)= P · V of the tile before
    if constexpr (!kTogether) wait_pv<0>();
    issue_qk();  // S = Q · K of this tile
    const KvStage here = stage;
    stage.advance();
    const float scale = score_scale(scales_of(here));
    if constexpr (kTogether) wait_pv<1>();  // R is done, and its stage free
    const float r_factor = v_factor;
    float pending[kRows];
#pragma unroll
    for (i32 r = 0; r < kRows; ++r) pending[r] = alpha[r];
    if constexpr (kSum != kOpens) promote();  // O = alpha · O + R, under Q · K
    if constexpr (kSum == kCloses && !kTogether && !kLse) keep_in_front(here);
    constexpr bool kUnderProduct = kSlices == 1;  // at head dim 256 ptxas would serialize the products (C7511)
    SeenRows seen;
    if constexpr (kMasked && kUnderProduct) seen = seen_of<kOwnP>(tile, here);
    ptx::wgmma_wait<0>();  // S is done
    // A linear P is so short that the other consumer may issue its products in front of the maxima (docs/decisions.md).
    constexpr bool kArrivesEarly = kTogether && kOwnP == P::kLinear && !Config::kSmoothQ;
    if constexpr (kArrivesEarly) {  // the other consumer may issue its products
      pingpong.arrive();
      keep_in_front(here);
    }
    float own_largest[kRows];
    if constexpr (kMasked && !kUnderProduct) seen = seen_of<kOwnP>(tile, here);
    finish_scores<kOwnP, kMasked>(tile, scale, here, seen, own_largest);  // delta_s, mask, largest scores
    if constexpr (!kArrivesEarly) pingpong.arrive_behind(own_largest);
    // Of a pair's second tile (kOpens: R holds the first) references may rise, but do not restart: R takes both tiles.
    exponentiate<kLse, kOwnP, kMasked, kSum != kOpens>(scale, own_largest, here, seen);
    if constexpr (kSum == kOpens) rescale_r(pending, r_factor);
    if constexpr (kSum == kAlone) change_factor();
  }

  // Issues Q·K of the tile that the stage holds.
  __device__ __forceinline__ void issue_qk() {
    ptx::mbarrier_wait(shared.full(stage.index), stage.phase);
    i32 (&s)[Config::kBlockN / 2] = reinterpret_cast<i32 (&)[Config::kBlockN / 2]>(acc_s);
    using QRows = typename Layout::QRows;
    using KRows = typename Layout::KRows;
    const u64 q = matrix_descriptor<QRows>(q_rows), k = matrix_descriptor<KRows>(shared.kv_stage(stage.index));
    ptx::wgmma_fence();
#pragma unroll
    for (i32 i = 0; i < Layout::kQkRowBytes / 32; ++i) {
      ptx::wgmma_m64k32(s, q + descriptor_offset<QRows>(i), k + descriptor_offset<KRows>(i), i > 0);
    }
    ptx::wgmma_commit();
  }

  // The KvLine's scales for this thread. Read twice a step: keeping them across the ping-pong would cost registers. So
  // would keeping the lane, where O takes 128 of them.
  __device__ __forceinline__ KvTileScales scales_of(const KvStage& here) const {
    const i32 own_lane = kSlices == 1 ? lane : static_cast<i32>(ptx::thread_index());
    return {shared.kv_stage(here.index) + Shared::kLine, own_lane};
  }

  // The norm of the thread's rows of Q, the larger, in log2 units.
  __device__ __forceinline__ float q_norm() const {
    using QRows = typename Layout::QRows;
    u32 largest = 0;
#pragma unroll
    for (i32 r = 0; r < kRows; ++r) {
      const u32 row = q_rows + (warp % (kWarpgroup / kWarpSize) * Config::kWarpM + 8 * r + lane / 4) * QRows::kPitch;
      i32 squares = 0;
#pragma unroll
      for (i32 chunk = 0; chunk < QRows::kRowBytes / 16; chunk += 4) {  // in whatever order
        const u32 address = row + chunk / 8 * QRows::kPanelBytes + (chunk % 8 + lane % 4) * 16;
        const ptx::U32x4 x = ptx::load_shared_u32x4(address);
        squares = ptx::dot_s8x4(x.x, x.x, ptx::dot_s8x4(x.y, x.y, squares));
        squares = ptx::dot_s8x4(x.z, x.z, ptx::dot_s8x4(x.w, x.w, squares));
      }
      largest = max(largest, ptx::sum_over_lanes<4>(static_cast<u32>(squares)));
    }
    return q_scale * ptx::sqrt(static_cast<float>(largest));
  }

  // The scale of this thread's scores in that tile.
  __device__ __forceinline__ float score_scale(const KvTileScales& scales) const {
    return fminf(fmaxf(q_scale * fabsf(scales.k_scale), kSmallestScale<Config::kQk>), kLargestScale);
  }

  // R also takes the next tile's P·V. If that tile's softmax raised a row's reference, or its V has another v_factor,
  // both rare, rescale R, and O for the latter. r_factor: in which R counts.
  __device__ __forceinline__ void rescale_r(const float (&pending)[kRows], float r_factor) {
    bool moved = v_factor != r_factor || v_factor != o_factor;
#pragma unroll
    for (i32 r = 0; r < kRows; ++r) moved |= alpha[r] != 1.0f;
    if (ptx::any(moved)) {
      const float ratio = r_factor * reciprocal_of_power_of_two(v_factor);
#pragma unroll
      for (i32 i = 0; i < kOutputs + 4; ++i) {  // the sums of P have no v_factor
        const float factor = i < kOutputs ? alpha[i % 4 / 2] * ratio : alpha[i % 4 / 2];
        acc_r[i] = __float_as_uint(__uint_as_float(acc_r[i]) * factor);
      }
      change_factor();
    }
#pragma unroll
    for (i32 r = 0; r < kRows; ++r) alpha[r] *= pending[r];
  }

  // Rescales O to v_factor of the tile whose P is in registers.
  __device__ __forceinline__ void change_factor() {
    if (o_factor == v_factor) return;
    scale_output(o_factor * reciprocal_of_power_of_two(v_factor));
    o_factor = v_factor;
  }

  __device__ __forceinline__ void scale_output(float factor) {
#pragma unroll
    for (i32 n = 0; n < Config::kHeadDim / 8; ++n) {
#pragma unroll
      for (i32 c = 0; c < 4; ++c) acc_o[0][n][c] *= factor;
    }
  }

  // Issues P·V, sum units included: R += P·V where R is open, else R = P·V. Leaves the last slice in flight, and
  // promotes those before it.
  template <i32 kSlice = 0>
  __device__ __forceinline__ void issue_pv(bool open) {
    issue_slice<kSlice>(open);
    if constexpr (kSlice > 0) {
      ptx::wgmma_wait<1>();
      promote_slice<kSlice - 1>();
    }
    if constexpr (kSlice + 1 < kSlices) issue_pv<kSlice + 1>(open);
  }

  // R of a slice, with the sums of P if the slice is the last, behind whose channels the units lie. The last slice is
  // in acc_r, its neighbour in the registers of the scores, and so on alternately.
  template <i32 kSlice>
  using R = u32[kSlice == kSlices - 1 ? kOutputs + 4 : kOutputs];
  template <i32 kSlice>
  __device__ __forceinline__ R<kSlice>& r_of() {
    constexpr bool kOwnRegisters = (kSlices - 1 - kSlice) % 2 == 0;
    return reinterpret_cast<R<kSlice>&>(kOwnRegisters ? acc_r[0] : reinterpret_cast<u32&>(acc_s[0][0][0]));
  }

  template <i32 kSlice>
  __device__ __forceinline__ void issue_slice(bool open) {
    const u32 rows = shared.kv_stage(previous) + Layout::kV + kSlice * kSliceChannels * Config::kBlockN;
    const u64 v = matrix_descriptor<typename Layout::VRows>(rows);
    ptx::wgmma_fence();
#pragma unroll
    for (i32 i = 0; i < Config::kBlockN / 32; ++i) {
      ptx::wgmma_m64k32(r_of<kSlice>(), p[0][i], v + descriptor_offset<typename Layout::VRows>(i), open || i > 0);
    }
    ptx::wgmma_commit();
  }

  // Waits until at most kPending groups of products are in flight, and frees the stage of P·V, which is then done.
  template <i32 kPending>
  __device__ __forceinline__ void wait_pv() const {
    ptx::wgmma_wait<kPending>();
    ptx::mbarrier_arrive(shared.empty(previous));
  }

  // Promotion of the last slice and of the row sums.
  __device__ __forceinline__ void promote() {
    promote_slice<kSlices - 1>();
#pragma unroll
    for (i32 r = 0; r < kRows; ++r) {
      softmax.row_sum[r] = fmaf(softmax.row_sum[r], alpha[r], __uint_as_float(acc_r[kOutputs + 2 * r]));
    }
  }

  // O = alpha · O + R.
  template <i32 kSlice>
  __device__ __forceinline__ void promote_slice() {
    constexpr i32 kFirst = kSlice * kSliceChannels / 8;
#pragma unroll
    for (i32 n = 0; n < kSliceChannels / 8; ++n) {
#pragma unroll
      for (i32 c = 0; c < 4; ++c) {
        const float r = __uint_as_float(r_of<kSlice>()[4 * n + c]);
        acc_o[0][kFirst + n][c] = fmaf(acc_o[0][kFirst + n][c], alpha[c / 2], r);
      }
    }
  }

  // What the thread's rows see of a KV tile that they see in part.
  struct SeenRows {
    bool whole = true;  // all of it; the same for all threads of the consumer
    u32 of_row[kRows] = {};

    __device__ __forceinline__ u32 operator[](i32 r) const { return of_row[r]; }
  };

  // Whether the consumer's rows see a key of the tile that the next stage holds.
  __device__ __forceinline__ bool sees_stage() const {
    ptx::mbarrier_wait(shared.full(stage.index), stage.phase);
    return ptx::any(entry_of(stage).template sees<kKeyBlocks<Config>>(row_block()));  // a vote is uniform
  }

  __device__ __forceinline__ TileEntry entry_of(const KvStage& here) const {
    return {static_cast<u32>(ptx::uniform(ptx::load_shared_u32(shared.kv_stage(here.index) + Shared::kEntry)))};
  }

  // Of 64 rows.
  __device__ __forceinline__ i32 row_block() const { return warp * Config::kWarpM / kMaskBlock; }

  // Whether masked steps take the bits of keys: all of a sparse mask, and those of a linear P, which hides bytes of it.
  template <P kOwnP>
  static constexpr bool kTakesBits = Config::kMask == Mask::kSparse || (kOwnP == P::kLinear && !Config::kSmoothQ);

  template <P kOwnP>
  __device__ __forceinline__ SeenRows seen_of(i32 place, const KvStage& here) const {
    using Bits = FragmentBits<Config::kBlockN>;
    SeenRows seen;
    if constexpr (!kTakesBits<kOwnP>) return seen;
    if constexpr (Config::kMask != Mask::kSparse) {
      const auto keys = own_row();
      seen.whole = false;
#pragma unroll
      for (i32 r = 0; r < kRows; ++r) {
        const i32 end = keys.of_lane(lane / 4 + 8 * r).from(place * Config::kBlockN).end;
        seen.of_row[r] = Bits::before(end, lane % 4);
      }
      return seen;
    }
    const TileEntry entry = entry_of(here);
    seen.whole = entry.template shows_all<kKeyBlocks<Config>>(row_block());
    if (kSlices > 1 && seen.whole) return seen;  // without this ptxas serializes the products of four slices (C7511)
    const bool has_bits = entry.is_cut() || entry.has_elements();
    const u32 bits = shared.bits(here.index, warp * Config::kWarpM + lane / 4, lane % 4);
#pragma unroll
    for (i32 r = 0; r < kRows; ++r) {
      seen.of_row[r] = bits_of_blocks<Config>(entry, row_block());
      if (has_bits) seen.of_row[r] = Bits::load_shared(bits + 8 * r * Bits::kRowBytes);
    }
    return seen;
  }

  // Whether scores are in f32 before P follows from them. A linear P takes integers also where a mask hides keys.
  template <P kOwnP, bool kMasked>
  static constexpr bool kFinished = Config::kSmoothQ || (kMasked && kOwnP == P::kExp2);

  // Finishes the scores in acc_s: adds all terms and masks. Finds the largest score of each row.
  template <P kOwnP, bool kMasked>
  __device__ __forceinline__ void finish_scores(i32 place, float scale, const KvStage& here, const SeenRows& seen,
                                                float (&own_largest)[kRows]) {
    if constexpr (kFinished<kOwnP, kMasked>) convert_scores(shared.kv_stage(here.index), scale);
    if constexpr (kMasked && kTakesBits<kOwnP>) {
      if (!seen.whole) apply_mask<Config>(acc_s, seen);
    } else if constexpr (kMasked) {
      apply_mask<Config>(acc_s, own_row(), lane, place);
    }
    Softmax::template find_largest<kFinished<kOwnP, kMasked>>(acc_s, own_largest);
    if constexpr (kMasked && !kFinished<kOwnP, kMasked>) {
      // A hidden score is an integer, which a small scale would make larger than scores of the tiles that the row sees.
#pragma unroll
      for (i32 r = 0; r < kRows; ++r) {
        if (own_largest[r] == static_cast<float>(kMaskedScore)) own_largest[r] = -ptx::infinity();
      }
    }
  }

  // The keys that this lane's row sees, for apply_mask(). A branch keeps the look-up out of the main loop's schedule:
  // 1.5 % of the time at head dim 128. Where Q is smoothed, the branch would spill registers at head dims 64 and 128.
  __device__ __forceinline__ VisibleKeys<Config::kMask> own_row() const {
    const i32 row = work.first_row + warp * Config::kWarpM + lane % Config::kWarpM;
    constexpr bool kBranch = kSlices > 1 || !Config::kSmoothQ;
    return visible_keys<Config::kMask, kBranch>(work.seqlen(params), row).from(work.first_key);
  }

  // Row references and P of the tile whose scores are finished. Loads the scale of the scores again, even where it is
  // one: a load does not move across the ping-pong arrival, and so no exponential does.
  template <bool kLse, P kOwnP, bool kMasked, bool kRestart>
  __device__ __forceinline__ void exponentiate(float scale, const float (&own_largest)[kRows], const KvStage& here,
                                               const SeenRows& seen) {
    softmax.template move_references<kRestart>(own_largest, Config::kSmoothQ ? 1.0f : scale, alpha);
    const KvTileScales scales = scales_of(here);
    v_factor = fabsf(scales.v_factor);
    signs |= scales.signs();
    if constexpr (!Config::kSmoothQ) scale = score_scale(scales);
    else if constexpr (kTogether) scale = ptx::load_shared_f32(shared.first + Shared::kOne);
    else scale = 1.0f;
    if constexpr (kOwnP == P::kLinear && kFinished<kOwnP, kMasked>) {
      softmax.pack_line(acc_s, FloatLine<kRows>(scale, softmax.row_ref), p);
    } else if constexpr (kOwnP == P::kLinear) {
      softmax.pack_line(acc_s, BitsLine<kRows>(scale, softmax.row_ref), p);
      if constexpr (kMasked) {
        if (!seen.whole) Softmax::hide(p, seen);
      }
    } else {
      softmax.template exponentiate<kFinished<kOwnP, kMasked>>(acc_s, scale);
      if constexpr (kLse) softmax.add(acc_s, alpha, exact_sum);
      softmax.pack(acc_s, p);
    }
    previous = here.index;
  }

  // Scores as f32: where Q is smoothed, with delta_s added and in log2 units, so that their scale is one from there on.
  __device__ __forceinline__ void convert_scores(u32 stage_address, float scale) {
#pragma unroll
    for (i32 n = 0; n < kNTiles; ++n) {
      ptx::F32x2 delta;
      if constexpr (Config::kSmoothQ)
        delta = ptx::load_shared_f32x2(stage_address + Shared::kDelta + (8 * n + lane % 4 * 2) * 4);
#pragma unroll
      for (i32 c = 0; c < 4; ++c) {
        float score = static_cast<float>(acc_s[0][n][c]);
        if constexpr (Config::kSmoothQ) score = fmaf(score, scale, c % 2 ? delta.y : delta.x);
        acc_s[0][n][c] = __float_as_int(score);
      }
    }
  }

  // A fence for the compiler, which moves no arithmetic across a loop: this loop waits for a stage that is full
  // already. Without it the compiler moves the promotion behind the wait for the scores, where the tensor cores idle.
  // Called only where the compiler moves it: where consumers ping-pong, the loop saves nothing (docs/decisions.md).
  __device__ __forceinline__ void keep_in_front(const KvStage& here) const {
    ptx::mbarrier_wait(shared.full(here.index), here.phase);
  }
};

}  // namespace sage
