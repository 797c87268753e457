// Which KV head a query head reads: grouped query heads. Params: any of params.cuh that has both numbers of heads.
#pragma once

#include "sage/types.cuh"

namespace sage {

template <class Params>
__device__ __forceinline__ i32 q_heads_per_kv_head(const Params& params) {
  return params.num_q_heads / params.num_kv_heads;
}

// Index into [batch * num_kv_heads]. head: a query head of that batch entry.
template <class Params>
__device__ __forceinline__ i32 kv_head_of(const Params& params, i32 batch, i32 head) {
  return batch * params.num_kv_heads + head / q_heads_per_kv_head(params);
}

}  // namespace sage
