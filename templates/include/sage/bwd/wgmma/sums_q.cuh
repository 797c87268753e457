// dQ with dK and dV: each block of keys adds dS · K to the sums of every tile of queries in global memory, in f32.
//
// The consumers of a block leave dS, times the scales of their keys, in shared memory. Each multiplies all of it by a
// part of the channels of K̂, and leaves the product in shared memory. Two threads of the producer, the adders, take
// turns in adding it to the sums in global memory, by bulk copies: they wait for other blocks and fence, which would
// hold up the consumers. Blocks of a head add to a tile in the order of their keys, so that equal calls give equal
// bits. A block waits for blocks of lower index alone: GPUs start these first, though CUDA does not promise it.
// Source: "FlashAttention-2", section 3.2, for the sums of dQ over blocks of keys.
#pragma once

#include "sage/bwd/tile.cuh"
#include "sage/bwd/wgmma/products.cuh"
#include "sage/ptx/bulk_sums.cuh"
#include "sage/ptx/flags.cuh"
#include "sage/ptx/mbarrier.cuh"
#include "sage/ptx/opaque.cuh"
#include "sage/ptx/proxy.cuh"
#include "sage/ptx/shared_vectors.cuh"
#include "sage/tile/pipeline.cuh"

namespace sage {

// Where the sums of dQ lie: of each tile of queries [consumer][warp][n8 tile of the consumer's channels][lane], as
// accumulators hold them: two channels of row g, and the same of row g + 8.
template <class Config>
struct QSums {
  static constexpr i32 kConsumers = 2, kWarps = kConsumers * kWarpgroup / kWarpSize;
  static constexpr i32 kChannels = Config::kHeadDim / kConsumers;  // of a consumer
  static constexpr i32 kParts = kChannels / 8;                     // n8 tiles
  static constexpr i32 kTileBytes = kTileRows * Config::kHeadDim * sizeof(float);

  // The offset in bytes of the four sums of a lane in those of a tile. warp: of all consumers.
  __device__ __forceinline__ static i32 part(i32 warp, i32 n, i32 lane) {
    return (((warp * kParts) + n) * kWarpSize + lane) * static_cast<i32>(sizeof(ptx::U32x4));
  }
  // The sums of a tile. q_tile: of all heads.
  __device__ __forceinline__ static u8* of_tile(const BwdParams& params, i32 q_tile) {
    return reinterpret_cast<u8*>(params.q_sums) + static_cast<i64>(q_tile) * kTileBytes;
  }
};

// The mbarriers of a block's sums. Each ends one phase a tile of queries; full() one every second tile.
class SumBarriers {
 public:
  static constexpr i32 kAdders = 2;  // threads that add products to the sums in turn
  static constexpr i32 kBytes = (3 + kAdders) * sizeof(u64);

  __device__ __forceinline__ explicit SumBarriers(u32 shared) : shared_(shared) {}

  // threads: of all consumers. Call with one thread, in front of a barrier of the block.
  __device__ __forceinline__ void init(u32 threads) const {
    ptx::mbarrier_init(put(), threads);
    ptx::mbarrier_init(read(), threads);
    ptx::mbarrier_init(empty(), 1);
#pragma unroll
    for (i32 adder = 0; adder < kAdders; ++adder) ptx::mbarrier_init(full(adder), threads);
  }
  __device__ __forceinline__ u32 put() const { return shared_; }         // dS is in shared memory
  __device__ __forceinline__ u32 read() const { return shared_ + 8; }    // its products have ended
  __device__ __forceinline__ u32 empty() const { return shared_ + 16; }  // the product of dQ has been read
  // The product is in shared memory, for this adder: a phase each of its tiles.
  __device__ __forceinline__ u32 full(u32 adder) const { return shared_ + 24 + 8 * adder; }

 private:
  u32 shared_;
};

// A consumer's part of the products dS · K.
template <class Config>
class QProducts {
  using Tile = BwdTile<Config>;
  using Sums = QSums<Config>;
  using Scores = SwizzledRows<Sums::kConsumers * kRowsOfWarpgroup, 2 * kTileRows>;  // dS, rows of keys
  static constexpr i32 kHalfCodeBytes = Sums::kConsumers * Tile::kHalfBytes;
  static constexpr i32 kScoreBytes = Sums::kConsumers * kRowsOfWarpgroup * Scores::kRowBytes;
  static constexpr i32 kProduct = kHalfCodeBytes + kScoreBytes, kBarriers = kProduct + Sums::kTileBytes;

 public:
  static constexpr i32 kBytes = kBarriers + 1024;  // what follows begins at a multiple of 1024
  static_assert(kBarriers % 1024 == 0 && SumBarriers::kBytes <= 1024);

  // shared: kBytes, at a multiple of 1024. warp: of all consumers.
  __device__ __forceinline__ QProducts(u32 shared, i32 warp, i32 lane)
      : shared_(shared),
        own_scores_(shared + kHalfCodeBytes + Scores::offset(16 * warp + lane / 4, 0) + lane % 4 * sizeof(u32)) {}

