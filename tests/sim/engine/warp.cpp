// Instructions of a thread or a warp other than arithmetic: exchange among lanes, atomics, loads and stores.
// Source: PTX ISA, "shfl.sync", "vote.sync", "ldmatrix", "stmatrix", "ld", "st"; CUDA C++ programming guide, "Atomic
// Functions".

#include <cstring>

#include "block.h"

namespace sim {

void together(const char* instruction, void* lane, Meaning meaning, Site site) {
  block->together(instruction, lane, meaning, site);
}

bool synchronize(const char* name, bool predicate, Site site) { return block->synchronize(name, predicate, site); }

// --- exchange --------------------------------------------------------------------------------------------------------

namespace {

struct Shuffle {
  float x, result;
  int lane_mask;
};

void shuffle(void* const (&lanes)[kLanes]) {
  const auto of_lane = [&](int lane) -> Shuffle& { return *static_cast<Shuffle*>(lanes[lane]); };
  for (int lane = 0; lane < kLanes; ++lane) of_lane(lane).result = of_lane((lane ^ of_lane(lane).lane_mask) % kLanes).x;
}

struct Read {
  int x, lane, result;
};

void read_lane(void* const (&lanes)[kLanes]) {
  const auto of_lane = [&](int lane) -> Read& { return *static_cast<Read*>(lanes[lane]); };
  for (int lane = 0; lane < kLanes; ++lane) of_lane(lane).result = of_lane(of_lane(lane).lane & (kLanes - 1)).x;
}

// Orders the accesses of every lane so far before those of every lane from now on.
void order_lanes(void* const (&lanes)[kLanes]) {
  Order::Clock joined;
  for (void* lane : lanes) block->order.release(*static_cast<u32*>(lane), joined);
  for (void* lane : lanes) block->order.acquire(*static_cast<u32*>(lane), joined);
}

void take_first(void* const (&lanes)[kLanes]) {
  const int first = *static_cast<int*>(lanes[0]);
  for (void* lane : lanes) *static_cast<int*>(lane) = first;
}

void vote(void* const (&lanes)[kLanes]) {
  bool result = false;
  for (void* lane : lanes) result |= *static_cast<bool*>(lane);
  for (void* lane : lanes) *static_cast<bool*>(lane) = result;
}

void collect_votes(void* const (&lanes)[kLanes]) {
  u32 bits = 0;
  for (u32 lane = 0; lane < kLanes; ++lane) bits |= (*static_cast<u32*>(lanes[lane]) & 1) << lane;
  for (void* lane : lanes) *static_cast<u32*>(lane) = bits;
}

}  // namespace

float shuffle_xor(float x, int lane_mask, Site site) {
  Shuffle lane{x, 0.0f, lane_mask};
  block->together("shfl.sync.bfly", &lane, shuffle, site);
  return lane.result;
}

void synchronize_warp(Site site) {
  u32 thread = block->thread();
  block->together("bar.warp.sync", &thread, order_lanes, site);
}

int shuffle(int x, int lane, Site site) {
  Read read{x, lane, 0};
  block->together("shfl.sync.idx", &read, read_lane, site);
  return read.result;
}

int uniform(int x, Site site) {
  int first = x;
  block->together("shfl.sync.idx", &first, take_first, site);
  if (first != x) block->report("not uniform", block->here(site), "a lane has another value than the first");
  return first;
}

bool any(bool predicate, Site site) {
  block->together("vote.sync.any", &predicate, vote, site);
  return predicate;
}

u32 ballot(bool predicate, Site site) {
  u32 vote = predicate;
  block->together("vote.sync.ballot", &vote, collect_votes, site);
  return vote;
}

namespace {

template <class T, class Operation>
T atomic(const char* name, T* address, Operation operation, Site site) {
  block->check_alignment(name, reinterpret_cast<u64>(address), sizeof(T), block->here(site));
  if (const u32 shared = block->shared.address_of(address); shared != SharedMemory::kNone) {
    block->shared.update(shared, sizeof(T), block->here(site));
  } else {
    block->read_global(address, sizeof(T), block->here(site));
    block->write_global(address, sizeof(T), block->here(site));
  }
  const T old = *address;
  *address = operation(old);
  return old;
}

}  // namespace

unsigned atomic_or(unsigned* address, unsigned value, Site site) {
  return atomic("atomicOr", address, [&](unsigned old) { return old | value; }, site);
}

unsigned atomic_add(unsigned* address, unsigned value, Site site) {
  return atomic("atomicAdd", address, [&](unsigned old) { return old + value; }, site);
}

// --- shared memory ---------------------------------------------------------------------------------------------------

unsigned shared_address(const void* pointer, Site site) {
  const u32 address = block->shared.address_of(pointer);
  if (address != SharedMemory::kNone) return address;
  block->report("access outside an allocation", block->here(site),
                "the shared address of what is not in shared memory");
  block->stop();
}

void load_shared(const char* instruction, void* to, unsigned address, unsigned bytes, Site site) {
  block->check_alignment(instruction, address, bytes, block->here(site));
  block->shared.read(address, bytes, block->here(site));
  std::memcpy(to, block->shared.pointer_to(address), bytes);
}

void store_shared(const char* instruction, unsigned address, const void* from, unsigned bytes, Site site) {
  block->check_alignment(instruction, address, bytes, block->here(site));
  block->shared.write(address, bytes, block->here(site));
  std::memcpy(block->shared.pointer_to(address), from, bytes);
}

void store_global(const char* instruction, void* address, const void* from, unsigned bytes, Site site) {
  block->check_alignment(instruction, reinterpret_cast<u64>(address), bytes, block->here(site));
  block->write_global(address, bytes, block->here(site));
  std::memcpy(address, from, bytes);
}

void copy_async(unsigned shared, const void* global, unsigned bytes, Site site) {
  block->copies().begin(*block, shared, global, bytes, block->here(site));
}

void commit_copies() { block->copies().commit(); }
void wait_for_copies(int pending_groups) {
  block->copies().wait(*block, static_cast<u32>(pending_groups), block->thread());
}

// --- ldmatrix, stmatrix ----------------------------------------------------------------------------------------------

namespace {

struct MatrixLoad {
  unsigned* d;
  u16 row[8];
};

// Matrix i has its rows from the lanes 8i to 8i + 7; lane 4g + t receives the elements (g, 2t) and (g, 2t + 1), or with
// .trans (2t, g) and (2t + 1, g).
template <bool kTransposed>
void load_matrices(void* const (&lanes)[kLanes]) {
  const auto of_lane = [&](int lane) -> const MatrixLoad& { return *static_cast<const MatrixLoad*>(lanes[lane]); };
  for (int lane = 0; lane < kLanes; ++lane) {
    const int g = lane / 4, t = lane % 4;
    for (int i = 0; i < 4; ++i) {
      const auto element = [&](int row, int column) { return of_lane(8 * i + row).row[column]; };
      const u32 first = kTransposed ? element(2 * t, g) : element(g, 2 * t);
      const u32 second = kTransposed ? element(2 * t + 1, g) : element(g, 2 * t + 1);
      of_lane(lane).d[i] = first | second << 16;
    }
  }
}

}  // namespace

void ldmatrix_x4(unsigned (&d)[4], unsigned shared, bool transposed, Site site) {
  MatrixLoad lane{d, {}};
  load_shared("ldmatrix", lane.row, shared, sizeof lane.row, site);
  block->together("ldmatrix", &lane, transposed ? load_matrices<true> : load_matrices<false>, site);
}

namespace {

struct MatrixStore {
  const unsigned* s;
  u16 row[8];
};

// stmatrix, the reverse: lane 8i + g gets row g of matrix i, whose words the lanes 4g to 4g + 3 hold.
void gather_rows(void* const (&lanes)[kLanes]) {
  const auto of_lane = [&](int lane) -> MatrixStore& { return *static_cast<MatrixStore*>(lanes[lane]); };
  for (int lane = 0; lane < kLanes; ++lane) {
    for (int column = 0; column < 8; ++column) {
      const u32 word = of_lane(lane % 8 * 4 + column / 2).s[lane / 8];
      of_lane(lane).row[column] = static_cast<u16>(word >> 16 * (column % 2));
    }
  }
}

}  // namespace

void stmatrix_x4(unsigned shared, const unsigned (&s)[4], Site site) {
  MatrixStore lane{s, {}};
  block->together("stmatrix", &lane, gather_rows, site);
  store_shared("stmatrix", shared, lane.row, sizeof lane.row, site);
}

}  // namespace sim
