// A driver with one GPU a context, for tests of what is said to it: it remembers the first launches and runs nothing.
// Built as libcuda.so.1, which cuda-bindings then calls instead of the real one. The tests set `fake_*` and read it.

#include <stdint.h>
#include <stdio.h>
#include <string.h>

#define MAX_PARAMS 512
#define MAX_LAUNCHES 64
enum { SUCCESS = 0, INVALID_VALUE = 1, INVALID_IMAGE = 200, INVALID_CONTEXT = 201, INVALID_HANDLE = 400, NOT_FOUND = 500 };
enum { MAX_DYNAMIC_SHARED = 8, PROGRAMMATIC_STREAM_SERIALIZATION = 6 };

// CUlaunchAttribute and CUlaunchConfig of cuda.h.
typedef struct { int id, unused, value[16]; } Attribute;
typedef struct {
  unsigned grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes;
  void* stream;
  Attribute* attributes;
  unsigned num_attributes;
} Config;
typedef struct { int device; } Context;
typedef struct { Context* context; } Module;
typedef struct { Context* context; char entry[256]; int shared_limit; } Function;

int fake_version = 12090;    // what cuDriverGetVersion says
int fake_status = SUCCESS;   // what a launch comes to
char fake_refused[256];      // entry of the only kernel that fake_status is for; empty for all
int fake_params_bytes;       // how many of a launch's struct to keep
int fake_launches;           // since the driver was loaded, or since a test set it to zero
char fake_words[MAX_LAUNCHES][256];
unsigned char fake_params[MAX_LAUNCHES][MAX_PARAMS];
int fake_images_end_in_zero; // of images loaded, as PTX must
static int contexts_retained;

static Context contexts[2] = {{0}, {1}};
static Module modules[64];
static Function functions[64];
static int num_modules, num_functions;
static __thread Context* stack[16];
static __thread int depth;

int fake_depth(void) { return depth; }
int fake_retained(void) { return contexts_retained; }

static Context* current(void) { return depth ? stack[depth - 1] : NULL; }

int cuInit(unsigned flags) { return flags ? INVALID_VALUE : SUCCESS; }

int cuDriverGetVersion(int* version) { *version = fake_version; return SUCCESS; }

int cuDeviceGet(int* device, int ordinal) {
  if (ordinal < 0 || ordinal > 1) return INVALID_VALUE;
  *device = ordinal;
  return SUCCESS;
}

int cuDevicePrimaryCtxRetain(Context** context, int device) {
  ++contexts_retained;
  *context = &contexts[device];
  return SUCCESS;
}

int cuCtxGetCurrent(Context** context) { *context = current(); return SUCCESS; }

int cuCtxPushCurrent_v2(Context* context) { stack[depth++] = context; return SUCCESS; }

int cuCtxPopCurrent_v2(Context** context) {
  if (!depth) return INVALID_CONTEXT;
  *context = stack[--depth];
  return SUCCESS;
}

int cuModuleLoadData(Module** module, const void* image) {
  if (!current()) return INVALID_CONTEXT;
  if (memcmp(image, "image", 5)) return INVALID_IMAGE;
  fake_images_end_in_zero = strlen(image) == strlen("image of a kernel");
  *module = &modules[num_modules++];
  (*module)->context = current();
  return SUCCESS;
}

int cuModuleGetFunction(Function** function, Module* module, const char* entry) {
  if (module->context != current()) return INVALID_CONTEXT;
  if (!strcmp(entry, "nothing")) return NOT_FOUND;
  *function = &functions[num_functions++];
  (*function)->context = module->context;
  strncpy((*function)->entry, entry, sizeof (*function)->entry - 1);
  return SUCCESS;
}

int cuFuncSetAttribute(Function* function, int attribute, int value) {
  if (attribute != MAX_DYNAMIC_SHARED) return INVALID_VALUE;
  function->shared_limit = value;
  return SUCCESS;
}

static int is_programmatic(const Attribute* attribute) {
  return attribute->id == PROGRAMMATIC_STREAM_SERIALIZATION && attribute->value[0] == 1;
}

