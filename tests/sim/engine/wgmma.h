// A warp's part of its warpgroup's asynchronous products, 16 rows of 64. Results are computed at once, from operands
// that no thread may touch until the warp waits. They appear as late as they may: until then the registers of D hold a
// poison.
// Source: PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions".
#pragma once

#include <deque>
#include <map>
#include <vector>

#include "report.h"
#include "sim/engine.h"
#include "types.h"

namespace sim {

class Block;

class WarpProducts {
 public:
  void fence() { fenced_ = true; }
  void issue(Block& block, u32 warp, void* const (&lanes)[kLanes]);
  void commit();
  void wait(Block& block, u32 warp, u32 pending_groups);

  bool any_pending() const { return !open_.empty() || !groups_.empty(); }
  const std::vector<int>& lines() const { return lines_; }  // of the products issued, in order

 private:
  struct Range {
    u32 address, bytes;
  };

  // The registers of a D: the values that they will hold, and how many products in flight add to them.
  struct Accumulator {
    std::vector<u32> values[kLanes];
    u32 pending;
  };

  struct Running {
    u32* d[kLanes];
    const u32* a[kLanes];  // null where A is in shared memory
    u32 a_words[kLanes][4];
    std::vector<Range> ranges;  // of shared memory
    Where where;
  };

  void start_accumulator(Block& block, const WarpgroupProduct& first, void* const (&lanes)[kLanes], const Where& where);
  void finish(Block& block, u32 agent, const Running& product);

  bool fenced_ = false;        // since the warp last committed or waited
  std::vector<Running> open_;  // since the last commit
  std::deque<std::vector<Running>> groups_;
  std::map<u32*, Accumulator> accumulators_;  // by D of lane 0
  std::vector<int> lines_;
};

}  // namespace sim
