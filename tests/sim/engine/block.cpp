#include "block.h"

#include <cstring>
#include <map>

namespace {

struct Indices {
  sim::Index thread, block, block_dim, grid_dim;
} indices;

}  // namespace

const sim::Index &threadIdx = indices.thread, &blockIdx = indices.block, &blockDim = indices.block_dim,
                 &gridDim = indices.grid_dim;

namespace sim {

Block* block = nullptr;
Running running;

namespace {

// Of the launches so far: to map their stacks anew would take longer than many launches run.
std::vector<std::unique_ptr<Thread>> all_threads;

}  // namespace

Block::Block(const Launch& launch, GlobalMemory& global, Reports& reports)
    : shared(*this, order),
      global_(global),
      reports_(reports),
      launch_(launch),
      image_(Image::of(reinterpret_cast<const void*>(launch.call))),
      random_(launch.seed),
      threads_(all_threads) {
  reports.clear(image_.base);
  while (threads_.size() < launch.threads) threads_.push_back(std::make_unique<Thread>());
}

bool Block::run(u32 index) {
  block = this;
  index_ = index;
  start();
  u32 left = launch_.threads;
  const u32 late = 16u << random_.below(12);  // thread switches before a copy lands, on average; drawn per block
  while (ready_warps_ != 0 || bulk_copies.any()) {
    if (bulk_copies.any() && (ready_warps_ == 0 || random_.below(late) == 0)) {
      bulk_copies.land_one(*this, random_);
      continue;
    }
    thread_ = next_thread();
    Thread& thread = *threads_[thread_];
    indices.thread.x = thread_;
    running.stack = thread.fiber.stack();
    thread.fiber.resume();
    if (stopped_) return false;
    left -= thread.status == Thread::kDone;
    if (left == 0) break;
  }
  if (left > 0) report_stuck();
  else check_end();
  return left == 0;
}

// Reports what a block must not leave at its end: copies, arrivals, products, and registers that it cannot have.
void Block::check_end() {
  bulk_copies.check_left(*this);
  for (u32 t = 0; t < threads(); ++t) threads_[t]->bulk_stores.check_left(*this);
  named_barriers.check_left(*this);
  constexpr u32 kWarpsPerGroup = 4, kRegisters = 65536;
  u32 registers = 0;
  for (u32 w = 0; w < warps_.size(); ++w) {
    const Where where{w * kLanes, {"at the end of the block", 0}, nullptr};
    const Warp &warp = warps_[w], &first = warps_[w / kWarpsPerGroup * kWarpsPerGroup];
    if (warp.products.any_pending()) report("wgmma that nobody waits for", where, text("of warp %u", w));
    if (warp.products.lines() != first.products.lines() || warp.registers != first.registers) {
      report("warps of a warpgroup diverge", where, "they do not execute the same wgmma and setmaxnreg");
    }
    registers += warp.registers * kLanes;
  }
  if (registers > kRegisters) {
    report("more registers than there are", {0, {"at the end of the block", 0}, nullptr},
           text("setmaxnreg asks for %u", registers));
  }
}

void Block::start() {
  const u32 count = launch_.threads;
  indices = {{}, {index_, 0, 0}, {count, 1, 1}, {launch_.blocks, 1, 1}};
  stopped_ = false;
  running.steps = 0;
  barrier_ = {}, barrier_predicate_ = true;
  order.start(count, MemoryBarriers::kMost + (count + kLanes - 1) / kLanes);
  named_barriers.start(), memory_barriers.start(), bulk_copies.start();
  shared.start(launch_.dynamic_bytes, image_);
  warps_.assign((count + kLanes - 1) / kLanes, {});
  ready_warps_ = 0;
  for (u32 t = 0; t < count; ++t) {
    threads_[t]->copies.clear();
    threads_[t]->bulk_stores.clear();
    threads_[t]->proxy_fences = 1;
    threads_[t]->at_fence.clear();
    threads_[t]->grids_ended = !launch_.programmatic;
    threads_[t]->fiber.start(body);
    make_ready(t);
  }
}

void Block::body() {
  block->launch_.call(block->launch_.params);
  block->threads_[block->thread_]->status = Thread::kDone;
  block->leave();
}

// --- who runs --------------------------------------------------------------------------------------------------------

namespace {

// The first set bit from a random one on.
u32 random_bit(u32 bits, Random& random) {
  const u32 turn = random.below(32);
  const u32 turned = bits >> turn | bits << (32 - turn) % 32;
  return (static_cast<u32>(__builtin_ctz(turned)) + turn) % 32;
}

}  // namespace

u32 Block::next_thread() {
  constexpr u32 kStay = 256;  // thread switches between two choices of a favourite, on average
  if (random_.below(kStay) == 0) favourite_ = random_.below(static_cast<u32>(warps_.size()));
  const bool favour = favourite_ < warps_.size() && warps_[favourite_].ready && random_.below(8) != 0;
  const u32 warp = favour ? favourite_ : random_bit(ready_warps_, random_);
  const u32 lane = random_bit(warps_[warp].ready, random_);
  warps_[warp].ready &= ~(1u << lane);
  if (warps_[warp].ready == 0) ready_warps_ &= ~(1u << warp);
  return warp * kLanes + lane;
}

void Block::make_ready(u32 thread) {
  threads_[thread]->status = Thread::kReady;
  threads_[thread]->waits_in = nullptr;
  warps_[thread / kLanes].ready |= 1u << thread % kLanes;
  ready_warps_ |= 1u << thread / kLanes;
}

void Block::leave() { threads_[thread_]->fiber.suspend(); }

void Block::stop() {
  stopped_ = true;
  leave();
  __builtin_unreachable();  // nothing resumes a stopped block
}

void Block::give_up(const Where& where) {
  report("block that does not end", where, text("after %u accesses and waits", kMostSteps));
  stop();
}

// --- where threads meet ----------------------------------------------------------------------------------------------

// Whether this thread is the last to arrive. All others wait until the last one makes them ready.
bool Block::arrive(Meeting& meeting, const char* instruction, Site site, u32 expected) {
  if (meeting.arrived == 0) {
    meeting = {instruction, site, thread_, 0};
  } else if (meeting.site.line != site.line ||
             (meeting.site.file != site.file && std::strcmp(meeting.site.file, site.file) != 0)) {
    report("threads diverge", here(site),
           text("%s, while thread %u waits at %s in %s:%d", instruction, meeting.first, meeting.instruction,
                meeting.site.file, meeting.site.line));
    stop();
  }
  if (++meeting.arrived == expected) {
    meeting.arrived = 0;
    return true;
  }
  return false;
}

void Block::wait(Meeting& place) {
  ++running.steps;
  check_steps(here(place.site));
  threads_[thread_]->status = Thread::kWaiting;
  threads_[thread_]->waits_in = &place;
  leave();
}

void Block::set_registers(u32 registers) { warps_[warp()].registers = registers; }

void Block::together(const char* instruction, void* lane, Meaning meaning, Site site) {
  const u32 number = thread_ / kLanes;
  Warp& warp = warps_[number];
  warp.lanes[thread_ % kLanes] = lane;
  if (!arrive(warp.meeting, instruction, site, kLanes)) return wait(warp.meeting);
  meaning(warp.lanes);
  for (u32 t = number * kLanes; t < (number + 1) * kLanes; ++t) {
    if (t != thread_) make_ready(t);
  }
}

bool Block::synchronize(const char* name, bool predicate, Site site) {
  barrier_predicate_ &= predicate;
  if (!arrive(barrier_, name, site, launch_.threads)) {
    wait(barrier_);
    return barrier_result_;
  }
  order.join_all();
  barrier_result_ = barrier_predicate_, barrier_predicate_ = true;
  for (u32 t = 0; t < launch_.threads; ++t) {
    if (t != thread_) make_ready(t);
  }
  return barrier_result_;
}

void Block::report_stuck() {
  std::map<const Meeting*, std::vector<u32>> waiting;
  std::vector<u32> done;
  for (u32 t = 0; t < launch_.threads; ++t) {
    const Thread& thread = *threads_[t];
    (thread.status == Thread::kDone ? done : waiting[thread.waits_in]).push_back(t);
  }
  std::string detail;
  for (const auto& [meeting, threads] : waiting) {
    detail += text("threads %s wait at %s in %s:%d; ", ranges(threads).c_str(), meeting->instruction,
                   meeting->site.file, meeting->site.line);
  }
  detail += done.empty() ? "none has ended" : text("threads %s have ended", ranges(done).c_str());
  const auto& [meeting, threads] = *waiting.begin();
  const bool at_barrier = waiting.size() == 1 && meeting == &barrier_;
  reports_.add(at_barrier ? "barrier that not all threads reach" : "deadlock", index_,
               {threads.front(), meeting->site, nullptr}, std::move(detail));
}

std::string Block::name_of(u32 thread) const {
  if (thread < launch_.threads) return text("thread %u", thread);
  if (thread < agent_of_warp(0)) return "a bulk copy";
  return text("a wgmma of warp %u", thread - agent_of_warp(0));
}

// --- memory ----------------------------------------------------------------------------------------------------------

bool Block::is_constant(const void* address) const {
  return (address >= &indices && address < &indices + 1) || image_.holds(address);
}

// Before its wait, a dependent grid must not even read memory that the grid in front leaves alone: the simulator does
// not know which memory that is.
void Block::check_grids(const Where& where) {
  if (threads_[thread_]->grids_ended) return;
  report("access to global memory before griddepcontrol.wait", where, "the grid in front may still run");
  stop();
}

void Block::read_global(const void* address, u32 bytes, const Where& where) {
  check_grids(where);
  if (global_.read(*this, address, bytes, where)) return;
  report("access outside an allocation", where,
         text("read of %u bytes at %s", bytes, global_.nearest(address).c_str()));
  stop();
}

void Block::write_global(const void* address, u32 bytes, const Where& where) {
  check_grids(where);
  if (global_.write(*this, address, bytes, where)) return;
  report("access outside an allocation", where,
         text("write of %u bytes at %s", bytes, global_.nearest(address).c_str()));
  stop();
}

void Block::check_alignment(const char* instruction, u64 address, u32 alignment, const Where& where) {
  if (address % alignment == 0) return;
  report("misaligned access", where,
         text("%s at address 0x%llx, which is no multiple of %u", instruction, static_cast<unsigned long long>(address),
              alignment));
  stop();  // as a chip does
}

void Block::report(const char* kind, const Where& where, std::string detail) {
  reports_.add(kind, index_, where, std::move(detail));
}

}  // namespace sim
