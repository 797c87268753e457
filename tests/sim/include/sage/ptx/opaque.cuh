// Meanings of templates/include/sage/ptx/opaque.cuh.
#pragma once

#include "sage/types.cuh"

namespace sage::ptx {

inline u32 opaque(u32 x) { return x; }

}  // namespace sage::ptx
