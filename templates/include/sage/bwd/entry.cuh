// The batch entries of a backward pass: their lengths, and where their rows and tiles lie. kPacked: an entry may be a
// sequence of one tensor, or have a key mask, and then packed keys in K̂. Entry points of their own take these, so that
// those of equal batch entries look nothing up.
#pragma once

#include "sage/bwd/params.cuh"
#include "sage/bwd/tile.cuh"
#include "sage/problem/mask.cuh"

namespace sage {

// Rows of a batch entry in the caller's tensor.
struct CallerRows {
  i32 begin, count;
  const i32* index;  // the caller's rows by the packed ones; null: the same rows

  __device__ __forceinline__ i32 at(i32 row) const { return index == nullptr ? begin + row : index[row]; }
};

// Lengths that all batch entries have, as visible_keys() asks for them.
struct EqualLengths {
  const BwdParams& params;

  __device__ __forceinline__ i32 q() const { return params.seqlen_q; }
  __device__ __forceinline__ i32 kv_of_caller() const { return params.seqlen_kv; }
  template <bool kBranch = false>
  __device__ __forceinline__ i32 kv() const {
    return params.seqlen_kv;
  }
  template <bool kBranch = false>
  __device__ __forceinline__ i32 packed(i32 keys) const {
    return keys;
  }
};

// A batch entry like all others: nothing has to be looked up.
class EqualEntry {
 public:
  __device__ __forceinline__ EqualEntry(const BwdParams& params, i32 /*batch*/, const i32* /*cu_seqlens*/,
                                        i32 /*block_rows*/, i32 /*slot*/)
      : params_(params) {}

  __device__ __forceinline__ EqualLengths lengths() const { return {params_}; }
  __device__ __forceinline__ CallerRows queries() const { return {0, params_.seqlen_q, nullptr}; }
  __device__ __forceinline__ CallerRows keys() const { return {0, params_.seqlen_kv, nullptr}; }
  __device__ __forceinline__ i32 caller_key(i32 key) const { return key; }
  __device__ __forceinline__ i32 block_in_it(const i32* /*cu_seqlens*/, i32 /*block_rows*/, i32 slot) const {
    return slot;
  }
  __device__ __forceinline__ i32 first_q_tile() const { return 0; }
  __device__ __forceinline__ i32 first_kv_tile() const { return 0; }

 private:
  const BwdParams& params_;
};

// A sequence of one tensor, or a batch entry whose keys are packed.
class PackedEntry {
 public:
  // slot: of a block of so many rows in the runs of cu_seqlens (problem/sequences.cuh). batch: where there are no
  // sequences.
  __device__ __forceinline__ PackedEntry(const BwdParams& params, i32 batch, const i32* cu_seqlens, i32 block_rows,
                                         i32 slot)
      : params_(params),
        batch_(cu_seqlens == nullptr ? batch : sequence_of_slot(cu_seqlens, params.batch, block_rows, slot)),
        lengths_(seqlen_of(params, batch_).lengths()) {}

  __device__ __forceinline__ Seqlen<BwdParams, true> lengths() const { return {params_, batch_, &lengths_}; }
  __device__ __forceinline__ CallerRows queries() const { return {lengths().q_begin(), lengths_.q, nullptr}; }
  __device__ __forceinline__ CallerRows keys() const {
    return {lengths().kv_begin(), lengths().kv(), key_index_of(params_, batch_)};
  }

  // The key of the caller's batch entry that is this packed one; of a key behind the last the last.
  __device__ __forceinline__ i32 caller_key(i32 key) const {
    const CallerRows rows = keys();
    return rows.index == nullptr ? key : rows.index[min(key, rows.count - 1)];
  }

  // The index of a slot's block among those of the entry.
  __device__ __forceinline__ i32 block_in_it(const i32* cu_seqlens, i32 block_rows, i32 slot) const {
    return slot - slots_before(cu_seqlens, block_rows);
  }
  // The entry's first tile of kTileRows queries, or keys, in the run of a head.
  __device__ __forceinline__ i32 first_q_tile() const {
    return slots_before(params_.cu_seqlens_q, params_.block_m) * (params_.block_m / kTileRows);
  }
  __device__ __forceinline__ i32 first_kv_tile() const {
    return slots_before(params_.cu_seqlens_k, kTileRows << params_.log2_parts_of_kv_tile)
           << params_.log2_parts_of_kv_tile;
  }

 private:
  __device__ __forceinline__ i32 slots_before(const i32* cu_seqlens, i32 block_rows) const {
    return cu_seqlens == nullptr ? 0 : first_slot(cu_seqlens, batch_, block_rows);
  }

  const BwdParams& params_;
  i32 batch_;
  Lengths lengths_;
};

template <bool kPacked>
struct SelectEntry {
  using Type = EqualEntry;
};

template <>
struct SelectEntry<true> {
  using Type = PackedEntry;
};

template <bool kPacked>
using BwdEntry = typename SelectEntry<kPacked>::Type;

// Whether queries see the keys before a diagonal alone. Where it lies, the functions below answer.
__device__ __forceinline__ bool has_diagonal(const BwdParams& params) { return params.is_causal; }

// The end of the keys that a query sees, of the packed ones.
template <class Entry>
__device__ __forceinline__ i32 visible_end(const BwdParams& params, const Entry& entry, i32 query) {
  const auto lengths = entry.lengths();
  return has_diagonal(params) ? visible_keys<Mask::kCausal>(lengths, query).end
                              : visible_keys<Mask::kFull>(lengths, query).end;
}

// The first query that sees a packed key under a causal mask.
template <class Entry>
__device__ __forceinline__ i32 first_seeing(const Entry& entry, i32 key) {
  return first_causal_query(entry.lengths(), entry.caller_key(key));
}

}  // namespace sage
