// Meanings of templates/include/sage/ptx/grid_dependency.cuh: launches run one after another.
#pragma once

#include "sage/types.cuh"

namespace sage::ptx {

inline void launch_dependents() {}
inline void grid_dependency_wait() { sim::grid_dependency_wait(); }

}  // namespace sage::ptx
