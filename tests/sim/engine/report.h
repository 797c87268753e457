// The faults that the checks find. A fault is kept once for each kind and place, with the first block and thread that
// showed it.
#pragma once

#include <string>
#include <vector>

#include "sim/engine.h"
#include "types.h"

namespace sim {

// The thread of an event and its place in the kernel: a site for the wrappers of sage/ptx, a program counter for plain
// memory accesses.
struct Where {
  u32 thread;
  Site site;
  const void* pc;
};

struct Report {
  std::string kind, detail, file;
  int line;
  u64 pc;  // offset in the kernel's image where no file is known, else 0
  u32 block, thread, count;
};

class Reports {
 public:
  void clear(const void* image);  // where the kernel's code is loaded
  void add(const char* kind, u32 block, const Where& where, std::string detail);

  const std::vector<Report>& all() const { return all_; }

 private:
  std::vector<Report> all_;
  const void* image_ = nullptr;
};

std::string text(const char* format, ...) __attribute__((format(printf, 1, 2)));

// "0-31, 40": a set of threads.
std::string ranges(const std::vector<u32>& ascending);

}  // namespace sim
