// Programmatic dependent launch: a grid that the host launched so may start while the grid before it in the stream still
// runs.
// Source: PTX ISA, "griddepcontrol"; CUDA C++ programming guide, "Programmatic Dependent Launch and Synchronization".
#pragma once

#include "sage/types.cuh"

namespace sage::ptx {

// The next grid may start when every block of this one has called this or has ended, whatever this grid has written by then:
// the next grid must call grid_dependency_wait() before it touches global memory. A grid that calls this without waiting must
// itself be an ordinary launch: else it would overwrite what the grid before still reads. Nothing on chips before sm_90.
__device__ __forceinline__ void launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// Waits until the grids before this one have ended and all that they wrote can be read. Ends at once where the launch was an
// ordinary one.
__device__ __forceinline__ void grid_dependency_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

}  // namespace sage::ptx
