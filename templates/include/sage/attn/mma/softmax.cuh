// Online softmax over the KV tiles for scores that arrive as biased integers (attn/mma/scores.cuh).
//
// The scores of a row in a thread share one scale c. The largest score is found on integers; bias, scale and reference
// fold into one FMA, P = 2^(c·x + offset), with offset = -c·kScoreBias - row_ref. For f16 P the offset is exact where
// c < 1: c keeps 22 bits, so that c·kScoreBias = 3·2^22·c fits into the 24 bits of an f32, in units no coarser than
// one, and row_ref is a whole number. Any whole number near the maximum will do. For e4m3 P the reference must make the
// largest P 448, which e4m3 holds exactly, since the largest P dominates many rows. The offset then rounds, by at most
// 2^-7 in log2 where c < 2^-6; P itself is rounded by up to 2^-3.5. Where Q is smoothed the scores arrive finished, as
// f32.
//
// A reference stands until a score outgrows it, and for e4m3 P until all scores of a tile lie far below it. P below
// 2^-9 is zero in e4m3, and in a long row the keys of such a P can carry much of the weight. To detect both, each
// thread compares its own scores and the warp votes. The row maximum over lanes is computed only in the branch that
// moves references. Scales too large to fold take that branch as well, which subtracts the bias: for f16 P the scales
// of logits in the tens of thousands at 8 bits, of about a hundred at 4. For e4m3 P nearly all scales of 4 bits are too
// large, so nothing folds there.
//
// A linear P (attn/linear_p.cuh) has its byte from the same FMA, with eight bytes an octave. References leave room
// above P, so that they move in few tiles. The branch that moves them joins in front of P, which is computed in one
// place. It replaces scores by their bytes where the bias still does not fold.
// Source: SageAttention2, Algorithm 1.
#pragma once

#include "sage/attn/linear_p.cuh"
#include "sage/attn/row_references.cuh"
#include "sage/numerics/integers.cuh"
#include "sage/tile/layout.cuh"

namespace sage {

// Added to every integer score: 1.5 * 2^23, whose bits read as an integer are 0x4b400000. An f32 of this size has units
// of one, so the bits of `score + bias` as an integer and as a float are the same word for |score| < 2^22.
constexpr float kScoreBias = kIntegerBias;
constexpr i32 kScoreBiasBits = 0x4b400000;

// In log2 units, by how much a linear P may outgrow the largest of the tile that set its reference. References then
// move in few tiles. P below e4m3's range is zero, so that the range ends as much earlier at its lower end.
constexpr float kLineRoom = 1.0f;

// The scale of a row's scores in a thread: the product of two, cut to 22 bits of mantissa.
template <Qk kQk>
__device__ __forceinline__ float score_scale(float q_scale, float k_scale) {
  const float scale = fminf(fmaxf(q_scale * k_scale, kSmallestScale<kQk>), kLargestScoreScale<kQk>);
  return __int_as_float(__float_as_int(scale) & ~3);
}

// One value per scale of Q that a thread meets: one for all of its rows at 8 bits, one per row at 4, NVFP4 included.
template <class Config>
struct RowScales {
  static constexpr i32 kCount = kRowGroups<Config> / 8;

  float of[kCount];

  __device__ __forceinline__ float operator[](i32 row) const { return of[row % kCount]; }
  // Scales of the thread's scores in a KV tile, from scales of Q.
  __device__ __forceinline__ RowScales score_scales(float k_scale) const {
    RowScales scales;
#pragma unroll
    for (i32 r = 0; r < kCount; ++r) scales.of[r] = score_scale<Config::kQk>(of[r], k_scale);
    return scales;
  }
  __device__ __forceinline__ static RowScales ones() {
    RowScales scales;
#pragma unroll
    for (float& scale : scales.of) scale = 1.0f;
    return scales;
  }
};

template <class Config, class Product>
struct OnlineSoftmax : RowReferences<Product, Config::kWarpM / 8> {
  static constexpr i32 kRows = Config::kWarpM / 8;  // rows of a thread: g, g + 8, ... with g = lane / 4
  static constexpr i32 kMTiles = Config::kWarpM / 16, kNTiles = Config::kBlockN / 8;
  static constexpr float kBias = Config::kSmoothQ ? 0.0f : kScoreBias;  // of the scores as they arrive

  // Whether P's FMA subtracts the bias where the scale allows. Else the bias is subtracted from every score, or is
  // zero.
  static constexpr bool kFolds = !Config::kSmoothQ && (Config::kQk == Qk::kInt8 || Product::kLargestFolded >= 1.0f);

  using Scores = i32[kMTiles][kNTiles][4];
  using Scales = RowScales<Config>;

