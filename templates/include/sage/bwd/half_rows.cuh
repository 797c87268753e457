// Rows of dO or V, read where the caller has them. The host sees to it that they begin at multiples of 16 bytes and
// hold whole vectors of 16 bytes, with zeros behind the last channel.
#pragma once

#include "sage/bwd/entry.cuh"
#include "sage/bwd/params.cuh"
#include "sage/ptx/cp_async.cuh"
#include "sage/ptx/opaque.cuh"
#include "sage/ptx/special.cuh"
#include "sage/tile/layout.cuh"

namespace sage {

struct HalfRows {
  const u8* first;
  i64 row_bytes;  // from row to row
  i32 rows;       // that exist
  i32 headdim;
  const i32* index;  // the tensor's rows, counted from `first`, by the rows that are read; null: the same rows

  // The rows of a head from `first_row` of the batch entry on.
  __device__ __forceinline__ HalfRows(const Tensor& tensor, i32 batch, i32 head, const CallerRows& of_entry,
                                      i32 first_row, i32 headdim_)
      : row_bytes(tensor.stride.row * static_cast<i64>(sizeof(u16))),
        rows(of_entry.count - first_row),
        headdim(headdim_),
        index(of_entry.index == nullptr ? nullptr : of_entry.index + first_row) {
    const i32 first_of_tensor = index == nullptr ? of_entry.begin + first_row : 0;
    const i64 element = batch * tensor.stride.batch + head * tensor.stride.head + first_of_tensor * tensor.stride.row;
    first = static_cast<const u8*>(tensor.data) + element * static_cast<i64>(sizeof(u16));
  }

  __device__ __forceinline__ const u8* at(i32 row, i32 chunk) const {
    return first + (index == nullptr ? row : index[row]) * row_bytes + chunk * 16;
  }
  __device__ __forceinline__ bool has_chunk(i32 chunk) const { return chunk * 8 < headdim; }

  // The word of a lane quad's thread in a chunk of 16 bytes of a row. Zero where the row or the channel does not exist.
  __device__ __forceinline__ u32 word(i32 row, i32 chunk, i32 thread) const {
    return row < rows && has_chunk(chunk) ? *reinterpret_cast<const u32*>(at(row, chunk) + thread * sizeof(u32)) : 0;
  }
};

// Such rows tile by tile. The first kThreads threads of a block copy a tile to shared memory, each one chunk of every
// kRowsAtOnce-th row. The stride is opaque: the compiler would keep its multiples in registers, which the sums need.
// Rows with an index are looked up tile by tile.
template <class Swizzle, i32 kTileRows, i32 kThreads>
class HalfTiles {
 public:
  __device__ __forceinline__ explicit HalfTiles(const HalfRows& rows)
      : from_(rows.first + (rows.index == nullptr ? own_row() : 0) * rows.row_bytes + own_chunk() * 16),
        row_bytes_(rows.row_bytes),
        index_(rows.index == nullptr ? nullptr : rows.index + own_row()),
        left_(rows.has_chunk(own_chunk()) ? rows.rows - own_row() : 0) {}

  __device__ __forceinline__ void advance() {
    if (index_ == nullptr) from_ += kTileRows * ptx::opaque(row_bytes_);
    else index_ += kTileRows;
    left_ -= kTileRows;
  }

  // Begins to copy the current tile. Zeros for what does not exist.
  __device__ __forceinline__ void copy_async(u32 shared) const {
    const u32 to = shared + Swizzle::offset(own_row(), own_chunk());
    const i64 step_bytes = kRowsAtOnce * ptx::opaque(row_bytes_);
    const u8* from = from_;
#pragma unroll
    for (i32 i = 0; i < kTileRows; i += kRowsAtOnce) {
      if (index_ != nullptr) from = from_ + (i < left_ ? index_[i] : 0) * ptx::opaque(row_bytes_);
      ptx::cp_async_16_or_zeros(Swizzle::moved(to, i, 0), from, i < left_);
      if (index_ == nullptr) from += step_bytes;
    }
  }

 private:
  static constexpr u32 kChunks = Swizzle::kRowBytes / 16, kRowsAtOnce = kThreads / kChunks;
  static_assert(kRowsAtOnce % 8 == 0 && kTileRows % kRowsAtOnce == 0, "moved() takes multiples of 8 rows");

  __device__ __forceinline__ static u32 own_row() { return threadIdx.x / kChunks; }
  __device__ __forceinline__ static u32 own_chunk() { return threadIdx.x % kChunks; }

  const u8* from_;  // this thread's first chunk of the current tile; with an index its chunk of the tensor's first row
  i64 row_bytes_;
  const i32* index_;  // of this thread's first row of the current tile; null: none
  i32 left_;          // rows from that chunk's to the last
};

}  // namespace sage
