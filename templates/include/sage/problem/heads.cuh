// Which KV head a query head reads: grouped query heads. Params: any of params.cuh that has the numbers of heads.
#pragma once

#include "sage/types.cuh"

namespace sage {

// Index into [batch * num_kv_heads]. head: a query head of that batch entry.
template <class Params>
__device__ __forceinline__ i32 kv_head_of(const Params& params, i32 batch, i32 head) {
  return batch * params.num_kv_heads + head / params.q_heads_per_kv_head;
}

}  // namespace sage