  // Sums of P for the log-sum-exp. Where Product::kSumsInThreads, they are of P before rounding, and of this thread's
  // columns until finish(); else finish() takes row_sum. Where not Product::kSumsRounded, finish() makes row_sum of
  // them.
  float lse_sum[kRows];

  __device__ __forceinline__ void clear() {
    RowReferences<Product, kRows>::clear();
#pragma unroll
    for (float& sum : lse_sum) sum = 0.0f;
  }

  // P's FMA, score · factor + offset, makes the exponent of P; of a linear P it makes the byte.
  template <P kOwnP>
  __device__ __forceinline__ static float factor_of(float scale) {
    return kOwnP == P::kLinear ? kBytesPerOctave * scale : scale;
  }
  template <P kOwnP>
  __device__ __forceinline__ static float offset_of(float row_ref) {
    if constexpr (kOwnP == P::kLinear) return fmaf(row_ref, -kBytesPerOctave, kByteOfOne);
    else return -row_ref;
  }
  // The FMA's value for a P of 2^log2_p.
  template <P kOwnP>
  static constexpr float value_of(float log2_p) {
    return kOwnP == P::kLinear ? kBytesPerOctave * log2_p + kByteOfOne : log2_p;
  }

  // kTop: log2 of a row's largest P when its reference is set. The FMA's values for a thread's largest score: kMost,
  // the most that P's type holds; below kFar and above kFarthest it lies far below the reference.
  template <P kOwnP>
  static constexpr float kTop = Product::kTop - (kOwnP == P::kLinear ? kLineRoom : 0.0f);
  template <P kOwnP>
  static constexpr float kMost = kOwnP == P::kLinear ? value_of<kOwnP>(Product::kTop) + 0.375f  // below half a byte
                                                     : kTop<kOwnP> + Product::kLazyRise;
  template <P kOwnP>
  static constexpr float kFar = value_of<kOwnP>(kTop<kOwnP> - Product::kLazyFall);
  template <P kOwnP>
  static constexpr float kFarthest = value_of<kOwnP>(kTop<kOwnP> - kMostFall);

  // Computes the offsets of P's FMA. Returns whether they serve every thread of the warp: P stays within its type's
  // range and, unless they were just moved, not far below it, and the bias folds.
  template <P kOwnP, bool kMoved = false>
  __device__ __forceinline__ bool fits(const Scores& acc_s, const Scales& scale, float (&offset)[kRows]) const {
    float top = -ptx::infinity();
    bool far_below = false;
#pragma unroll
    for (i32 r = 0; r < kRows; ++r) {
      const float factor = factor_of<kOwnP>(scale[r]);
      offset[r] = fmaf(-factor, kFolds ? kBias : 0.0f, offset_of<kOwnP>(this->row_ref[r]));
      const float x = fmaf(largest(acc_s[r / 2], r % 2) - (kFolds ? 0.0f : kBias), factor, offset[r]);
      top = fmaxf(top, x);
      if constexpr (Product::kMayFall && !kMoved) far_below |= x < kFar<kOwnP> && x > kFarthest<kOwnP>;
    }
    return !ptx::any(!(foldable(scale) && top <= kMost<kOwnP>) || far_below);
  }

  // Moves references where fits() is false. `alpha`: the factor for all that was summed so far.
  template <P kOwnP>
  __device__ __forceinline__ void move_references(const Scores& acc_s, const Scales& scale, float (&offset)[kRows],
                                                  float (&alpha)[kRows]) {
#pragma unroll
    for (i32 r = 0; r < kRows; ++r) {
      const float own_needed = reference_of(largest(acc_s[r / 2], r % 2) - kBias, scale[r], kTop<kOwnP>);
      // Lanes exchange their sums whatever their rows do.
      const float sum = Product::kSumsRounded ? this->row_sum[r] : ptx::max_over_lanes<4>(lse_sum[r]);
      if constexpr (Product::kMayFall) alpha[r] = this->follow_tile(own_needed, sum, r);
      else alpha[r] = this->raise_reference(own_needed, r);
      this->row_sum[r] *= alpha[r];
      lse_sum[r] *= alpha[r];
      offset[r] = -this->row_ref[r];
    }
  }

  // Where fits() is false even behind move_references(), since the bias does not fold or the units of references
  // outgrow bytes: replaces scores by the bytes of a linear P, and scales and offsets by those that leave a byte as it
  // is.
  __device__ __forceinline__ void finish_line(Scores& acc_s, Scales& scale, float (&offset)[kRows]) const {
    constexpr float kUnfolded = kFolds ? 0.0f : kBias;
#pragma unroll
    for (i32 r = 0; r < kRows; ++r) {
      const float factor = factor_of<P::kLinear>(scale[r]), own_offset = offset_of<P::kLinear>(this->row_ref[r]);
#pragma unroll
      for (i32 j = 0; j < kNTiles; ++j) {
#pragma unroll
        for (i32 c = 0; c < 2; ++c) {
          i32& score = acc_s[r / 2][j][2 * (r % 2) + c];
          // NaN, of a masked score in a row without a reference, stays: it becomes zero.
          const float byte = ptx::min_nan(fmaf(__int_as_float(score) - kBias, factor, own_offset), kMost<P::kLinear>);
          score = __float_as_int(byte + kUnfolded);
        }
      }
      offset[r] = 0.0f;
    }
#pragma unroll
    for (float& of_row : scale.of) of_row = 1.0f / kBytesPerOctave;
  }

