// Meanings of templates/include/sage/ptx/special.cuh.
#pragma once

#include "sage/types.cuh"

namespace sage::ptx {

inline u32 block_index() { return blockIdx.x; }
inline u32 grid_blocks() { return gridDim.x; }
inline u32 thread_index() { return threadIdx.x; }

}  // namespace sage::ptx
