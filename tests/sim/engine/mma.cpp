// mma.sync: reads the operands from the fragments of 32 lanes, multiplies, and writes the result to the fragments.
// Fragments of m16n8 with words of w elements (4 of 8 bits, 8 of 4, 2 of 16), lane = 4g + t:
//   A  word i: row g + 8 (i % 2), elements w t .. w t + w - 1 of k, in the second half of them where i >= 2
//   B  word i: column g, likewise, in the second half where i = 1
//   C, D  element i: row g + 8 (i / 2), column 2t + i % 2
// Scales of block-scaled products: the words of some lanes. ue8m0 has one scale a word, in the lowest byte; ue4m3 has
// four, for 16 elements of k each.
//   A  row g: lane 4g; row g + 8: lane 4g + 1
//   B  column g: lane 4g + the lane that the selector names
// Source: PTX ISA, "Matrix Fragments for mma.m16n8k16", "... k32", "... k64", "Block Scaling for mma.sync".

#include <bit>
#include <iterator>
#include <vector>

#include "sim/engine.h"
#include "sums.h"

namespace sim {

namespace {

constexpr int kRows = 16, kColumns = 8;

// Of a ScaledProduct too, whose first member it is.
const Product& of_lane(void* const (&lanes)[kLanes], int lane) { return *static_cast<const Product*>(lanes[lane]); }

// A and B by rows and columns, as codes of kBits.
template <int kBits>
struct Operands {
  static constexpr int kPerWord = 32 / kBits, kDepth = 8 * kPerWord;
  u32 a[kRows][kDepth], b[kColumns][kDepth];

  explicit Operands(void* const (&lanes)[kLanes]) {
    for (int lane = 0; lane < kLanes; ++lane) {
      const int g = lane / 4, t = lane % 4;
      for (int i = 0; i < 4; ++i) {
        unpack(of_lane(lanes, lane).a[i], &a[g + 8 * (i % 2)][kPerWord * t + kDepth / 2 * (i / 2)]);
      }
      for (int i = 0; i < 2; ++i) unpack(of_lane(lanes, lane).b[i], &b[g][kPerWord * t + kDepth / 2 * i]);
    }
  }

