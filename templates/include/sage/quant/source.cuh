// Reading the caller's tensors: eight channels of a row at a time, in f32, with zeros for what does not exist.
#pragma once

#include "sage/params.cuh"
#include "sage/ptx/math.cuh"

namespace sage {

constexpr i32 kVector = 8;  // channels a thread handles at once: 16 bytes of f16 or bf16

struct alignas(16) Raw {
  u32 word[kVector / 2];
};

// kAligned: every row starts at a multiple of 16 bytes and headdim is a multiple of kVector, so one load takes it all.
template <bool kAligned>
struct Source {
  const u16* head;  // first row of one head
  i64 row_stride;
  i32 rows;
  i32 headdim;
  Dtype dtype;

  __device__ __forceinline__ Source(const Tensor& tensor, i32 batch, i32 head_index, i32 rows_, i32 headdim_,
                                    Dtype dtype_)
      : head(static_cast<const u16*>(tensor.data) + batch * tensor.stride.batch + head_index * tensor.stride.head),
        row_stride(tensor.stride.row),
        rows(rows_),
        headdim(headdim_),
        dtype(dtype_) {}

  __device__ __forceinline__ Raw load(i32 row, i32 channel) const {
    Raw raw = {};
    if (row >= rows) return raw;
    const u16* from = head + row * row_stride + channel;
    if constexpr (kAligned) {
      if (channel < headdim) raw = *reinterpret_cast<const Raw*>(from);
    } else {
#pragma unroll
      for (i32 i = 0; i < kVector; ++i) {
        if (channel + i < headdim) raw.word[i / 2] |= static_cast<u32>(from[i]) << 16 * (i % 2);
      }
    }
    return raw;
  }

  // The branch is uniform over the grid.
  __device__ __forceinline__ void convert(const Raw& raw, float (&x)[kVector]) const {
    if (dtype == Dtype::kBf16) {
#pragma unroll
      for (i32 i = 0; i < kVector; ++i) x[i] = ptx::f32_from_bf16(static_cast<u16>(raw.word[i / 2] >> 16 * (i % 2)));
    } else {
#pragma unroll
      for (i32 i = 0; i < kVector; ++i) x[i] = ptx::f32_from_f16(static_cast<u16>(raw.word[i / 2] >> 16 * (i % 2)));
    }
  }
};

}  // namespace sage
