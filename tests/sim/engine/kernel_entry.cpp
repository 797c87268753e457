// Compiled once per library, behind the rendered source, which -include names: functions by which the engine starts the
// source's entry points. SIM_ENTRIES names the entry points: SIM_ENTRY(first) SIM_ENTRY(second). No others are compiled.

namespace {

template <class Params>
unsigned params_bytes(void (*)(Params)) {
  return sizeof(Params);
}

// Accesses are not checked here: the struct comes from the host.
template <class Params>
__attribute__((no_sanitize("thread"))) void call(void (*kernel)(Params), const void* params) {
  kernel(*static_cast<const Params*>(params));
}

}  // namespace

#define SIM_ENTRY(kernel) \
  extern "C" unsigned sim_params_bytes_##kernel() { return params_bytes(kernel); } \
  extern "C" void sim_call_##kernel(const void* params) { call(kernel, params); }
SIM_ENTRIES

// Touches thread-local storage: the loader makes it at its first use.
static thread_local volatile char touched;
extern "C" __attribute__((no_sanitize("thread"))) void sim_make_static_shared_memory() { touched = 0; }
