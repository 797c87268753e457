// Online softmax over the KV tiles for integer scores that start at zero, as a wgmma leaves them.
//
// Scores are converted from s32 to f32. A bias preset in the accumulators, as in the mma family, would save the
// conversion but delay the product; the conversion is hidden under the exponentials, which leave issue slots free.
// References follow the maxima at every tile, since promotion multiplies O by alpha anyway. They fall as well as rise:
// e4m3 holds P above 2^-9 only, and a whole tile of keys below that can carry much of a long row's weight.
// Source: SageAttention2, Algorithm 1.
#pragma once

#include "sage/attn/row_references.cuh"
#include "sage/attn/linear_p.cuh"
#include "sage/problem/sparse_mask.cuh"

namespace sage {

// kRoom: a restarted reference makes the largest P of its tile 2^(kTop - kRoom), so that the second tile of the same R
// seldom raises the reference. A whole number, since e4m3 then holds 448 · 2^-kRoom exactly.
// kFinished: the scores are f32, masked or with all terms added; else integers.
template <class Config, class Product, i32 kRoom>
struct TileSoftmax : RowReferences<Product, Config::kWarpM / 8> {
  static constexpr i32 kRows = Config::kWarpM / 8;  // rows of a thread: g, g + 8, ... with g = lane / 4
  static constexpr i32 kNTiles = Config::kBlockN / 8;

  using Scores = i32[kRows / 2][kNTiles][4];

  // The largest scores of each row in this thread, not scaled.
  template <bool kFinished>
  __device__ __forceinline__ static void find_largest(const Scores& acc_s, float (&own_largest)[kRows]) {
#pragma unroll
    for (i32 r = 0; r < kRows; ++r) own_largest[r] = largest<kFinished>(acc_s[r / 2], r % 2);
  }

  // Moves the references to the largest scores of the tile: with kRestart up or down, else up only. `alpha`: the factor
  // for all that was summed so far.
  template <bool kRestart>
  __device__ __forceinline__ void move_references(const float (&own_largest)[kRows], float scale,
                                                  float (&alpha)[kRows]) {
#pragma unroll
    for (i32 r = 0; r < kRows; ++r) {
      constexpr float kTop = kRestart ? Product::kTop - kRoom : Product::kTop;
      const float own_needed = reference_of(own_largest[r], scale, kTop);
      if constexpr (kRestart) alpha[r] = this->restart_reference(own_needed, r);
      else alpha[r] = this->raise_reference(own_needed, r);
    }
  }

  // P = 2^(score - row_ref), as f32 in the place of the scores.
  template <bool kFinished>
  __device__ __forceinline__ void exponentiate(Scores& acc_s, float scale) const {
#pragma unroll
    for (i32 m = 0; m < kRows / 2; ++m) {
#pragma unroll
      for (i32 j = 0; j < kNTiles; ++j) {
#pragma unroll
        for (i32 c = 0; c < 4; ++c) {
          const float x = fmaf(as_float<kFinished>(acc_s[m][j][c]), scale, -this->row_ref[2 * m + c / 2]);
          acc_s[m][j][c] = __float_as_int(ptx::ex2(x));
        }
      }
    }
  }

  // sum = alpha · sum + P.
  __device__ __forceinline__ static void add(const Scores& acc_s, const float (&alpha)[kRows], float (&sum)[kRows]) {
#pragma unroll
    for (i32 r = 0; r < kRows; ++r) {
      sum[r] *= alpha[r];
#pragma unroll
      for (i32 j = 0; j < kNTiles; ++j) {
        sum[r] += __int_as_float(acc_s[r / 2][j][2 * (r % 2)]);
        sum[r] += __int_as_float(acc_s[r / 2][j][2 * (r % 2) + 1]);
      }
    }
  }

  // A linear P as the A operand of the second product. Line: of linear_p.cuh.
  template <class Line>
  __device__ __forceinline__ static void pack_line(const Scores& acc_s, const Line& line,
                                                   typename Product::Operand& p) {
#pragma unroll
    for (i32 j = 0; j < kNTiles; j += 2) {
#pragma unroll
      for (i32 r = 0; r < kRows; ++r) {
        const auto score = [&](i32 e) { return acc_s[r / 2][j + e / 2][2 * (r % 2) + e % 2]; };
        Product::word(p, r, j) = line.bytes(r, score);
      }
    }
  }

  // Zeroes a linear P where a row does not see the key. seen: FragmentBits of each row.
  template <class Rows>
  __device__ __forceinline__ static void hide(typename Product::Operand& p, const Rows& seen) {
    static_assert(FragmentBits<Config::kBlockN>::kField == 8, "a bit for each byte of an operand's word");
#pragma unroll
    for (i32 r = 0; r < kRows; ++r) {
#pragma unroll
      for (i32 j = 0; j < kNTiles; j += 2) {
        constexpr u32 kSignsOfBytes = 0xba98;  // of each byte its sign, eight times
        Product::word(p, r, j) &= ptx::prmt(seen[r] << j / 2, 0, kSignsOfBytes);
      }
    }
  }

  // P as the A operand of the second product.
  __device__ __forceinline__ static void pack(const Scores& acc_s, typename Product::Operand& p) {
#pragma unroll
    for (i32 r = 0; r < kRows; ++r) {
#pragma unroll
      for (i32 j = 0; j < kNTiles; j += 2) {
        float x[4];
#pragma unroll
        for (i32 e = 0; e < 4; ++e) x[e] = __int_as_float(acc_s[r / 2][j + e / 2][2 * (r % 2) + e % 2]);
        Product::pack(p, r, j, x);
      }
    }
  }

 private:
  template <bool kFinished>
  __device__ __forceinline__ static float as_float(i32 score) {
    if constexpr (kFinished) return __int_as_float(score);
    else return static_cast<float>(score);
  }

  // The largest of one row's scores in this thread.
  template <bool kFinished>
  __device__ __forceinline__ static float largest(const i32 (&acc_s)[kNTiles][4], i32 half) {
    i32 x = larger<kFinished>(acc_s[0][2 * half], acc_s[0][2 * half + 1]);
#pragma unroll
    for (i32 j = 1; j < kNTiles; ++j) {
      x = larger<kFinished>(larger<kFinished>(x, acc_s[j][2 * half]), acc_s[j][2 * half + 1]);
    }
    return as_float<kFinished>(x);
  }

  template <bool kFinished>
  __device__ __forceinline__ static i32 larger(i32 a, i32 b) {
    if constexpr (kFinished) return __float_as_int(fmaxf(__int_as_float(a), __int_as_float(b)));
    else return max(a, b);
  }
};

}  // namespace sage
