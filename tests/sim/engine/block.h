// A thread block: its fibers, the choice of the fiber that runs next, and the places where threads meet.
//
// The scheduler picks threads at random, by the seed. It favours one warp for a while, so that warps drift apart as far
// as barriers let them.
// Source: CUDA C++ programming guide, "Synchronization Functions" and "SIMT Architecture".
#pragma once

#include <memory>
#include <vector>

#include "barriers.h"
#include "bulk_copies.h"
#include "bulk_stores.h"
#include "copies.h"
#include "fiber.h"
#include "global_memory.h"
#include "image.h"
#include "meeting.h"
#include "order.h"
#include "random.h"
#include "report.h"
#include "shared_memory.h"
#include "sim/engine.h"
#include "types.h"
#include "wgmma.h"

namespace sim {

// A launch that Python asks for; simulator.py has a struct with the same fields.
struct Launch {
  void (*call)(const void* params);
  const void* params;
  u32 blocks, threads, dynamic_bytes, arch;
  u64 seed;
  bool programmatic;  // the grid may start before the grid in front of it has ended
  bool in_order;      // blocks wait for those of lower index
};

// Bound on the accesses and waits of a block, which ends loops that never end: any loop that compilers keep accesses
// memory or waits.
constexpr u32 kMostSteps = 1u << 24;  // under a second; the kernels of the matrix take less than 2^22

// State that every access reads. Its visibility is hidden, so that its address needs no look-up in the global offset
// table.
struct Running {
  const u8* stack = nullptr;  // of the thread that runs
  u32 steps = 0;              // accesses and waits of the block

  bool holds(const void* address) const {
    return static_cast<size_t>(static_cast<const u8*>(address) - stack) < Fiber::kStackBytes;
  }
};

[[gnu::visibility("hidden")]] extern Running running;

struct Thread {
  enum Status { kReady, kWaiting, kDone };

  Fiber fiber;
  Copies copies;
  BulkStores bulk_stores;
  Status status = kDone;
  Meeting* waits_in = nullptr;
  u32 proxy_fences = 1;     // number executed, plus one
  Order::Clock at_fence;    // what the thread was ordered after at the last of them
  bool grids_ended = true;  // whether the thread has waited for the grids in front
};

// The blocks of a launch run one after another in one object.
class Block {
 public:
  Block(const Launch& launch, GlobalMemory& global, Reports& reports);

  // Runs the block of this index to its end; false where a fault ends it early.
  bool run(u32 index);

  // --- for the thread that runs now ---
  u32 thread() const { return thread_; }
  u32 warp() const { return thread_ / kLanes; }
  WarpProducts& products() { return warps_[warp()].products; }
  Where here(Site site) const { return {thread_, site, nullptr}; }
  Copies& copies() { return threads_[thread_]->copies; }
  BulkStores& bulk_stores() { return threads_[thread_]->bulk_stores; }
  bool is_constant(const void* address) const;  // a built-in variable, or a table of the kernel's

  void fence_proxy() {
    ++threads_[thread_]->proxy_fences;
    order.acquired(thread_, threads_[thread_]->at_fence);
  }
  void set_registers(u32 registers);
  void wait_for_grids() { threads_[thread_]->grids_ended = true; }
  void check_steps(const Where& where) {
    if (running.steps > kMostSteps) give_up(where);
  }
  void wait(Meeting& place);  // until another thread makes this one ready
  void together(const char* instruction, void* lane, Meaning meaning, Site site);
  bool synchronize(const char* name, bool predicate, Site site);

  // Accesses by generic addresses; an access outside all buffers stops the block.
  void read_global(const void* address, u32 bytes, const Where& where);
  void write_global(const void* address, u32 bytes, const Where& where);
  void check_alignment(const char* instruction, u64 address, u32 alignment, const Where& where);

  void report(const char* kind, const Where& where, std::string detail);
  [[noreturn]] void stop();

  // --- of the block ---
  u32 threads() const { return launch_.threads; }
  void make_ready(u32 thread);

  // Agents that access shared memory: the TMA unit, one for each barrier, and the tensor cores, one for each warp.
  u32 agent_of_warp(u32 warp) const { return launch_.threads + MemoryBarriers::kMost + warp; }
  std::string name_of(u32 thread) const;
  u32 proxy_fences(u32 thread) const { return thread < launch_.threads ? threads_[thread]->proxy_fences : 0; }
  // Whether a thread has executed a proxy fence behind a write.
  bool has_fenced(u32 thread, Epoch write) const {
    const Order::Clock& at_fence = threads_[thread]->at_fence;
    return !at_fence.empty() && clock_of(write) <= at_fence[thread_of(write)];
  }

  Order order;
  SharedMemory shared;
  NamedBarriers named_barriers;
  MemoryBarriers memory_barriers;
  BulkCopies bulk_copies;

 private:
  struct Warp {
    Meeting meeting;
    void* lanes[kLanes];
    u32 ready = 0;  // bit per lane
    WarpProducts products;
    u32 registers = 0;  // of setmaxnreg; 0: none yet
  };

  [[noreturn]] void give_up(const Where& where);

  void check_grids(const Where& where);
  static void body();  // of every fiber
  void start();
  u32 next_thread();
  void leave();
  void check_end();
  bool arrive(Meeting& meeting, const char* instruction, Site site, u32 expected);
  void report_stuck();
  std::vector<u32> waiting_in(const Meeting* meeting) const;
  u32 lanes_of(u32 warp) const { return std::min<u32>(kLanes, launch_.threads - warp * kLanes); }

  GlobalMemory& global_;
  Reports& reports_;
  const Launch& launch_;
  const Image image_;  // of the kernel
  Random random_;
  u32 index_ = 0;
  u32 thread_ = 0;
  bool stopped_ = false;
  std::vector<std::unique_ptr<Thread>>& threads_;
  std::vector<Warp> warps_;
  u32 ready_warps_ = 0;  // bit per warp
  u32 favourite_ = 0;    // warp
  Meeting barrier_;
  bool barrier_predicate_ = true, barrier_result_ = true;
};

extern Block* block;  // the block that runs

}  // namespace sim
