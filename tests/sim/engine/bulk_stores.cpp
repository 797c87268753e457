#include "bulk_stores.h"

#include <cmath>
#include <cstring>
#include <iterator>

#include "block.h"

namespace sim {

namespace {

// Subnormals become zeros of their sign.
float flushed(float x) { return std::fabs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x; }

}  // namespace

void BulkStores::begin(Block& block, void* global, u32 shared, u32 bytes, bool adds, const Where& where) {
  constexpr u32 kAlignment = 16;
  block.check_alignment("cp.async.bulk", reinterpret_cast<u64>(global), kAlignment, where);
  block.check_alignment("cp.async.bulk", shared, kAlignment, where);
  block.check_alignment("cp.async.bulk of as many bytes as this", bytes, kAlignment, where);
  if (flag_ == kSeen) block.report("access behind a flag without a fence", where, "fence.acq_rel.gpu is missing");
  block.shared.begin_read(shared, bytes, where);
  open_.push_back({global, shared, bytes, adds, false, where, {}});
}

void BulkStores::commit() {
  std::move(open_.begin(), open_.end(), std::back_inserter(committed_));
  open_.clear();
}

void BulkStores::wait(Block& block, bool reads, const Where& where) {
  for (Store& store : committed_) end_read(block, store, where.thread);
  if (reads) return;
  for (const Store& store : committed_) write(block, store);
  committed_.clear();
  flag_ = kNone;
}

void BulkStores::check_before_flag(Block& block, const Where& where) const {
  if (!open_.empty() || !committed_.empty()) {
    block.report("flag in front of what it is for", where, "bulk copies that nobody has waited for");
  } else if (flag_ != kFenced) {
    block.report("flag in front of what it is for", where, "no fence.acq_rel.gpu behind the wait for bulk copies");
  }
}

void BulkStores::check_left(Block& block) const {
  if (open_.empty() && committed_.empty()) return;
  const Store& store = open_.empty() ? committed_.front() : open_.front();
  block.report("block ends before its copies", store.where, text("%zu under way", open_.size() + committed_.size()));
}

void BulkStores::end_read(Block& block, Store& store, u32 thread) {
  if (store.was_read) return;
  const u8* const from = block.shared.pointer_to(store.shared);
  store.data.assign(from, from + store.bytes);
  block.shared.end_read(store.shared, store.bytes, thread);
  store.was_read = true;
}

void BulkStores::write(Block& block, const Store& store) {
  std::vector<u8> data = store.data;
  if (store.adds) {
    block.read_global(store.global, store.bytes, store.where);
    for (u32 i = 0; i < store.bytes; i += sizeof(float)) {
      float before, x;
      std::memcpy(&before, static_cast<const u8*>(store.global) + i, sizeof before);
      std::memcpy(&x, &data[i], sizeof x);
      const float sum = flushed(flushed(before) + flushed(x));
      std::memcpy(&data[i], &sum, sizeof sum);
    }
  }
  block.write_global(store.global, store.bytes, store.where);
  std::memcpy(store.global, data.data(), store.bytes);
}

}  // namespace sim
