// The order of accesses: a vector clock per thread, as race detectors keep them. In addition to threads, agents access
// memory: the TMA unit, one agent for each barrier, and the tensor cores, one for each warp.
// Source: Flanagan & Freund, "FastTrack: Efficient and Precise Dynamic Race Detection", PLDI 2009.
#pragma once

#include <algorithm>
#include <iterator>
#include <unordered_map>
#include <vector>

#include "types.h"

namespace sim {

// A stretch of one thread between two of its synchronizations: the thread in the upper bits, its clock in the lower
// ones.
using Epoch = u32;
constexpr u32 kClockBits = 22;
constexpr u32 thread_of(Epoch epoch) { return epoch >> kClockBits; }
constexpr u32 clock_of(Epoch epoch) { return epoch & ((1u << kClockBits) - 1); }

class Order {
 public:
  // A vector clock: per thread and agent, the time up to which its accesses are ordered before.
  using Clock = std::vector<u32>;

  void start(u32 threads, u32 agents) {
    threads_ = threads, all_ = threads + agents;
    clocks_.assign(static_cast<size_t>(all_) * all_, 0);
    common_.assign(all_, 0);
    now_.resize(all_);
    for (u32 t = 0; t < all_; ++t) clock(t, t) = 0, advance(t);
  }

  Epoch now(u32 thread) const { return now_[thread]; }

  // Whether all accesses of an epoch are ordered before the next access of `thread`.
  bool before(Epoch epoch, u32 thread) const {
    const u32 other = thread_of(epoch);
    return (thread < threads_ && clock_of(epoch) <= common_[other]) ||
           clock_of(epoch) <= clocks_[thread * all_ + other];
  }

  // A barrier of all threads: every access before it is ordered before every access after it.
  void join_all() {
    for (u32 t = 0; t < threads_; ++t) {
      for (u32 u = 0; u < all_; ++u) common_[u] = std::max(common_[u], clock(t, u));
    }
    for (u32 t = 0; t < threads_; ++t) {
      std::copy(common_.begin(), common_.end(), &clock(t, 0));
      advance(t);
    }
  }

  // Adds the accesses of a thread or an agent up to now to a clock.
  void release(u32 thread, Clock& to) {
    to.resize(all_);
    for (u32 u = 0; u < all_; ++u) to[u] = std::max(to[u], clock(thread, u));
    advance(thread);
  }

  // What the accesses of a thread from now on are ordered after.
  void acquired(u32 thread, Clock& to) const {
    to.assign(clocks_.begin() + thread * all_, clocks_.begin() + (thread + 1) * all_);
  }

  // Orders the accesses of a thread from now on after all accesses of a clock.
  void acquire(u32 thread, const Clock& from) {
    for (u32 u = 0; u < from.size(); ++u) clock(thread, u) = std::max(clock(thread, u), from[u]);
  }

 private:
  u32& clock(u32 thread, u32 of) { return clocks_[thread * all_ + of]; }
  void advance(u32 thread) { now_[thread] = thread << kClockBits | ++clock(thread, thread); }

  u32 threads_ = 0, all_ = 0;
  std::vector<u32> clocks_;  // [all][all]: row t is the vector clock of thread or agent t
  // What nearly all look-ups find, kept apart from the rows, which are too many for the processor's caches: each thread's
  // and agent's epoch, and what all threads have been ordered after since the last barrier of all threads.
  std::vector<Epoch> now_;
  Clock common_;
};

// Sets of readers. A set is kept once, however many bytes have it. A new reader replaces the readers ordered before it:
// an access that is ordered after the new reader is ordered after those, too.
class ReaderSets {
 public:
  static constexpr u32 kEmpty = 0;

  void start() {
    sets_.assign(1, {});
    larger_.clear();
    std::fill(std::begin(recent_), std::end(recent_), Union{~0u, 0, 0});
  }

  u32 with(u32 set, Epoch reader, const Order& order) {
    Union& recent = recent_[(set * 0x9e3779b1u ^ reader * 0x85ebca6bu) / (0x100000000 / kRecent)];
    if (recent.set == set && recent.reader == reader) return recent.result;
    const auto [entry, is_new] = larger_.try_emplace(static_cast<u64>(set) << 32 | reader, 0);
    if (is_new) entry->second = make(set, reader, order);
    recent = {set, reader, entry->second};
    return recent.result;
  }

  const std::vector<Epoch>& members(u32 set) const { return sets_[set]; }

 private:
  struct Union {
    u32 set;
    Epoch reader;
    u32 result;
  };
  static constexpr u32 kRecent = 1024;

  u32 make(u32 set, Epoch reader, const Order& order) {
    std::vector<Epoch> members;  // sorted, as those of every set
    members.reserve(sets_[set].size() + 1);
    for (const Epoch other : sets_[set]) {
      if (!order.before(other, thread_of(reader))) members.push_back(other);
    }
    members.insert(std::lower_bound(members.begin(), members.end(), reader), reader);
    if (members == sets_[set]) return set;
    sets_.push_back(std::move(members));
    return static_cast<u32>(sets_.size() - 1);
  }

  std::vector<std::vector<Epoch>> sets_;
  std::unordered_map<u64, u32> larger_;  // by set and reader
  Union recent_[kRecent];                // a cache: most accesses are like one shortly before
};

}  // namespace sim
