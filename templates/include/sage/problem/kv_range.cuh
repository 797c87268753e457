// Which KV tiles a query tile sees, and which of them need no mask.
#pragma once

#include "sage/problem/mask.cuh"

namespace sage {

struct KvRange {
  i32 full_tiles;  // leading KV tiles that every row of the query tile sees whole
  i32 tiles;       // leading KV tiles that any row sees
};

// Config: kCausal, kBlockM, kBlockN. first_row: of the query tile.
template <class Config, class Params>
__device__ __forceinline__ KvRange kv_range(const Seqlen<Params>& seqlen, i32 first_row) {
  const i32 last_row = min(first_row + Config::kBlockM, seqlen.q()) - 1;
  return {visible_keys<Config::kCausal>(seqlen, first_row) / Config::kBlockN,
          ceil_div(visible_keys<Config::kCausal>(seqlen, last_row), Config::kBlockN)};
}

}  // namespace sage
