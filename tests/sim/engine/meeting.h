// Where threads wait: on their way into a barrier or an instruction of a whole warp.
#pragma once

#include "sim/engine.h"
#include "types.h"

namespace sim {

struct Meeting {
  const char* instruction = nullptr;
  Site site = {};
  u32 first = 0;    // thread that came first
  u32 arrived = 0;  // 0: nobody waits
};

}  // namespace sim
