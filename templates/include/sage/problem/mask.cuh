// The keys that a query row sees. Every other header asks visible_keys(), and takes from its answer nothing but begin,
// end, of_lane(), from(), contains(), word() and empty(); or it asks first_causal_query().
#pragma once

#include "sage/problem/seqlen.cuh"
#include "sage/ptx/warp.cuh"

namespace sage {

enum class Mask { kFull, kCausal };

// The keys before an end.
struct KeyPrefix {
  static constexpr i32 begin = 0;
  i32 end;

  __device__ __forceinline__ bool contains(i32 key) const { return key < end; }
  __device__ __forceinline__ bool empty() const { return end == 0; }

  // The keys that another lane has. Call with all lanes of the warp.
  __device__ __forceinline__ KeyPrefix of_lane(i32 lane) const { return {ptx::shuffle(end, lane)}; }

  // The same keys, counted from the key `first` on.
  __device__ __forceinline__ KeyPrefix from(i32 first) const { return {end - first}; }

  // A bit for each of the keys 0 to 31.
  __device__ __forceinline__ u32 word() const {
    const u32 below = (1u << (end & 31)) - 1;
    return end >= 32 ? ~0u : end <= 0 ? 0u : below;
  }
};

// Causal is aligned bottom-right: query i sees the caller's keys j <= i + seqlen_kv - seqlen_q. Full attention sees all
// packed keys. begin and end count packed keys, and never fall from one row to the next.
// kBranch: as Seqlen::packed() has it.
template <Mask kMask, bool kBranch = false, class Seqlen>
__device__ __forceinline__ KeyPrefix visible_keys(const Seqlen& seqlen, i32 row) {
  if constexpr (kMask == Mask::kFull) return {seqlen.template kv<kBranch>()};
  const i32 diagonal = seqlen.kv_of_caller() - seqlen.q();
  return {seqlen.template packed<kBranch>(min(seqlen.kv_of_caller(), max(0, row + 1 + diagonal)))};
}

// The first query that sees the caller's key under a causal mask. Negative for a key that queries in front of the first
// would see.
template <class Seqlen>
__device__ __forceinline__ i32 first_causal_query(const Seqlen& seqlen, i32 key) {
  return key + seqlen.q() - seqlen.kv_of_caller();
}

template <Mask kMask>
using VisibleKeys = KeyPrefix;

}  // namespace sage
