// Bulk copies in flight. A copy lands at a random time, late on average, so that code that does not wait for it is
// caught.
// Source: PTX ISA, "cp.async.bulk".
#pragma once

#include <vector>

#include "random.h"
#include "report.h"
#include "types.h"

namespace sim {

class Block;

class BulkCopies {
 public:
  void start() { under_way_.clear(); }
  bool any() const { return !under_way_.empty(); }

  void begin(Block& block, u32 shared, const void* global, u32 bytes, u32 barrier, const Where& where);
  void land_one(Block& block, Random& random);
  void check_left(Block& block);  // at the end of a block

 private:
  struct Copy {
    u32 shared;
    const void* global;
    u32 bytes;
    u32 barrier;  // address
    u32 agent;
    Where where;
  };

  std::vector<Copy> under_way_;
};

}  // namespace sim
