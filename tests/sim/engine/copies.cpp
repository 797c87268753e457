#include "copies.h"

#include <cstring>

#include "block.h"

namespace sim {

void Copies::begin(Block& block, u32 shared, const void* global, u32 bytes, const Where& where) {
  block.check_alignment("cp.async", reinterpret_cast<u64>(global), bytes, where);
  block.check_alignment("cp.async", shared, bytes, where);
  if (global != nullptr) block.read_global(global, bytes, where);
  block.shared.begin_copy(shared, bytes, where);
  open_.push_back({shared, global, bytes});
}

void Copies::commit() {
  groups_.push_back(std::move(open_));
  open_.clear();
}

void Copies::wait(Block& block, u32 pending_groups, u32 thread) {
  for (; groups_.size() > pending_groups; groups_.pop_front()) {
    for (const Copy& copy : groups_.front()) {
      u8* const to = block.shared.pointer_to(copy.shared);
      if (copy.global == nullptr) std::memset(to, 0, copy.bytes);
      else std::memcpy(to, copy.global, copy.bytes);
      block.shared.end_copy(copy.shared, copy.bytes, thread);
    }
  }
}

}  // namespace sim
