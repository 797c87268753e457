// Addresses of a loaded kernel: its code and constants, and its thread-local storage, which serves as its static shared
// memory.
#pragma once

#include "types.h"

namespace sim {

struct Image {
  const u8* base;  // program counters count from here
  const u8* begin;
  const u8* end;
  u8* thread_local_begin;  // of the running thread of the host
  u32 thread_local_bytes;

  static Image of(const void* code);
  bool holds(const void* address) const { return address >= begin && address < end; }
};

}  // namespace sim
