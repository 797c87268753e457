// Compiled once per library: the rendered source as it stands, SIM_SOURCE, and how the engine starts its entry points.
// SIM_ENTRIES names these: SIM_ENTRY(first) SIM_ENTRY(second). Others of the source are not compiled.

#include SIM_SOURCE

namespace {

template <class Params>
unsigned params_bytes(void (*)(Params)) {
  return sizeof(Params);
}

// Not checked: the struct comes from the host.
template <class Params>
__attribute__((no_sanitize("thread"))) void call(void (*kernel)(Params), const void* params) {
  kernel(*static_cast<const Params*>(params));
}

}  // namespace

#define SIM_ENTRY(kernel) \
  extern "C" unsigned sim_params_bytes_##kernel() { return params_bytes(kernel); } \
  extern "C" void sim_call_##kernel(const void* params) { call(kernel, params); }
SIM_ENTRIES

// The loader makes thread-local storage when it is first used.
static thread_local volatile char touched;
extern "C" __attribute__((no_sanitize("thread"))) void sim_make_static_shared_memory() { touched = 0; }
