// A thread's bulk copies and sums from shared to global memory. They take effect as late as they may: until the thread
// waits for their reads no thread may write what they read, and until it waits for all of them nothing is written.
// Source: PTX ISA, "cp.async.bulk", "cp.reduce.async.bulk", "cp.async.bulk.commit_group", "cp.async.bulk.wait_group".
#pragma once

#include <vector>

#include "report.h"
#include "types.h"

namespace sim {

class Block;

class BulkStores {
 public:
  void clear() { open_.clear(), committed_.clear(), flag_ = kNone; }

  // adds: f32 to what is there; else replaces it.
  void begin(Block& block, void* global, u32 shared, u32 bytes, bool adds, const Where& where);
  void commit();
  // For all groups; reads: for their reads of shared memory alone.
  void wait(Block& block, bool reads, const Where& where);
  void check_left(Block& block) const;  // at the end of a block

  // The order between these copies and flags in global memory, by which blocks wait for each other.
  void see_flag() { flag_ = kSeen; }
  void fence() { flag_ = kFenced; }
  void check_before_flag(Block& block, const Where& where) const;

 private:
  struct Store {
    void* global;
    u32 shared, bytes;
    bool adds, was_read;
    Where where;
    std::vector<u8> data;
  };

  static void end_read(Block& block, Store& store, u32 thread);
  static void write(Block& block, const Store& store);

  std::vector<Store> open_, committed_;          // open_: since the last commit
  enum { kNone, kSeen, kFenced } flag_ = kNone;  // what the thread did last: saw a flag, or fenced
};

}  // namespace sim
