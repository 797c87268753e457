// Instructions of sm_90, which the wrappers of sage/ptx call, for the thread or the warp that runs.
// Source: PTX ISA, "wgmma", "mbarrier", "cp.async.bulk", "barrier", "fence", "setmaxnreg", "griddepcontrol".

#include "block.h"

namespace sim {

namespace {

Where here(Site site) { return block->here(site); }

// The effect of each instruction of a whole warp, given the arguments of its lanes.
void fence(void* const (&)[kLanes]) { block->products().fence(); }
void commit(void* const (&)[kLanes]) { block->products().commit(); }
void wait(void* const (&lanes)[kLanes]) {
  block->products().wait(*block, block->warp(), *static_cast<const u32*>(lanes[0]));
}
void multiply(void* const (&lanes)[kLanes]) { block->products().issue(*block, block->warp(), lanes); }
void take_registers(void* const (&lanes)[kLanes]) { block->set_registers(*static_cast<const u32*>(lanes[0])); }

}  // namespace

void wgmma(const char* instruction, WarpgroupProduct lane) { block->together(instruction, &lane, multiply, lane.site); }

void wgmma_fence(Site site) { block->together("wgmma.fence", nullptr, fence, site); }
void wgmma_commit(Site site) { block->together("wgmma.commit_group", nullptr, commit, site); }

void wgmma_wait(unsigned pending_groups, Site site) {
  block->together("wgmma.wait_group", &pending_groups, wait, site);
}

void barrier_arrive(unsigned barrier, unsigned threads, bool waits, Site site) {
  block->named_barriers.arrive(*block, barrier, threads, waits, here(site));
}

void mbarrier_init(unsigned barrier, unsigned arrivals, Site site) {
  block->memory_barriers.init(*block, barrier, arrivals, here(site));
}

void mbarrier_arrive(unsigned barrier, unsigned bytes, Site site) {
  block->memory_barriers.arrive(*block, barrier, bytes, here(site));
}

void mbarrier_wait(unsigned barrier, unsigned parity, Site site) {
  block->memory_barriers.wait(*block, barrier, parity, here(site));
}

void bulk_copy(unsigned shared, const void* global, unsigned bytes, unsigned barrier, Site site) {
  block->bulk_copies.begin(*block, shared, global, bytes, barrier, here(site));
}

void bulk_store(void* global, unsigned shared, unsigned bytes, bool adds, Site site) {
  block->bulk_stores().begin(*block, global, shared, bytes, adds, here(site));
}
void see_flag() { block->bulk_stores().see_flag(); }
void fence_gpu() { block->bulk_stores().fence(); }
void check_before_flag(Site site) { block->bulk_stores().check_before_flag(*block, here(site)); }
void bulk_commit() { block->bulk_stores().commit(); }
void bulk_wait(bool reads, Site site) { block->bulk_stores().wait(*block, reads, here(site)); }

void fence_mbarrier_init() { block->memory_barriers.fence(block->thread()); }
void fence_proxy_async() {
  block->fence_proxy();
  block->memory_barriers.fence(block->thread());
}

void grid_dependency_wait() { block->wait_for_grids(); }

void set_registers(unsigned registers, Site site) { block->together("setmaxnreg", &registers, take_registers, site); }

}  // namespace sim
