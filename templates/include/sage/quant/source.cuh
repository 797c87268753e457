// Reading the caller's tensors: eight channels of a row at a time, in f32.
#pragma once

#include "sage/params.cuh"
#include "sage/ptx/global.cuh"
#include "sage/ptx/math.cuh"

namespace sage {

constexpr i32 kVector = 8;  // channels a thread handles at once: 16 bytes of f16 or bf16

// The rows that an entry point takes. kBf16, kF16: rows of that type which start at multiples of 16 bytes and hold
// whole vectors, so that one load takes eight channels without a branch. kAny: all other rows, and all of f32. The host
// picks the entry point.
enum class SourceRows { kBf16, kF16, kAny };

// The type of rows that an entry point takes.
__device__ constexpr Dtype dtype_of(SourceRows rows) {
  return rows == SourceRows::kBf16 ? Dtype::kBf16 : rows == SourceRows::kF16 ? Dtype::kF16 : Dtype::kF32;
}

// Eight channels of a row as they were loaded: two of f16 or bf16 a word.
struct alignas(16) Halves {
  u32 word[kVector / 2];
};

// Eight channels of a row as f32, of SourceRows::kAny, whose type is known at run time only.
struct Floats {
  float of[kVector];
};

template <SourceRows kSource>
struct RawRow {
  using Type = Halves;
};
template <>
struct RawRow<SourceRows::kAny> {
  using Type = Floats;
};

template <SourceRows kSource>
struct Source {
  using Raw = typename RawRow<kSource>::Type;

  const u8* head;  // first row of one head of a batch entry
  i64 row_bytes;   // from row to row
  i32 rows;
  i32 headdim;
  Dtype dtype;
  const i32* index;  // rows of the tensor by the rows that are read; null: the same rows

  __device__ __forceinline__ Source(const Tensor& tensor, i32 batch, i32 head_index, i32 first_row, i32 rows_,
                                    i32 headdim_, Dtype dtype_, const i32* index_ = nullptr)
      : rows(rows_), headdim(headdim_), dtype(dtype_), index(index_) {
    const i64 first = batch * tensor.stride.batch + head_index * tensor.stride.head + first_row * tensor.stride.row;
    head = static_cast<const u8*>(tensor.data) + first * element_bytes();
    row_bytes = tensor.stride.row * element_bytes();
  }

  // Loads zeros for channels that do not exist, and the last row for rows that do not exist. No query sees such
  // a copy. A copy changes no maximum of a whole tile; in a ragged tile it may change that of a scale group without the
  // last row.
  __device__ __forceinline__ Raw load(i32 row, i32 channel) const {
    i32 at = min(row, rows - 1);
    if (index != nullptr) at = index[at];
    const u8* from = head + channel * element_bytes() + at * row_bytes;
    if constexpr (kSource == SourceRows::kAny) {
      return load_elements(from, headdim - channel);
    } else {
      const ptx::U32x4 words = ptx::load_global_u32x4(from, channel < headdim);
      return {words.x, words.y, words.z, words.w};
    }
  }

  __device__ __forceinline__ void convert(const Raw& raw, float (&x)[kVector]) const {
#pragma unroll
    for (i32 w = 0; w < kVector / 2; ++w) convert(raw, w, x[2 * w], x[2 * w + 1]);
  }

  // Channels 2w and 2w + 1.
  __device__ __forceinline__ void convert(const Halves& raw, i32 w, float& x, float& y) const {
    const u16 low = static_cast<u16>(raw.word[w]), high = static_cast<u16>(raw.word[w] >> 16);
    x = kSource == SourceRows::kBf16 ? ptx::f32_from_bf16(low) : ptx::f32_from_f16(low);
    y = kSource == SourceRows::kBf16 ? ptx::f32_from_bf16(high) : ptx::f32_from_f16(high);
  }
  __device__ __forceinline__ void convert(const Floats& raw, i32 w, float& x, float& y) const {
    x = raw.of[2 * w], y = raw.of[2 * w + 1];
  }

 private:
  __device__ __forceinline__ i32 element_bytes() const {
    return kSource == SourceRows::kAny ? bytes_of(dtype) : static_cast<i32>(sizeof(u16));
  }

