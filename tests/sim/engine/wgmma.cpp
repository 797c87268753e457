#include "wgmma.h"

#include <algorithm>
#include <functional>

#include "block.h"
#include "sums.h"

namespace sim {

namespace {

constexpr u32 kRows = 16, kDepth = 32, kWarpsPerGroup = 4;  // rows of a warp, bytes of k
constexpr u32 kPoison = 0x7fbadbad;                         // a NaN, a large integer

const WarpgroupProduct& of_lane(void* const (&lanes)[kLanes], int lane) {
  return *static_cast<const WarpgroupProduct*>(lanes[lane]);
}

// A matrix in shared memory. Source: PTX ISA, "Matrix-Descriptor", "Strides", "Swizzling Modes".
class Matrix {
 public:
  Matrix(Block& block, u64 descriptor, const Where& where)
      : start_((descriptor & 0x3fff) << 4), stride_((descriptor >> 32 & 0x3fff) << 4), mode_(descriptor >> 62) {
    if (mode_ == 0 || (descriptor >> 49 & 7) != 0) {
      block.report("descriptor without a meaning", where,
                   "expected a swizzle of 128, 64 or 32 bytes, and no base offset");
      block.stop();
    }
    if (start_ % (8 * span()) >= span()) {
      block.report("misaligned descriptor", where,
                   text("a matrix at shared address 0x%x, swizzled over %u bytes, must start at a multiple of %u",
                        start_, span(), 8 * span()));
      block.stop();
    }
  }

  // 16 bytes of a row; of rows along k, `chunk` is 0 or 1 of the instruction's.
  u32 chunk(u32 row, u32 chunk) const {
    const u32 address = start_ + row / 8 * stride_ + row % 8 * span() + chunk * 16;
    return address ^ (address >> 3 & (span() - 16));
  }

 private:
  u32 span() const { return 256 >> mode_; }  // bytes

