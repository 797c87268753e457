// Fibers: stacks that run alternately on one thread of the host. A switch saves only the registers that a call
// preserves, and makes no system call.
// Source: System V AMD64 ABI, "Registers"; AAPCS64, "Parameter passing".
#pragma once

#include <cstddef>

#include "types.h"

namespace sim {

class Fiber {
 public:
  static constexpr size_t kStackBytes = 128 * 1024;

  Fiber();
  ~Fiber();
  Fiber(const Fiber&) = delete;

  void start(void (*body)());  // at the next resume(); body never returns
  void resume();               // from outside: runs until the fiber suspends
  void suspend();              // from inside: back to resume()

  const u8* stack() const { return stack_; }  // lowest address; the stack has kStackBytes

 private:
  u8* stack_;
  void* inside_ = nullptr;  // stack pointers of the side that does not run
  void* outside_ = nullptr;
};

}  // namespace sim
