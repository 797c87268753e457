// Random numbers that a seed determines on every machine.
// Source: Steele, Lea & Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014 (SplitMix64).
#pragma once

#include "types.h"

namespace sim {

class Random {
 public:
  explicit Random(u64 seed) : state_(seed) {}

  u64 next() {
    u64 x = state_ += 0x9e3779b97f4a7c15;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
    x = (x ^ x >> 27) * 0x94d049bb133111eb;
    return x ^ x >> 31;
  }

  u32 below(u32 limit) { return static_cast<u32>((next() >> 32) * limit >> 32); }

 private:
  u64 state_;
};

}  // namespace sim
