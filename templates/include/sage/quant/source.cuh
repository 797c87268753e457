// Reading the caller's tensors: eight channels of a row at a time, in f32.
#pragma once

#include "sage/params.cuh"
#include "sage/ptx/global.cuh"
#include "sage/ptx/math.cuh"

namespace sage {

constexpr i32 kVector = 8;  // channels a thread handles at once: 16 bytes of f16 or bf16

struct alignas(16) Raw {
  u32 word[kVector / 2];
};

// The rows that an entry point takes. kBf16, kF16: rows of that type which start at multiples of 16 bytes and hold
// whole vectors, so that one load takes eight channels without a branch. kAny: all rows. The host picks the entry
// point.
enum class SourceRows { kBf16, kF16, kAny };

template <SourceRows kSource>
struct Source {
  const u8* head;  // first row of one head of a batch entry
  i64 row_bytes;   // from row to row
  i32 rows;
  i32 headdim;
  Dtype dtype;
  const i32* index;  // rows of the tensor by the rows that are read; null: the same rows

  __device__ __forceinline__ Source(const Tensor& tensor, i32 batch, i32 head_index, i32 first_row, i32 rows_,
                                    i32 headdim_, Dtype dtype_, const i32* index_ = nullptr)
      : head(static_cast<const u8*>(tensor.data) +
             (batch * tensor.stride.batch + head_index * tensor.stride.head + first_row * tensor.stride.row) *
                 sizeof(u16)),
        row_bytes(tensor.stride.row * sizeof(u16)),
        rows(rows_),
        headdim(headdim_),
        dtype(dtype_),
        index(index_) {}

  // Loads zeros for channels that do not exist, and the last row in place of rows that do not exist. No query sees such
  // a copy. A copy changes no maximum of a whole tile; in a ragged tile it may change that of a scale group without the
  // last row.
  __device__ __forceinline__ Raw load(i32 row, i32 channel) const {
    i32 at = min(row, rows - 1);
    if (index != nullptr) at = index[at];
    const u8* from = head + channel * sizeof(u16) + at * row_bytes;
    if constexpr (kSource != SourceRows::kAny) {
      const ptx::U32x4 words = ptx::load_global_u32x4(from, channel < headdim);
      return {words.x, words.y, words.z, words.w};
    }
    Raw raw = {};
#pragma unroll
    for (i32 i = 0; i < kVector; ++i) {
      if (channel + i < headdim) {
        raw.word[i / 2] |= static_cast<u32>(reinterpret_cast<const u16*>(from)[i]) << 16 * (i % 2);
      }
    }
    return raw;
  }

  // A branch on it is uniform over the grid.
  __device__ __forceinline__ bool is_bf16() const {
    return kSource == SourceRows::kBf16 || (kSource == SourceRows::kAny && dtype == Dtype::kBf16);
  }

  __device__ __forceinline__ void convert(const Raw& raw, float (&x)[kVector]) const {
#pragma unroll
    for (i32 w = 0; w < kVector / 2; ++w) convert(raw.word[w], x[2 * w], x[2 * w + 1]);
  }

  // Two channels.
  __device__ __forceinline__ void convert(u32 word, float& x, float& y) const {
    if (is_bf16()) {
      x = ptx::f32_from_bf16(static_cast<u16>(word));
      y = ptx::f32_from_bf16(static_cast<u16>(word >> 16));
    } else {
      x = ptx::f32_from_f16(static_cast<u16>(word));
      y = ptx::f32_from_f16(static_cast<u16>(word >> 16));
    }
  }
};

// Of each channel the largest and the smallest of a thread's values, two channels a word. NaN where one is NaN.
template <SourceRows kSource>
struct Extremes {
  const Source<kSource>& source;
  Raw largest, smallest;

  __device__ __forceinline__ Extremes(const Source<kSource>& source_, const Raw& first)
      : source(source_), largest(first), smallest(first) {}

  __device__ __forceinline__ void add(const Raw& raw) {
#pragma unroll
    for (i32 w = 0; w < kVector / 2; ++w) {
      if (source.is_bf16()) {
        largest.word[w] = ptx::max_nan_bf16x2(largest.word[w], raw.word[w]);
        smallest.word[w] = ptx::min_nan_bf16x2(smallest.word[w], raw.word[w]);
      } else {
        largest.word[w] = ptx::max_nan_f16x2(largest.word[w], raw.word[w]);
        smallest.word[w] = ptx::min_nan_f16x2(smallest.word[w], raw.word[w]);
      }
    }
  }

  // The largest magnitude of map(x, i) over the values x of channels i. map() is monotonic, so that the largest or the
  // smallest value has it. NaN or infinity where a value is NaN or infinite.
  template <class Map>
  __device__ __forceinline__ float abs_max(Map map) const {
    float amax = 0.0f;
#pragma unroll
    for (i32 w = 0; w < kVector / 2; ++w) {
      float x[4];
      source.convert(largest.word[w], x[0], x[1]);
      source.convert(smallest.word[w], x[2], x[3]);
#pragma unroll
      for (i32 i = 0; i < 4; ++i) amax = ptx::max_nan(amax, fabsf(map(x[i], 2 * w + i % 2)));
    }
    return amax;
  }
};

// Rows of a tile that a thread reads more than once. Held: all rows are loaded into registers at once, so that their
// latencies overlap. Not held (SourceRows::kAny): each row is loaded when it is read, and loops over rows are not
// unrolled, since a row then takes eight loads, whose addresses would fill the registers.
template <bool kHeld, i32 kCount>
struct HeldRows {
  static constexpr i32 kUnroll = kHeld ? kCount : 1;

  Raw held[kUnroll];

  template <class Load>
  __device__ __forceinline__ void load(Load load_row) {
    if constexpr (kHeld) {
#pragma unroll
      for (i32 i = 0; i < kCount; ++i) held[i] = load_row(i);
    }
  }

  template <class Load>
  __device__ __forceinline__ Raw get(i32 i, Load load_row) const {
    if constexpr (kHeld) return held[i];
    else return load_row(i);
  }
};

}  // namespace sage
