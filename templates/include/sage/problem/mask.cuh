// The keys that a query row sees. Kernels of attention, of lists of KV tiles and of gradients ask visible_keys(), and
// take from its answer nothing but begin, end, of_lane(), from(), word() and, of a dense mask, contains() and empty().
// Or they ask first_causal_query(). Kernels that choose blocks compare blocks, not keys (select/choose_blocks.cuh).
#pragma once

#include "sage/problem/seqlen.cuh"
#include "sage/ptx/warp.cuh"

namespace sage {

enum class Mask { kFull, kCausal, kSparse };

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

// The keys from a begin on, before an end.
struct KeyInterval {
  i32 begin, end;

  __device__ __forceinline__ KeyInterval of_lane(i32 lane) const {
    return {ptx::shuffle(begin, lane), ptx::shuffle(end, lane)};
  }
  __device__ __forceinline__ KeyInterval from(i32 first) const { return {begin - first, end - first}; }
  __device__ __forceinline__ u32 word() const { return KeyPrefix{end}.word() & ~KeyPrefix{begin}.word(); }
};

template <Mask kMask>
struct SelectKeys {
  using Type = KeyPrefix;
};

template <>
struct SelectKeys<Mask::kSparse> {
  using Type = KeyInterval;
};

template <Mask kMask>
using VisibleKeys = typename SelectKeys<kMask>::Type;

// Query i is at the caller's key i + seqlen_kv - seqlen_q: the last query is at the last key. Causal, it sees no key
// behind that one. Sparse, it sees window_left keys in front of that one, that one, and window_right keys behind it;
// both are at most the sum of the most queries and the most keys, which stands for no bound. Full attention sees all
// packed keys. begin and end count packed keys, and never fall from one row to the next.
// kBranch: as Seqlen::packed() has it.
template <Mask kMask, bool kBranch = false, class Seqlen>
__device__ __forceinline__ VisibleKeys<kMask> visible_keys(const Seqlen& seqlen, i32 row) {
  if constexpr (kMask == Mask::kFull) return {seqlen.template kv<kBranch>()};
  const i32 diagonal = seqlen.kv_of_caller() - seqlen.q();
  if constexpr (kMask == Mask::kSparse) {
    const i32 keys = seqlen.kv_of_caller();
    const i32 at = row + diagonal;
    const i32 begin = at - seqlen.params.window_left, end = at + 1 + seqlen.params.window_right;
    return {seqlen.template packed<kBranch>(min(keys, max(0, begin))),
            seqlen.template packed<kBranch>(min(keys, max(0, end)))};
  } else {
    return {seqlen.template packed<kBranch>(min(seqlen.kv_of_caller(), max(0, row + 1 + diagonal)))};
  }
}

// The first query that sees the caller's key under a causal mask. Negative for a key that queries in front of the first
// would see.
template <class Seqlen>
__device__ __forceinline__ i32 first_causal_query(const Seqlen& seqlen, i32 key) {
  return key + seqlen.q() - seqlen.kv_of_caller();
}

}  // namespace sage
