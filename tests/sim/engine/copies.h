// A thread's asynchronous copies. A copy lands as late as it may: when the thread waits for its group. Until then its
// bytes are pending, and reading or writing them is a fault.
// Source: PTX ISA, "cp.async", "cp.async.commit_group", "cp.async.wait_group".
#pragma once

#include <deque>
#include <vector>

#include "report.h"
#include "types.h"

namespace sim {

class Block;

class Copies {
 public:
  void clear() { open_.clear(), groups_.clear(); }

  // global: null for zeros.
  void begin(Block& block, u32 shared, const void* global, u32 bytes, const Where& where);
  void commit();
  void wait(Block& block, u32 pending_groups, u32 thread);

 private:
  struct Copy {
    u32 shared;
    const void* global;
    u32 bytes;
  };

  std::vector<Copy> open_;  // since the last commit
  std::deque<std::vector<Copy>> groups_;
};

}  // namespace sim