  u32 start_, stride_, mode_;
};

using Codes = u32[kDepth];

// Reads rows of a matrix for an instruction that stays in flight.
template <class Range>
void read_rows(Block& block, const Matrix& matrix, u32 first, u32 count, Codes* rows, std::vector<Range>& ranges,
               const Where& where) {
  for (u32 row = 0; row < count; ++row) {
    for (u32 c = 0; c < 2; ++c) {
      const u32 address = matrix.chunk(first + row, c);
      block.shared.begin_read(address, 16, where);
      ranges.push_back({address, 16});
      std::copy_n(block.shared.pointer_to(address), 16, &rows[row][16 * c]);
    }
  }
}

// Reads of 16 rows of k `count` elements of 16 bits from `first` on, as that many columns.
template <class Range>
void read_columns(Block& block, const Matrix& matrix, u32 first, u32 count, Codes* columns, std::vector<Range>& ranges,
                  const Where& where) {
  constexpr u32 kOfChunk = 8;  // elements
  for (u32 k = 0; k < kDepth / 2; ++k) {
    for (u32 c = 0; c < count / kOfChunk; ++c) {
      const u32 address = matrix.chunk(k, first / kOfChunk + c);
      block.shared.begin_read(address, 16, where);
      ranges.push_back({address, 16});
      const u8* bytes = block.shared.pointer_to(address);
      for (u32 i = 0; i < 16; ++i) columns[kOfChunk * c + i / 2][2 * k + i % 2] = bytes[i];
    }
  }
}

// As mma.m16n8k32: word i of a lane 4g + t is row g + 8 (i % 2), bytes 4t.. of the half i / 2.
void unpack_a(const u32 (&words)[kLanes][4], Codes* rows) {
  for (u32 lane = 0; lane < kLanes; ++lane) {
    for (u32 i = 0; i < 4; ++i) {
      for (u32 e = 0; e < 4; ++e) {
        rows[lane / 4 + 8 * (i % 2)][16 * (i / 2) + 4 * (lane % 4) + e] = words[lane][i] >> 8 * e & 0xff;
      }
    }
  }
}

u32 integer_sum(const Codes& a, const Codes& b, u32 c) {
  for (u32 k = 0; k < kDepth; ++k) c += static_cast<u32>(static_cast<i8>(a[k]) * static_cast<i8>(b[k]));
  return c;
}

// The sum of an element of D and its row times its column.
using Sum = std::function<u32(u32 row, u32 column, u32 c)>;

Sum integer_product(const Codes* a, const Codes* b) {
  return [=](u32 row, u32 column, u32 c) { return integer_sum(a[row], b[column], c); };
}

// Elements of kBits, as numbers of a format, in f32.
template <class Format, int kBits>
Sum float_product(const Codes* a, const Codes* b, u32 columns, const Step& step) {
  constexpr int kBytes = kBits / 8, kElements = kDepth / kBytes;
  using Elements = Vector<Format, kElements>;
  const auto vectors = [](const Codes* of, u32 count) {
    std::vector<Elements> found;
    for (u32 i = 0; i < count; ++i) {
      u32 codes[kElements] = {};
      for (u32 k = 0; k < kDepth; ++k) codes[k / kBytes] |= of[i][k] << 8 * (k % kBytes);
      found.emplace_back(codes);
    }
    return found;
  };
  return [&step, rows = vectors(a, kRows), of_b = vectors(b, columns)](u32 row, u32 column, u32 c) {
    return add_product<F32>(step, rows[row], of_b[column], c);
  };
}

Sum product_of(WarpgroupTypes types, const Codes* a, const Codes* b, u32 columns) {
  switch (types) {
    case WarpgroupTypes::kS8: return integer_product(a, b);
    case WarpgroupTypes::kE4m3: return float_product<E4m3, 8>(a, b, columns, chip().wgmma_e4m3);
    case WarpgroupTypes::kF16: return float_product<F16, 16>(a, b, columns, chip().f16);
    case WarpgroupTypes::kBf16: return float_product<Bf16, 16>(a, b, columns, chip().f16);
  }
  return {};
}

bool equal_descriptors(void* const (&lanes)[kLanes]) {
  const WarpgroupProduct& first = of_lane(lanes, 0);
  return std::all_of(std::begin(lanes), std::end(lanes), [&](void* lane) {
    const auto& other = *static_cast<const WarpgroupProduct*>(lane);
    return other.a_matrix == first.a_matrix && other.b_matrix == first.b_matrix && other.accumulate == first.accumulate;
  });
}

}  // namespace

void WarpProducts::issue(Block& block, u32 warp, void* const (&lanes)[kLanes]) {
  const WarpgroupProduct& first = of_lane(lanes, 0);
  Running product;
  product.where = {warp * kLanes, first.site, nullptr};
  if (!equal_descriptors(lanes)) {
    block.report("threads diverge", product.where, "lanes of one wgmma differ in their descriptors");
  }
  if (!fenced_)
    block.report("wgmma without a fence", product.where, "no wgmma.fence since the warp's last commit or wait");
  lines_.push_back(first.site.line);

  Codes a[kRows];
  std::vector<u32> b_storage(static_cast<size_t>(first.columns) * kDepth);
  Codes* b = reinterpret_cast<Codes*>(b_storage.data());
  for (int lane = 0; lane < kLanes; ++lane) {
    product.d[lane] = of_lane(lanes, lane).d;
    product.a[lane] = of_lane(lanes, lane).a;
    if (first.a) std::copy_n(product.a[lane], 4, product.a_words[lane]);
  }
  if (first.a) {
    unpack_a(product.a_words, a);
  } else {
    const Matrix matrix(block, first.a_matrix, product.where);
    const u32 own = warp % kWarpsPerGroup * kRows;
    if (first.a_rows_of_k) read_columns(block, matrix, own, kRows, a, product.ranges, product.where);
    else read_rows(block, matrix, own, kRows, a, product.ranges, product.where);
  }
  const Matrix of_b(block, first.b_matrix, product.where);
  if (first.rows_of_k) read_columns(block, of_b, 0, first.columns, b, product.ranges, product.where);
  else read_rows(block, of_b, 0, first.columns, b, product.ranges, product.where);

  const Sum sum = product_of(first.types, a, b, first.columns);
  start_accumulator(block, first, lanes, product.where);
  Accumulator& d = accumulators_[first.d];
  ++d.pending;
  for (u32 lane = 0; lane < kLanes; ++lane) {
    for (u32 i = 0; i < first.columns / 2; ++i) {  // element i: row g + 8 (i / 2 % 2), column 8 (i / 4) + 2t + i % 2
      const u32 row = lane / 4 + 8 * (i / 2 % 2), column = 8 * (i / 4) + lane % 4 * 2 + i % 2;
      const u32 c = first.accumulate ? d.values[lane][i] : 0;
      d.values[lane][i] = sum(row, column, c);
    }
  }
  open_.push_back(std::move(product));
}

// Takes D from its registers, unless an earlier product in flight has it, and poisons the registers.
void WarpProducts::start_accumulator(Block& block, const WarpgroupProduct& first, void* const (&lanes)[kLanes],
                                     const Where& where) {
  const auto [entry, is_new] = accumulators_.try_emplace(first.d);
  if (!is_new) {
    if (entry->second.values[0].size() == first.columns / 2) return;
    block.report("registers of a pending instruction written", where, "by a product of another shape");
    block.stop();
  }
  for (int lane = 0; lane < kLanes; ++lane) {
    u32* registers = of_lane(lanes, lane).d;
    if (first.accumulate) entry->second.values[lane].assign(registers, registers + first.columns / 2);
    else entry->second.values[lane].assign(first.columns / 2, 0);
    std::fill_n(registers, first.columns / 2, kPoison);
  }
}

void WarpProducts::commit() {
  fenced_ = false;
  groups_.push_back(std::move(open_));
  open_.clear();
}

void WarpProducts::wait(Block& block, u32 warp, u32 pending_groups) {
  fenced_ = false;
  const u32 agent = block.agent_of_warp(warp);
  for (; groups_.size() > pending_groups; groups_.pop_front()) {
    for (const Running& product : groups_.front()) finish(block, agent, product);
  }
  Order::Clock done;
  block.order.release(agent, done);
  for (u32 lane = 0; lane < kLanes; ++lane) block.order.acquire(warp * kLanes + lane, done);
}

void WarpProducts::finish(Block& block, u32 agent, const Running& product) {
  for (const Range& range : product.ranges) block.shared.end_read(range.address, range.bytes, agent);
  const auto entry = accumulators_.find(product.d[0]);
  const bool last = --entry->second.pending == 0;
  bool touched = false;
  for (int lane = 0; lane < kLanes; ++lane) {
    touched |= product.a[lane] && !std::equal(product.a_words[lane], product.a_words[lane] + 4, product.a[lane]);
    const std::vector<u32>& values = entry->second.values[lane];
    for (size_t i = 0; last && i < values.size(); ++i) {
      touched |= product.d[lane][i] != kPoison;
      product.d[lane][i] = values[i];
    }
  }
  if (last) accumulators_.erase(entry);
  if (touched) {
    block.report("registers of a pending instruction written", product.where, "before the warp waited for it");
  }
}

}  // namespace sim
