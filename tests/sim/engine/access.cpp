// The functions that compiled code calls at accesses to memory. With `-fsanitize=thread` it calls one before every read
// and write; the engine replaces the sanitizer's run-time library. With `-fsanitize=alignment,bounds` it calls one
// where an access is misaligned for its type, or an index lies outside an array.
// Source: gcc/sanitizer.def; compiler-rt/lib/ubsan/ubsan_handlers.h.

#include <cstddef>
#include <cstring>

#include "block.h"

namespace sim {
namespace {

enum Access { kRead, kWrite };

[[gnu::noinline]] void check_beyond_stack(const void* address, u32 bytes, Access access, const void* pc) {
  const Where where{block->thread(), {}, pc};
  block->check_steps(where);
  if (running.holds(address)) return;
  if (const u32 shared = block->shared.address_of(address)) {
    if (access == kRead) block->shared.read(shared, bytes, where);
    else block->shared.write(shared, bytes, where);
  } else if (!block->is_constant(address)) {
    if (access == kRead) block->read_global(address, bytes, where);
    else block->write_global(address, bytes, where);
  }
}

inline void check(const void* address, u32 bytes, Access access, const void* pc) {
  if (++running.steps <= kMostSteps && running.holds(address)) [[likely]]
    return;  // a thread's own variables, as nearly all accesses
  check_beyond_stack(address, bytes, access, pc);
}

}  // namespace
}  // namespace sim

#define SIM_CALLER __builtin_return_address(0)

#define SIM_ACCESS(bytes) \
  void __tsan_read##bytes(void* address) { sim::check(address, bytes, sim::kRead, SIM_CALLER); } \
  void __tsan_write##bytes(void* address) { sim::check(address, bytes, sim::kWrite, SIM_CALLER); } \
  void __tsan_unaligned_read##bytes(void* address) { sim::check(address, bytes, sim::kRead, SIM_CALLER); } \
  void __tsan_unaligned_write##bytes(void* address) { sim::check(address, bytes, sim::kWrite, SIM_CALLER); }

extern "C" {

void __tsan_init() {}

SIM_ACCESS(1)
SIM_ACCESS(2)
SIM_ACCESS(4)
SIM_ACCESS(8)
SIM_ACCESS(16)

void __tsan_read_range(void* address, size_t bytes) {
  sim::check(address, static_cast<sim::u32>(bytes), sim::kRead, SIM_CALLER);
}
void __tsan_write_range(void* address, size_t bytes) {
  sim::check(address, static_cast<sim::u32>(bytes), sim::kWrite, SIM_CALLER);
}

void* __tsan_memcpy(void* to, const void* from, size_t bytes) {
  sim::check(from, static_cast<sim::u32>(bytes), sim::kRead, SIM_CALLER);
  sim::check(to, static_cast<sim::u32>(bytes), sim::kWrite, SIM_CALLER);
  return std::memcpy(to, from, bytes);
}
void* __tsan_memset(void* to, int value, size_t bytes) {
  sim::check(to, static_cast<sim::u32>(bytes), sim::kWrite, SIM_CALLER);
  return std::memset(to, value, bytes);
}

// The compiler's data on a faulty access; the structs of both handlers begin so.
struct FaultyPlace {
  const char* file;
  unsigned line, column;
};

void __ubsan_handle_type_mismatch_v1(const FaultyPlace* place, void* address) {
  sim::block->report("misaligned access", sim::block->here({place->file, static_cast<int>(place->line)}),
                     sim::text("address %p, which is no multiple of what its type asks for", address));
  sim::block->stop();  // as a chip does
}

void __ubsan_handle_out_of_bounds(const FaultyPlace* place, void* index) {
  sim::block->report("index outside an array", sim::block->here({place->file, static_cast<int>(place->line)}),
                     sim::text("index %lld", static_cast<long long>(reinterpret_cast<sim::i64>(index))));
  sim::block->stop();
}

}  // extern "C"