  // Loads eight elements of `dtype`, which is uniform over the grid. channels: of the row, from `from` on; the others
  // are zero.
  __device__ __forceinline__ Floats load_elements(const u8* from, i32 channels) const {
    Floats x = {};
    if (dtype == Dtype::kF32 && headdim % 4 == 0 && (reinterpret_cast<u64>(head) | row_bytes) % 16 == 0) {
#pragma unroll
      for (i32 i = 0; i < kVector; i += 4) {
        const ptx::U32x4 four = ptx::load_global_u32x4(from + i * sizeof(float), i < channels);
        x.of[i] = __uint_as_float(four.x), x.of[i + 1] = __uint_as_float(four.y);
        x.of[i + 2] = __uint_as_float(four.z), x.of[i + 3] = __uint_as_float(four.w);
      }
      return x;
    }
#pragma unroll
    for (i32 i = 0; i < kVector; ++i) {
      if (i >= channels) continue;
      if (dtype == Dtype::kF32) x.of[i] = reinterpret_cast<const float*>(from)[i];
      else if (dtype == Dtype::kBf16) x.of[i] = ptx::f32_from_bf16(reinterpret_cast<const u16*>(from)[i]);
      else x.of[i] = ptx::f32_from_f16(reinterpret_cast<const u16*>(from)[i]);
    }
    return x;
  }
};

// The largest and the smallest of a thread's values in each channel; of f16 and bf16 two channels a word. NaN where a
// value is NaN.
template <SourceRows kSource>
struct Extremes {
  using Raw = typename Source<kSource>::Raw;

  const Source<kSource>& source;
  Raw largest, smallest;

  __device__ __forceinline__ Extremes(const Source<kSource>& source_, const Raw& first)
      : source(source_), largest(first), smallest(first) {}

  __device__ __forceinline__ void add(const Halves& raw) {
#pragma unroll
    for (i32 w = 0; w < kVector / 2; ++w) {
      if constexpr (kSource == SourceRows::kBf16) {
        largest.word[w] = ptx::max_nan_bf16x2(largest.word[w], raw.word[w]);
        smallest.word[w] = ptx::min_nan_bf16x2(smallest.word[w], raw.word[w]);
      } else {
        largest.word[w] = ptx::max_nan_f16x2(largest.word[w], raw.word[w]);
        smallest.word[w] = ptx::min_nan_f16x2(smallest.word[w], raw.word[w]);
      }
    }
  }
  __device__ __forceinline__ void add(const Floats& raw) {
#pragma unroll
    for (i32 i = 0; i < kVector; ++i) {
      largest.of[i] = ptx::max_nan(largest.of[i], raw.of[i]);
      smallest.of[i] = ptx::min_nan(smallest.of[i], raw.of[i]);
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
      source.convert(largest, w, x[0], x[1]);
      source.convert(smallest, w, x[2], x[3]);
#pragma unroll
      for (i32 i = 0; i < 4; ++i) amax = ptx::max_nan(amax, fabsf(map(x[i], 2 * w + i % 2)));
    }
    return amax;
  }
};

// Rows that a thread reads more than once. Held: all rows are loaded into registers at once, so that their latencies
// overlap. Not held (SourceRows::kAny): each row is loaded when it is read, and loops over rows are not unrolled, since
// a row then takes up to eight loads, whose addresses would fill the registers.
template <SourceRows kSource, bool kHeld, i32 kCount>
struct HeldRows {
  using Raw = typename Source<kSource>::Raw;
  static constexpr i32 kUnroll = kHeld ? kCount : 1;

  Raw held[kUnroll];

  template <class Load>
  __device__ __forceinline__ void load(Load load_row) {
    if constexpr (kHeld) {
#pragma unroll
      for (i32 i = 0; i < kUnroll; ++i) held[i] = load_row(i);
    }
  }

  template <class Load>
  __device__ __forceinline__ Raw get(i32 i, Load load_row) const {
    if constexpr (kHeld) return held[i];
    else return load_row(i);
  }
};

}  // namespace sage
