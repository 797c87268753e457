#include "bulk_copies.h"

#include <cstring>

#include "block.h"

namespace sim {

void BulkCopies::begin(Block& block, u32 shared, const void* global, u32 bytes, u32 barrier, const Where& where) {
  constexpr u32 kAlignment = 16;
  block.check_alignment("cp.async.bulk", reinterpret_cast<u64>(global), kAlignment, where);
  block.check_alignment("cp.async.bulk", shared, kAlignment, where);
  block.check_alignment("cp.async.bulk of as many bytes as this", bytes, kAlignment, where);
  const u32 agent = block.memory_barriers.agent(block, barrier, where);
  block.read_global(global, bytes, where);
  block.shared.check_fenced(shared, bytes, where);
  block.shared.begin_copy(shared, bytes, where);
  under_way_.push_back({shared, global, bytes, barrier, agent, where});
}

void BulkCopies::land_one(Block& block, Random& random) {
  const auto which = under_way_.begin() + random.below(static_cast<u32>(under_way_.size()));
  const Copy copy = *which;
  under_way_.erase(which);
  std::memcpy(block.shared.pointer_to(copy.shared), copy.global, copy.bytes);
  block.shared.end_copy(copy.shared, copy.bytes, copy.agent);
  block.memory_barriers.complete(block, copy.barrier, copy.bytes);
}

void BulkCopies::check_left(Block& block) {
  if (under_way_.empty()) return;
  const Copy& copy = under_way_.front();
  block.report("block ends before its copies", copy.where, text("%zu under way", under_way_.size()));
}

}  // namespace sim
