// Programmatic dependent launch: a grid that the host launches with programmatic stream serialization may start while
// the grid before it in the stream still runs.
// Source: PTX ISA, "griddepcontrol"; CUDA C++ programming guide, "Programmatic Dependent Launch and Synchronization".
#pragma once

#include "sage/types.cuh"

namespace sage::ptx {

// Lets the next grid start once every block of this grid has called this or has ended. This grid may not have written
// its results by then: the next grid must call grid_dependency_wait() before it touches global memory. A grid that
// calls this without waiting itself must be an ordinary launch: else it would overwrite what the grid before it still
// reads. Does nothing on chips before sm_90.
__device__ __forceinline__ void launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// Waits until the grids before this one have ended and their writes are visible. Returns at once in an ordinary launch.
__device__ __forceinline__ void grid_dependency_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

}  // namespace sage::ptx