  static void unpack(u32 word, u32* codes) {
    for (int e = 0; e < kPerWord; ++e) codes[e] = word >> kBits * e & ((1ull << kBits) - 1);
  }
};

// Calls visit(lane, i, row, column) for every element i of C and D of every lane.
template <class Visit>
void each_result(Visit visit) {
  for (int lane = 0; lane < kLanes; ++lane) {
    for (int i = 0; i < 4; ++i) visit(lane, i, lane / 4 + 8 * (i / 2), lane % 4 * 2 + i % 2);
  }
}

// Sums wrap, as without .satfinite. kUnsigned: A.
template <int kBits, bool kUnsigned = false>
void integer_product(void* const (&lanes)[kLanes]) {
  const Operands<kBits> operands(lanes);
  const auto extended = [](u32 code) { return static_cast<i32>(code << (32 - kBits)) >> (32 - kBits); };
  const auto of_a = [&](u32 code) { return kUnsigned ? static_cast<i32>(code) : extended(code); };
  each_result([&](int lane, int i, int row, int column) {
    u32 sum = of_lane(lanes, lane).c[i];
    for (int k = 0; k < operands.kDepth; ++k) {
      sum += static_cast<u32>(of_a(operands.a[row][k]) * extended(operands.b[column][k]));
    }
    of_lane(lanes, lane).d[i] = sum;
  });
}

// --- floating point --------------------------------------------------------------------------------------------------

u32 load_c(const Product& lane, int i, F32) { return lane.c[i]; }
u32 load_c(const Product& lane, int i, F16) { return lane.c[i / 2] >> 16 * (i % 2) & 0xffff; }
void store_d(const Product& lane, int i, u32 value, F32) { lane.d[i] = value; }
void store_d(const Product& lane, int i, u32 value, F16) {
  const int shift = 16 * (i % 2);
  lane.d[i / 2] = (lane.d[i / 2] & ~(0xffffu << shift)) | value << shift;
}

// d = sum(row of A, column of B, c), for every element of D.
template <class Format, class Accumulator, int kDepth, class Sum>
void float_product(void* const (&lanes)[kLanes], const u32 (&a)[kRows][kDepth], const u32 (&b)[kColumns][kDepth],
                   Sum sum) {
  const std::vector<Vector<Format, kDepth>> rows(std::begin(a), std::end(a)), columns(std::begin(b), std::end(b));
  each_result([&](int lane, int i, int row, int column) {
    const u32 c = load_c(of_lane(lanes, lane), i, Accumulator{});
    store_d(of_lane(lanes, lane), i, sum(rows[row], columns[column], c), Accumulator{});
  });
}

// f16 and bf16, which chips add alike.
template <class Format>
void half_product(void* const (&lanes)[kLanes]) {
  const Operands<16> operands(lanes);
  float_product<Format, F32>(lanes, operands.a, operands.b, [](const auto& row, const auto& column, u32 c) {
    return add_product<F32>(chip().f16, row, column, c);
  });
}

// --- e4m3 where only f16 products exist ------------------------------------------------------------------------------

constexpr int kE4m3Depth = 32;

// Exact: f16 holds every e4m3.
u32 f16_of_e4m3(u32 code) {
  if (E4m3::special(code)) return F16::kNan;
  const u32 sign = code & E4m3::kSign ? F16::kSign : 0;
  return F16::bits(std::fabs(E4m3::value(code))) | sign;
}

// Codes of e4m3 as f16. The elements of the words' lower halves come before those of the upper halves.
void unpack_halves(const u32 (&codes)[kE4m3Depth], u32 (&halves)[kE4m3Depth]) {
  for (int k = 0; k < kE4m3Depth; ++k) halves[k / 2 % 2 * (kE4m3Depth / 2) + k / 4 * 2 + k % 2] = f16_of_e4m3(codes[k]);
}

u32 added(u32 x, u32 y, F32) {
  const float sum = std::bit_cast<float>(x) + std::bit_cast<float>(y);
  return sum == sum ? std::bit_cast<u32>(sum) : F32::kNan;
}
u32 added(u32 x, u32 y, F16) { return F16::from(F16::value(x) + F16::value(y)); }

// What the compiler makes of the instruction: two f16 products from zero, to which C is added.
// Source: the machine code of NVRTC 12.9 for sm_90 (F2FP, HMMA, HMMA, FADD or HADD2).
template <class Accumulator>
void product_as_f16(void* const (&lanes)[kLanes], const Operands<8>& operands) {
  u32 a[kRows][kE4m3Depth], b[kColumns][kE4m3Depth];
  for (int row = 0; row < kRows; ++row) unpack_halves(operands.a[row], a[row]);
  for (int column = 0; column < kColumns; ++column) unpack_halves(operands.b[column], b[column]);
  float_product<F16, Accumulator>(lanes, a, b, [](const auto& row, const auto& column, u32 c) {
    return added(add_product<Accumulator>(chip().f16, row, column, 0), c, Accumulator{});
  });
}

template <class Accumulator>
void e4m3_product(void* const (&lanes)[kLanes]) {
  const Operands<8> operands(lanes);
  if (chip().e4m3_as_f16) return product_as_f16<Accumulator>(lanes, operands);
  float_product<E4m3, Accumulator>(lanes, operands.a, operands.b, [](const auto& row, const auto& column, u32 c) {
    return add_product<Accumulator>(chip().e4m3, row, column, c);
  });
}

// --- block-scaled ----------------------------------------------------------------------------------------------------

u32 byte_of(u32 word, int i) { return word >> 8 * i & 0xff; }

// The words with the scales of rows and columns.
struct Scales {
  u32 a[kRows], b[kColumns];

