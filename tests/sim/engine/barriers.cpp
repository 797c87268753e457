#include "barriers.h"

#include <utility>

#include "block.h"

namespace sim {

namespace {

void wake(Block& block, std::vector<u32>& waiting) {
  for (const u32 thread : std::exchange(waiting, {})) block.make_ready(thread);
}

}  // namespace

// --- by number -------------------------------------------------------------------------------------------------------

void NamedBarriers::arrive(Block& block, u32 number, u32 threads, bool waits, const Where& where) {
  const char* instruction = waits ? "barrier.sync" : "barrier.arrive";
  if (number == 0 || number >= kCount || threads == 0 || threads % kLanes != 0 || threads > block.threads()) {
    block.report("barrier that cannot be", where, text("%s %u of %u threads", instruction, number, threads));
    block.stop();
  }
  Barrier& barrier = all_[number];
  if (barrier.arrived > 0 && barrier.expected != threads) {
    block.report("barrier of different counts", where,
                 text("%s %u of %u threads, for which others expect %u", instruction, number, threads,
                      barrier.expected));
    block.stop();
  }
  barrier.expected = threads;
  block.order.release(where.thread, barrier.clock);
  if (++barrier.arrived < threads) {
    if (!waits) return;
    barrier.waiting.push_back(where.thread);
    barrier.place = {instruction, where.site, barrier.waiting.front(), 0};
    return block.wait(barrier.place);
  }
  barrier.arrived = 0;
  if (waits) block.order.acquire(where.thread, barrier.clock);
  for (const u32 thread : barrier.waiting) block.order.acquire(thread, barrier.clock);
  barrier.clock.clear();
  wake(block, barrier.waiting);
}

void NamedBarriers::check_left(Block& block) {
  for (u32 number = 0; number < kCount; ++number) {
    const Barrier& barrier = all_[number];
    if (barrier.arrived == 0) continue;
    block.report("barrier that not all threads reach", {0, {"at the end of the block", 0}, nullptr},
                 text("barrier %u has seen %u of %u threads", number, barrier.arrived, barrier.expected));
  }
}

// --- in shared memory ------------------------------------------------------------------------------------------------

void MemoryBarriers::init(Block& block, u32 address, u32 arrivals, const Where& where) {
  block.check_alignment("mbarrier.init", address, kBytes, where);
  block.shared.write(address, kBytes, where);
  if (arrivals == 0 || (all_.size() == kMost && !all_.contains(address))) {
    block.report("barrier that cannot be", where,
                 text("mbarrier.init of %u arrivals, the %zuth", arrivals, all_.size() + 1));
    block.stop();
  }
  const auto known = all_.find(address);
  const u32 agent = known == all_.end() ? block.threads() + static_cast<u32>(all_.size()) : known->second.agent;
  all_[address] = {arrivals, arrivals, 0, 0, {}, {}, {}, {}, agent, where.thread, false};
}

void MemoryBarriers::fence(u32 thread) {
  for (auto& [address, barrier] : all_) barrier.fenced |= barrier.initializer == thread;
}

MemoryBarriers::Barrier& MemoryBarriers::require(Block& block, const char* instruction, u32 address,
                                                 const Where& where) {
  const auto found = all_.find(address);
  if (found == all_.end()) {
    block.report("barrier used before it was initialized", where,
                 text("%s at shared address 0x%x", instruction, address));
    block.stop();
  }
  block.shared.read(address, kBytes, where);  // ordered after the initialization
  return found->second;
}

void MemoryBarriers::arrive(Block& block, u32 address, u32 bytes, const Where& where) {
  Barrier& barrier = require(block, "mbarrier.arrive", address, where);
  if (barrier.missing == 0) {
    block.report("more arrivals than a phase expects", where,
                 text("%u, with %lld bytes missing", barrier.arrivals, static_cast<long long>(barrier.bytes)));
    block.stop();
  }
  block.order.release(where.thread, barrier.coming);
  barrier.bytes += bytes;
  --barrier.missing;
  settle(block, barrier);
}

void MemoryBarriers::wait(Block& block, u32 address, u32 parity, const Where& where) {
  Barrier& barrier = require(block, "mbarrier.try_wait", address, where);
  while (barrier.phase % 2 == parity % 2) {
    Meeting& place = barrier.place[parity % 2];
    const char* instruction = parity % 2 ? "mbarrier.try_wait of an odd phase" : "mbarrier.try_wait of an even phase";
    place = {instruction, where.site, where.thread, 0};
    barrier.waiting.push_back(where.thread);
    block.wait(place);
  }
  block.order.acquire(where.thread, barrier.last);
}

u32 MemoryBarriers::agent(Block& block, u32 address, const Where& where) {
  const Barrier& barrier = require(block, "cp.async.bulk", address, where);
  if (!barrier.fenced) {
    block.report("barrier initialized without a fence for the async proxy", where,
                 text("at shared address 0x%x", address));
  }
  return barrier.agent;
}

void MemoryBarriers::complete(Block& block, u32 address, u32 bytes) {
  Barrier& barrier = all_.at(address);
  block.order.release(barrier.agent, barrier.coming);
  barrier.bytes -= bytes;
  settle(block, barrier);
}

void MemoryBarriers::settle(Block& block, Barrier& barrier) {
  if (barrier.missing > 0 || barrier.bytes != 0) return;
  ++barrier.phase;
  barrier.missing = barrier.arrivals;
  barrier.last = std::exchange(barrier.coming, {});
  wake(block, barrier.waiting);
}

}  // namespace sim
