// Which KV tiles a query tile sees, which of them need no mask, and how blocks share them.
#pragma once

#include "sage/fast_divmod.cuh"
#include "sage/problem/mask.cuh"

namespace sage {

struct KvRange {
  i32 begin, end;            // KV tiles that any row sees
  i32 full_begin, full_end;  // of these the KV tiles that every row sees whole; none where full_begin >= full_end

  // Main loops go over the KV tiles of a split by places: those that every row sees whole come first, then those behind
  // these, then those in front (rotated()). whole(): how many every row sees whole.
  template <Mask kMask>
  __device__ __forceinline__ i32 whole() const {
    return kMask == Mask::kSparse ? max(full_end - max(full_begin, 0), 0) : full_end;
  }
  __device__ __forceinline__ i32 rotated(i32 place) const {
    const i32 tile = place + max(full_begin, 0);
    return tile < end ? tile : tile - end;
  }

  // The first KV tile of a split. The last splits may have no KV tiles.
  __device__ __forceinline__ i32 begin_of_split(i32 split, const FastDivmod& splits) const {
    return min(begin + split * tiles_of_split(splits), end);
  }

  // The KV tiles of the split that begins with the KV tile `first`, counted from there on.
  __device__ __forceinline__ KvRange of_split(i32 first, const FastDivmod& splits) const {
    const i32 tiles = min(tiles_of_split(splits), end - first);
    const i32 masked =
        full_begin <= begin ? 0 : min(full_begin - first, tiles);  // 0 at compile time where every row sees key 0
    return {0, tiles, masked, min(full_end - first, tiles)};
  }

 private:
  __device__ __forceinline__ i32 tiles_of_split(const FastDivmod& splits) const {
    return (end - begin + splits.divisor - 1) / splits;
  }
};

// Config: kMask, kBlockM, kBlockN. Of kRows rows from first_row on; undefined where none of them exists.
template <class Config, i32 kRows = Config::kBlockM, class Seqlen>
__device__ __forceinline__ KvRange kv_range(const Seqlen& seqlen, i32 first_row) {
  const i32 last_row = min(first_row + kRows, seqlen.q()) - 1;
  const auto first = visible_keys<Config::kMask>(seqlen, first_row);
  const auto last = visible_keys<Config::kMask>(seqlen, last_row);
  return {first.begin / Config::kBlockN, ceil_div(last.end, Config::kBlockN), ceil_div(last.begin, Config::kBlockN),
          first.end / Config::kBlockN};
}

// Whether any of these query rows sees any of the keys from first_key to end_key - 1, by the window of the params.
template <class Seqlen>
__device__ __forceinline__ bool rows_see(const Seqlen& seqlen, i32 first_row, i32 last_row, i32 first_key,
                                         i32 end_key) {
  return visible_keys<Mask::kSparse>(seqlen, first_row).begin < end_key &&
         first_key < visible_keys<Mask::kSparse>(seqlen, last_row).end;
}

}  // namespace sage
