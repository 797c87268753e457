// Ping-pong: a consumer waits before it issues the products of a step, and arrives for the other consumer when they are
// done. Consumer 0 issues first.
#pragma once

#include "sage/tile/pipeline.cuh"
#include "sage/ptx/barrier.cuh"

namespace sage {

// kActive: there are two consumers. Three have no order among themselves: nobody waits.
template <bool kActive>
struct PingPong {
  static constexpr i32 kSignallingNan = 0x7fa00000;

  i32 consumer;

  __device__ __forceinline__ void wait() const {
    if constexpr (kActive) ptx::barrier_sync(barrier(consumer), 2 * kWarpgroup);
  }
  __device__ __forceinline__ void arrive(u32 never = 0) const {
    if constexpr (kActive) ptx::barrier_arrive(barrier(1 - consumer) + never, 2 * kWarpgroup);
  }
  // Arrives between the row maxima and the exponentials; earlier or later is slower (docs/decisions.md). The compiler
  // would move the arrival, so two dependences pin it. The barrier's number depends on the maxima, by a comparison with
  // a signalling NaN, which no arithmetic produces. The exponentials depend on a load that is issued behind the arrival
  // (Mainloop::exponentiate()).
  template <i32 kRows>
  __device__ __forceinline__ void arrive_behind(const float (&own_largest)[kRows]) const {
    bool never = false;
#pragma unroll
    for (i32 r = 0; r < kRows; ++r) never |= __float_as_int(own_largest[r]) == kSignallingNan;
    arrive(never);
  }

 private:
  __device__ __forceinline__ static u32 barrier(i32 consumer) { return 1 + consumer; }  // 0 is __syncthreads
};

}  // namespace sage
