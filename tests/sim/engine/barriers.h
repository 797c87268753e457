// Barriers among some of a block's threads: named barriers, and mbarriers in shared memory.
// Source: PTX ISA, "barrier", "mbarrier".
#pragma once

#include <map>
#include <vector>

#include "meeting.h"
#include "order.h"
#include "report.h"
#include "types.h"

namespace sim {

class Block;

// barrier.sync and barrier.arrive. Number 0 belongs to __syncthreads, which Block::synchronize() simulates.
class NamedBarriers {
 public:
  static constexpr u32 kCount = 16;

  void start() { all_.assign(kCount, {}); }
  void arrive(Block& block, u32 number, u32 threads, bool waits, const Where& where);
  void check_left(Block& block);  // at the end of a block

 private:
  struct Barrier {
    u32 expected = 0, arrived = 0;  // threads
    Order::Clock clock;             // of those that arrived
    std::vector<u32> waiting;
    Meeting place;
  };

  std::vector<Barrier> all_;
};

// mbarrier: a phase ends when no arrival and no byte is missing.
class MemoryBarriers {
 public:
  static constexpr u32 kMost = 32;  // in a block
  static constexpr u32 kBytes = 8;

  void start() { all_.clear(); }
  void init(Block& block, u32 address, u32 arrivals, const Where& where);
  void fence(u32 thread);  // makes the mbarriers that the thread initialized visible to the async proxy
  void arrive(Block& block, u32 address, u32 bytes, const Where& where);
  void wait(Block& block, u32 address, u32 parity, const Where& where);

  // For the TMA unit: the agent that writes on behalf of a barrier, and the arrival of bytes.
  u32 agent(Block& block, u32 address, const Where& where);
  void complete(Block& block, u32 address, u32 bytes);

 private:
  struct Barrier {
    u32 arrivals, missing;  // of a phase
    i64 bytes;              // announced and not yet in
    u32 phase;
    Order::Clock coming, last;  // of the arrivals of the current phase, and of the last phase that ended
    std::vector<u32> waiting;
    Meeting place[2];  // where threads wait, by the parity that they wait for
    u32 agent;
    u32 initializer;
    bool fenced;
  };

  Barrier& require(Block& block, const char* instruction, u32 address, const Where& where);
  void settle(Block& block, Barrier& barrier);

  std::map<u32, Barrier> all_;  // by address
};

}  // namespace sim