int cuLaunchKernelEx(const Config* config, Function* function, void** params, void** extra) {
  if (!current()) return INVALID_CONTEXT;
  if (function->context != current()) return INVALID_HANDLE;
  if (extra || config->shared_bytes > (unsigned)function->shared_limit) return INVALID_VALUE;
  if (config->num_attributes > 1 || (config->num_attributes && !is_programmatic(config->attributes))) return INVALID_VALUE;
  if (fake_launches == MAX_LAUNCHES) return INVALID_VALUE;
  if (fake_status && (!*fake_refused || !strcmp(fake_refused, function->entry))) return fake_status;
  memcpy(fake_params[fake_launches], params[0], fake_params_bytes);
  snprintf(fake_words[fake_launches++], sizeof *fake_words,
           "%.100s on %d: grid %u %u %u, block %u %u %u, %u bytes, stream %#lx%s", function->entry,
           function->context->device, config->grid_x, config->grid_y, config->grid_z, config->block_x, config->block_y,
           config->block_z, config->shared_bytes, (unsigned long)(uintptr_t)config->stream,
           config->num_attributes ? ", programmatic" : "");
  return SUCCESS;
}

int cuLaunchKernel(Function* function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                   unsigned block_y, unsigned block_z, unsigned shared_bytes, void* stream, void** params,
                   void** extra) {
  const Config config = {grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes, stream, NULL, 0};
  return cuLaunchKernelEx(&config, function, params, extra);
}

int cuGetErrorName(int status, const char** name) {
  *name = status == INVALID_VALUE     ? "CUDA_ERROR_INVALID_VALUE"
          : status == INVALID_IMAGE   ? "CUDA_ERROR_INVALID_IMAGE"
          : status == INVALID_CONTEXT ? "CUDA_ERROR_INVALID_CONTEXT"
          : status == INVALID_HANDLE  ? "CUDA_ERROR_INVALID_HANDLE"
          : status == NOT_FOUND       ? "CUDA_ERROR_NOT_FOUND"
          : status == 700             ? "CUDA_ERROR_ILLEGAL_ADDRESS"
                                      : NULL;
  return *name ? SUCCESS : INVALID_VALUE;
}

int cuGetErrorString(int status, const char** text) {
  *text = status == INVALID_IMAGE ? "device kernel image is invalid" : NULL;  // an older driver knows fewer
  return *text ? SUCCESS : INVALID_VALUE;
}

#define ENTRY(name, symbol) {#name, (void*)symbol}
static const struct { const char* name; void* symbol; } entries[] = {
    ENTRY(cuInit, cuInit), ENTRY(cuDriverGetVersion, cuDriverGetVersion), ENTRY(cuDeviceGet, cuDeviceGet),
    ENTRY(cuDevicePrimaryCtxRetain, cuDevicePrimaryCtxRetain), ENTRY(cuCtxGetCurrent, cuCtxGetCurrent),
    ENTRY(cuCtxPushCurrent, cuCtxPushCurrent_v2), ENTRY(cuCtxPopCurrent, cuCtxPopCurrent_v2),
    ENTRY(cuModuleLoadData, cuModuleLoadData), ENTRY(cuModuleGetFunction, cuModuleGetFunction),
    ENTRY(cuFuncSetAttribute, cuFuncSetAttribute), ENTRY(cuLaunchKernel, cuLaunchKernel),
    ENTRY(cuLaunchKernelEx, cuLaunchKernelEx), ENTRY(cuGetErrorString, cuGetErrorString),
};

// How cuda-bindings finds every function: by its name without the suffix of its version.
int cuGetProcAddress_v2(const char* name, void** function, int version, uint64_t flags, int* found) {
  (void)version, (void)flags;
  *function = NULL;
  for (unsigned i = 0; i < sizeof entries / sizeof *entries; ++i)
    if (!strcmp(entries[i].name, name)) *function = entries[i].symbol;
  if (found) *found = *function ? 0 : 1;
  return *function ? SUCCESS : NOT_FOUND;
}
