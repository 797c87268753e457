// Compiled once per kernel: the rendered source as it stands, SIM_SOURCE, and how the engine starts its entry point,
// SIM_KERNEL.

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

extern "C" unsigned sim_params_bytes() { return params_bytes(SIM_KERNEL); }
extern "C" void sim_call(const void* params) { call(SIM_KERNEL, params); }

// The loader makes thread-local storage when it is first used.
static thread_local volatile char touched;
extern "C" __attribute__((no_sanitize("thread"))) void sim_make_static_shared_memory() { touched = 0; }