  // Where the half codes of a consumer's keys belong.
  __device__ __forceinline__ static u32 half_codes(u32 shared, i32 consumer) {
    return shared + consumer * Tile::kHalfBytes;
  }
  __device__ __forceinline__ static u32 product(u32 shared) { return shared + kProduct; }
  __device__ __forceinline__ static SumBarriers barriers(u32 shared) { return SumBarriers(shared + kBarriers); }

  // Leaves the consumer's dS of a tile.
  __device__ __forceinline__ void put(const HalfRowsOperand& grad_s) const {
    ptx::mbarrier_wait(own_barriers().read(), phase_ ^ 1);  // of the tile before; at once in front of the first
#pragma unroll
    for (i32 n = 0; n < kColumnTiles; ++n) {
#pragma unroll
      for (i32 r = 0; r < 2; ++r) {
        ptx::store_shared_u32(Scores::moved(own_scores_, 8 * r, n), grad_s[n / 2][n % 2 * 2 + r]);
      }
    }
    ptx::fence_proxy_async();
    ptx::mbarrier_arrive(own_barriers().put());
  }

  using Accumulator = i32[Sums::kParts][4];  // f32 as bits

  // Issues dS · K of the tile that was put last, as a group.
  __device__ __forceinline__ void issue(Accumulator& sums, i32 consumer) const {
    using Rows = typename Tile::Halves;
    ptx::mbarrier_wait(own_barriers().put(), phase_);
    const u64 a = matrix_descriptor<Scores>(shared_ + kHalfCodeBytes);
    const u64 b = matrix_descriptor<Rows>(shared_) + descriptor_offset<Rows>(consumer * Sums::kChannels * 2 / 32);
    ptx::wgmma_fence();
#pragma unroll
    for (i32 i = 0; i < Sums::kConsumers * kTileRows / 16; ++i) {
      constexpr i32 kOfTile = kTileRows / 16;
      const i32 of_b = i / kOfTile * Tile::kHalfBytes + i % kOfTile * 16 * Rows::kPitch;
      ptx::wgmma_bf16_columns_by_rows(reinterpret_cast<i32 (&)[4 * Sums::kParts]>(sums), a + i * Scores::kPitch,
                                      b + of_b / 16, i > 0);
    }
    ptx::wgmma_commit();
  }

  // Leaves the product, which has ended, for the adders.
  __device__ __forceinline__ void leave(const Accumulator& sums, i32 warp, i32 lane) {
    ptx::mbarrier_arrive(own_barriers().read());
    ptx::mbarrier_wait(own_barriers().empty(), phase_ ^ 1);  // of the tile before; at once in front of the first
    if (ptx::opaque(phase_) < 2) {  // always: without a branch ptxas takes registers that it lacks (C7512)
#pragma unroll
      for (i32 n = 0; n < Sums::kParts; ++n) {
        ptx::store_shared_u32x4(product(shared_) + Sums::part(warp, n, lane), bits(sums[n]));
      }
    }
    ptx::mbarrier_arrive(own_barriers().full(phase_));
    phase_ ^= 1;
  }

 private:
  __device__ __forceinline__ SumBarriers own_barriers() const { return barriers(shared_); }
  __device__ __forceinline__ static ptx::U32x4 bits(const i32 (&x)[4]) {
    return {static_cast<u32>(x[0]), static_cast<u32>(x[1]), static_cast<u32>(x[2]), static_cast<u32>(x[3])};
  }

  u32 shared_, own_scores_, phase_ = 0;
};

// A thread that adds every other product of a block to the sums in global memory, in the block's turn.
template <class Config>
struct QSumAdder {
  using Sums = QSums<Config>;

  const BwdParams& params;
  u32 shared;  // of QProducts
  u32 turn;    // how many blocks add before this one
  u32 adder, phase = 0;

  // q_tile: the next tile of the adder, of all heads.
  __device__ __forceinline__ void add(i32 q_tile) {
    const SumBarriers barriers = QProducts<Config>::barriers(shared);
    while (ptx::load_flag(q_count(params, q_tile)) != turn) {
    }
    ptx::fence_gpu();
    ptx::mbarrier_wait(barriers.full(adder), phase);
    phase ^= 1;
    ptx::fence_proxy_async_all();  // behind the stores of all consumers, in each of which it would hold up products
    u8* const to = Sums::of_tile(params, q_tile);
    const u32 from = QProducts<Config>::product(shared);
    // The first block of a head stores the sums.
    if (turn == 0) ptx::bulk_store(to, from, Sums::kTileBytes);
    else ptx::bulk_add_f32(to, from, Sums::kTileBytes);
    ptx::bulk_commit();
    ptx::bulk_wait_read();
    ptx::mbarrier_arrive(barriers.empty());
    ptx::bulk_wait();
    ptx::fence_gpu();
    ptx::store_flag(q_count(params, q_tile), turn + 1);
  }
};

}  // namespace sage
