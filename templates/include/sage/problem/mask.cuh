// What a query row sees: a prefix of the keys. Causal is aligned bottom-right: query i sees the keys
// j <= i + seqlen_kv - seqlen_q.
#pragma once

#include "sage/problem/seqlen.cuh"

namespace sage {

// How many keys a query row sees. Full attention is a diagonal that lies beyond the last key.
template <bool kCausal, class Params>
__device__ __forceinline__ i32 visible_keys(const Seqlen<Params>& seqlen, i32 row) {
  const i32 diagonal = seqlen.kv() - (kCausal ? seqlen.q() : 0);
  return min(seqlen.kv(), max(0, row + 1 + diagonal));
}

}  // namespace sage
