// The scales that a thread reads from a KV tile's line: that of its keys, and v_factor.
#pragma once

#include "sage/ptx/shared.cuh"
#include "sage/tile/layout.cuh"

namespace sage {

struct KvTileScales {
  float k_scale, v_factor;  // as in KvLine: with signs

  // line: the tile's KvLine in shared memory.
  __device__ __forceinline__ KvTileScales(u32 line, i32 lane) {
    const ptx::F32x2 factors = ptx::load_shared_f32x2(line + lane % 4 * sizeof(KvLine::Factors));
    k_scale = factors.x;
    v_factor = factors.y;
  }

  // The sign bit of the result is set where a key or a value of the tile is not finite.
  __device__ __forceinline__ u32 signs() const { return __float_as_uint(k_scale) | __float_as_uint(v_factor); }
  __device__ __forceinline__ bool spoilt() const { return static_cast<i32>(signs()) < 0; }
};

}  // namespace sage
