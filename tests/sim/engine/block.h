// A thread block: its fibers, who runs next, and the places where threads meet.
//
// The scheduler picks at random by the seed, and favours one warp for a while, so that warps drift apart as far as
// barriers let them.
// Source: CUDA C++ programming guide, "Synchronization Functions" and "SIMT Architecture".
#pragma once

#include <memory>
#include <vector>

#include "copies.h"
#include "fiber.h"
#include "global_memory.h"
#include "image.h"
#include "order.h"
#include "random.h"
#include "report.h"
#include "shared_memory.h"
#include "sim/engine.h"
#include "types.h"

namespace sim {

// What Python asks for; it has the same fields (simulator.py).
struct Launch {
  void (*call)(const void* params);
  const void* params;
  u32 blocks, threads, dynamic_bytes, arch;
  u64 seed;
};

// Threads on their way into a barrier or an instruction of a whole warp. All must come to the same one.
struct Meeting {
  const char* instruction = nullptr;
  Site site = {};
  u32 first = 0;    // thread that came first
  u32 arrived = 0;  // 0: nobody waits
};

struct Thread {
  enum Status { kReady, kWaiting, kDone };

  Fiber fiber;
  Copies copies;
  Status status = kDone;
  Meeting* waits_in = nullptr;
};

// The blocks of a launch run one after another in one object.
class Block {
 public:
  Block(const Launch& launch, GlobalMemory& global, Reports& reports);

  // Runs the block of this index to its end; false where a fault ends it early.
  bool run(u32 index);

  // --- for the thread that runs now ---
  u32 thread() const { return thread_; }
  Where here(Site site) const { return {thread_, site, nullptr}; }
  Copies& copies() { return threads_[thread_]->copies; }
  bool on_stack(const void* address) const { return threads_[thread_]->fiber.holds(address); }
  bool is_constant(const void* address) const;  // a built-in variable, or a table of the kernel's

  void together(const char* instruction, void* lane, Meaning meaning, Site site);
  bool synchronize(const char* name, bool predicate, Site site);

  // Memory by generic addresses; what no buffer holds stops the block.
  void read_global(const void* address, u32 bytes, const Where& where);
  void write_global(const void* address, u32 bytes, const Where& where);
  void check_alignment(const char* instruction, u64 address, u32 alignment, const Where& where);

  void report(const char* kind, const Where& where, std::string detail);
  [[noreturn]] void stop();

  Order order;
  SharedMemory shared;

 private:
  struct Warp {
    Meeting meeting;
    void* lanes[kLanes];
    u32 ready = 0;  // bit per lane
  };

  static void body();  // of every fiber
  void start();
  u32 next_thread();
  void make_ready(u32 thread);
  void leave();
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
  std::vector<std::unique_ptr<Thread>> threads_;
  std::vector<Warp> warps_;
  u32 ready_warps_ = 0;  // bit per warp
  u32 favourite_ = 0;    // warp
  Meeting barrier_;
  bool barrier_predicate_ = true, barrier_result_ = true;
};

extern Block* block;  // the one that runs

}  // namespace sim
