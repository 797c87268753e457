// The engine's interface to Python (simulator.py): buffers, launches, reports.

#include <algorithm>
#include <iterator>
#include <numeric>
#include <vector>

#include "block.h"
#include "chip.h"

namespace sim {
namespace {

GlobalMemory memory;
Reports reports;
Chip running_chip;
int bug = 0;

std::vector<u32> order_of_blocks(u32 count, u64 seed, bool in_order) {
  std::vector<u32> order(count);
  std::iota(order.begin(), order.end(), 0u);
  if (in_order) return order;
  Random random(seed);
  for (u32 i = count; i > 1; --i) std::swap(order[i - 1], order[random.below(i)]);
  return order;
}

}  // namespace

const Chip& chip() { return running_chip; }
int planted_bug() { return bug; }

}  // namespace sim

extern "C" {

void sim_clear_buffers() { sim::memory.clear(); }

// `state`: GlobalMemory::State of every byte.
void sim_add_buffer(const char* name, void* base, sim::u64 bytes, const sim::u8* state) {
  sim::memory.add(name, static_cast<sim::u8*>(base), bytes, state);
}

// Of the buffer that was added as the `index`-th, from 0.
void sim_get_states(sim::u32 index, sim::u8* states) { sim::memory.get_states(index, states); }

void sim_set_exp2(const sim::u32* up, const sim::u32* down) { sim::set_exp2(up, down); }

// From now on kernels have this bug, by its number; 0: none.
void sim_plant(sim::i32 number) { sim::bug = number; }

// Runs the blocks one after another, in an order that the seed determines where it is left open, until a fault ends one
// early. False for an arch older than all of kChips.
bool sim_launch(const sim::Launch* launch) {
  const auto later = std::find_if(std::begin(sim::kChips), std::end(sim::kChips),
                                  [&](const sim::Chip& chip) { return chip.arch > launch->arch; });
  if (later == std::begin(sim::kChips)) return false;
  sim::running_chip = *std::prev(later);
  sim::Block block(*launch, sim::memory, sim::reports);
  for (const sim::u32 index : sim::order_of_blocks(launch->blocks, launch->seed, launch->in_order)) {
    if (!block.run(index)) break;
  }
  return true;
}

struct PythonReport {
  const char *kind, *detail, *file;
  sim::u64 pc;
  sim::i32 line;
  sim::u32 block, thread, count;
};

sim::u32 sim_report_count() { return static_cast<sim::u32>(sim::reports.all().size()); }

void sim_get_report(sim::u32 index, PythonReport* out) {
  const sim::Report& r = sim::reports.all()[index];
  *out = {r.kind.c_str(), r.detail.c_str(), r.file.c_str(), r.pc, r.line, r.block, r.thread, r.count};
}

}  // extern "C"