  explicit Scales(void* const (&lanes)[kLanes]) {
    const auto of = [&](int lane) -> const ScaledProduct& { return *static_cast<ScaledProduct*>(lanes[lane]); };
    for (int row = 0; row < kRows; ++row) a[row] = of(row % 8 * 4 + row / 8).a_scale;
    for (int column = 0; column < kColumns; ++column) b[column] = of(column * 4 + of(0).b_lane).b_scale;
  }
};

void mxf8_product(void* const (&lanes)[kLanes]) {
  const Operands<8> operands(lanes);
  const Scales scales(lanes);
  std::vector<Vector<E4m3, kE4m3Depth>> rows(std::begin(operands.a), std::end(operands.a));
  std::vector<Vector<E4m3, kE4m3Depth>> columns(std::begin(operands.b), std::end(operands.b));
  for (int row = 0; row < kRows; ++row) rows[row].scale(byte_of(scales.a[row], 0));
  for (int column = 0; column < kColumns; ++column) columns[column].scale(byte_of(scales.b[column], 0));
  each_result([&](int lane, int i, int row, int column) {
    const Product& of = of_lane(lanes, lane);
    of.d[i] = add_product<F32>(chip().e4m3, rows[row], columns[column], of.c[i]);
  });
}

constexpr int kGroups = 4, kGroupSize = 16;  // of e2m1 that share a scale
constexpr u32 kE4m3Sign = E4m3::kSign;       // which a ue4m3 ignores

// The dot product of two groups, in units of 2^(exponent of both scales - kUnitBits).
struct GroupProduct {
  static constexpr int kUnitBits = 2 * E2m1::kMantissaBits + 2 * E4m3::kMantissaBits;
  i64 value;
  int exponent;

  GroupProduct(const u32* a, const u32* b, u32 a_scale, u32 b_scale)
      : value(dot(a, b) * E4m3::significand(a_scale) * E4m3::significand(b_scale)),
        exponent(value ? E4m3::exponent(a_scale) + E4m3::exponent(b_scale) : kOfZero) {}

  // Of numbers in units of half.
  static i64 dot(const u32* a, const u32* b) {
    i64 sum = 0;
    for (int k = 0; k < kGroupSize; ++k) sum += halves(a[k]) * halves(b[k]);
    return sum;
  }
  static i64 halves(u32 code) { return E2m1::significand(code) * (1 << E2m1::exponent(code)); }
};

u32 nvfp4_sum(const u32 (&a)[64], const u32 (&b)[64], u32 a_scales, u32 b_scales, u32 c) {
  std::vector<GroupProduct> groups;
  int largest = F32::significand(c) ? F32::exponent(c) : kOfZero;
  for (int group = 0; group < kGroups; ++group) {
    const u32 a_scale = byte_of(a_scales, group) & ~kE4m3Sign, b_scale = byte_of(b_scales, group) & ~kE4m3Sign;
    if (E4m3::special(a_scale) || E4m3::special(b_scale)) return F32::kNan;
    groups.emplace_back(&a[kGroupSize * group], &b[kGroupSize * group], a_scale, b_scale);
    largest = std::max(largest, groups.back().exponent);
  }
  if (F32::special(c)) return F32::from(F32::value(c));
  if (largest <= kOfZero / 2) return 0;
  const Step& step = chip().nvfp4;
  i64 sum = shifted(F32::significand(c), F32::exponent(c) - largest + step.fraction_bits - F32::kMantissaBits);
  for (const GroupProduct& group : groups) {
    sum += shifted(group.value, group.exponent - largest + step.fraction_bits - GroupProduct::kUnitBits);
  }
  return cut_to_f32(static_cast<double>(sum) * power_of_two(largest - step.fraction_bits), step.kept_bits);
}

void nvfp4_product(void* const (&lanes)[kLanes]) {
  const Operands<4> operands(lanes);
  const Scales scales(lanes);
  each_result([&](int lane, int i, int row, int column) {
    const Product& of = of_lane(lanes, lane);
    of.d[i] = nvfp4_sum(operands.a[row], operands.b[column], scales.a[row], scales.b[column], of.c[i]);
  });
}

}  // namespace

void mma_s8(void* const (&lanes)[kLanes]) { integer_product<8>(lanes); }
void mma_u8s8(void* const (&lanes)[kLanes]) { integer_product<8, true>(lanes); }
void mma_s4(void* const (&lanes)[kLanes]) { integer_product<4>(lanes); }
void mma_f16(void* const (&lanes)[kLanes]) { half_product<F16>(lanes); }
void mma_bf16(void* const (&lanes)[kLanes]) { half_product<Bf16>(lanes); }
void mma_e4m3_f32(void* const (&lanes)[kLanes]) { e4m3_product<F32>(lanes); }
void mma_e4m3_f16(void* const (&lanes)[kLanes]) { e4m3_product<F16>(lanes); }
void mma_mxf8_e4m3(void* const (&lanes)[kLanes]) { mxf8_product(lanes); }
void mma_nvfp4(void* const (&lanes)[kLanes]) { nvfp4_product(lanes); }

}  // namespace sim