  // P = 2^(score - row_ref), packed as the A operand of the second product. kAsFits: the offsets are those of fits();
  // else those of move_references(), into which no bias is folded.
  template <bool kAsFits>
  __device__ __forceinline__ void exponentiate(const Scores& acc_s, const Scales& scale, const float (&offset)[kRows],
                                               typename Product::Operand& p) {
    if constexpr (Product::kScalesGroups) Product::exponentiate(p, lse_sum, acc_s, scale, offset);
    else exponentiate_one_by_one<kAsFits && kFolds>(acc_s, scale, offset, p);
  }

  // A linear P as the A operand of the second product.
  __device__ __forceinline__ static void pack_line(const Scores& acc_s, const Scales& scale,
                                                   const float (&offset)[kRows], typename Product::Operand& p) {
    constexpr float kUnfolded = kFolds ? 0.0f : kBias;
#pragma unroll
    for (i32 r = 0; r < kRows; ++r) {
      const float factor = factor_of<P::kLinear>(scale[r]);
#pragma unroll
      for (i32 j = 0; j < kNTiles; j += 2) {
        float x[4];
#pragma unroll
        for (i32 e = 0; e < 4; ++e) {
          const float score = __int_as_float(acc_s[r / 2][j + e / 2][2 * (r % 2) + e % 2]) - kUnfolded;
          x[e] = fmaf(score, factor, offset[r]);
        }
        Product::word(p, r, j) = ptx::u8x4(x[0], x[1], x[2], x[3]);
      }
    }
  }

  // Sums of whole rows; every lane of a row gets them.
  __device__ __forceinline__ void finish() {
#pragma unroll
    for (i32 r = 0; r < kRows; ++r) {
      lse_sum[r] = Product::kSumsInThreads ? ptx::sum_over_lanes<4>(lse_sum[r]) : this->row_sum[r];
      if constexpr (!Product::kSumsRounded) this->row_sum[r] = lse_sum[r];
    }
  }

  // For P whose exact sums nobody took: store_output() then takes those of the rounded P.
  __device__ __forceinline__ void drop_lse_sums() {
#pragma unroll
    for (float& sum : lse_sum) sum = ptx::infinity();
  }

 private:
  template <bool kFolded>
  __device__ __forceinline__ void exponentiate_one_by_one(const Scores& acc_s, const Scales& scale,
                                                          const float (&offset)[kRows], typename Product::Operand& p) {
    constexpr float kUnfolded = kFolded ? 0.0f : kBias;
#pragma unroll
    for (i32 r = 0; r < kRows; ++r) {
#pragma unroll
      for (i32 j = 0; j < kNTiles; j += 2) {
        float x[4];
#pragma unroll
        for (i32 e = 0; e < 4; ++e) {
          const float score = __int_as_float(acc_s[r / 2][j + e / 2][2 * (r % 2) + e % 2]) - kUnfolded;
          x[e] = ptx::ex2(fmaf(score, scale[r], offset[r]));
          if constexpr (Product::kSumsInThreads) lse_sum[r] += x[e];
        }
        Product::pack(p, r, j, x);
      }
    }
  }

  __device__ __forceinline__ static bool foldable(const Scales& scale) {
    bool all = true;
#pragma unroll
    for (float of_row : scale.of) all &= !kFolds || of_row < Product::kLargestFolded;
    return all;
  }

  // The largest of one row's scores in this thread, still biased.
  __device__ __forceinline__ static float largest(const i32 (&acc_s)[kNTiles][4], i32 half) {
    i32 x = larger(acc_s[0][2 * half], acc_s[0][2 * half + 1]);
#pragma unroll
    for (i32 j = 1; j < kNTiles; ++j) x = larger(larger(x, acc_s[j][2 * half]), acc_s[j][2 * half + 1]);
    return __int_as_float(x);
  }

  // Biased integers are positive but for masked ones: their bits compare like the floats they are.
  __device__ __forceinline__ static i32 larger(i32 a, i32 b) {
    if constexpr (Config::kSmoothQ) return __float_as_int(fmaxf(__int_as_float(a), __int_as_float(b)));
    else return max(a, b);
  }
};

}  // namespace sage
