// What a simulated kernel asks of the engine. Everything here runs in the fiber of one CUDA thread; functions that a
// whole warp or block takes part in return once all of it has arrived. Shared addresses are 32-bit, as instructions
// take them. Sites say where in the kernel a call stands, for reports.
#pragma once

namespace sim {

struct Site {
  const char* file;
  int line;
  static constexpr Site here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) { return {file, line}; }
};

struct Index {
  unsigned x, y, z;
};

// --- planted bugs (schemata.py) ---------------------------------------------------------------------------------------

// The number of the bug that is there; the same throughout a launch.
__attribute__((const)) int planted_bug();
inline bool planted(int number) { return planted_bug() == number; }

// --- exchange --------------------------------------------------------------------------------------------------------

constexpr int kLanes = 32;

// An instruction that all lanes of a warp execute together: the last lane to arrive runs `meaning` on what each of them
// brought, lane by lane, and then all go on.
using Meaning = void (*)(void* const (&lanes)[kLanes]);
void together(const char* instruction, void* lane, Meaning meaning, Site site);

// A barrier of the whole block; returns whether the predicate held in every thread.
bool synchronize(const char* name, bool predicate, Site site);
void synchronize_warp(Site site);

float shuffle_xor(float x, int lane_mask, Site site);
int shuffle(int x, int lane, Site site);
int uniform(int x, Site site);
bool any(bool predicate, Site site);
unsigned ballot(bool predicate, Site site);
unsigned atomic_or(unsigned* address, unsigned value, Site site);
unsigned atomic_add(unsigned* address, unsigned value, Site site);

// --- shared memory by its 32-bit addresses ---------------------------------------------------------------------------

unsigned shared_address(const void* pointer, Site site);

// `bytes` is also the alignment that the instruction asks for.
void load_shared(const char* instruction, void* to, unsigned address, unsigned bytes, Site site);
void store_shared(const char* instruction, unsigned address, const void* from, unsigned bytes, Site site);
void store_global(const char* instruction, void* address, const void* from, unsigned bytes, Site site);

void copy_async(unsigned shared, const void* global, unsigned bytes, Site site);
void commit_copies();
void wait_for_copies(int pending_groups);

// --- matrices --------------------------------------------------------------------------------------------------------

// Operands of one lane; words in the layouts of the PTX ISA's fragments. d may be c.
struct Product {
  unsigned* d;
  const unsigned* a;
  unsigned b[2];
  const unsigned* c;
};
struct ScaledProduct {
  Product product;
  unsigned a_scale, b_scale;  // words of scales, of which selectors name lanes and bytes
  unsigned b_lane;            // of a quad, the lane whose word has the scales of B
};
void mma_s8(void* const (&lanes)[kLanes]);
void mma_u8s8(void* const (&lanes)[kLanes]);
void mma_s4(void* const (&lanes)[kLanes]);
void mma_f16(void* const (&lanes)[kLanes]);
void mma_bf16(void* const (&lanes)[kLanes]);
void mma_e4m3_f32(void* const (&lanes)[kLanes]);
void mma_e4m3_f16(void* const (&lanes)[kLanes]);
void mma_mxf8_e4m3(void* const (&lanes)[kLanes]);  // these two of lanes' ScaledProduct
void mma_nvfp4(void* const (&lanes)[kLanes]);

void ldmatrix_x4(unsigned (&d)[4], unsigned shared, bool transposed, Site site);
void stmatrix_x4(unsigned shared, const unsigned (&s)[4], Site site);

// The type of A and B. Products of s8 are in s32, all others in f32.
enum class WarpgroupTypes { kS8, kE4m3, kF16, kBf16 };

// What a lane gives to a product of its warpgroup. d: columns / 2 words; a: 4 words, or null where A is in shared
// memory.
struct WarpgroupProduct {
  WarpgroupTypes types;
  unsigned* d;
  const unsigned* a;
  unsigned long long a_matrix, b_matrix;  // descriptors
  unsigned columns;
  bool accumulate;
  bool rows_of_k;    // of B, which is else K-major
  bool a_rows_of_k;  // of A in shared memory, likewise
  Site site;
};
void wgmma(const char* instruction, WarpgroupProduct lane);
void wgmma_fence(Site site);
void wgmma_commit(Site site);
void wgmma_wait(unsigned pending_groups, Site site);

// --- grids -----------------------------------------------------------------------------------------------------------

void grid_dependency_wait();

// --- barriers and the TMA unit ------------------------------------------------------------------------------------

void barrier_arrive(unsigned barrier, unsigned threads, bool waits, Site site);
void mbarrier_init(unsigned barrier, unsigned arrivals, Site site);
void mbarrier_arrive(unsigned barrier, unsigned bytes, Site site);
void mbarrier_wait(unsigned barrier, unsigned parity, Site site);
void bulk_copy(unsigned shared, const void* global, unsigned bytes, unsigned barrier, Site site);
void bulk_store(void* global, unsigned shared, unsigned bytes, bool adds, Site site);
void see_flag();
void fence_gpu();
void check_before_flag(Site site);
void bulk_commit();
void bulk_wait(bool reads, Site site);
void fence_mbarrier_init();
void fence_proxy_async();
void set_registers(unsigned registers, Site site);

// --- scalars ---------------------------------------------------------------------------------------------------------

float exp2_ftz(float x);
void set_exp2(const unsigned* up, const unsigned* down);  // a chip's own; scalars.cpp
float log2(float x);
float reciprocal_ftz(float x);
float max_nan(float a, float b);
unsigned permute_bytes(unsigned a, unsigned b, unsigned selector);
float from_f16(unsigned short x);
unsigned short to_f16(float x);
unsigned short to_bf16(float x);
unsigned char to_e4m3(float x);
float from_e4m3(unsigned char x);
unsigned char to_e2m1(float x);

}  // namespace sim
