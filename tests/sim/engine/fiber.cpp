#include "fiber.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>

// void sim_switch(void** from, void* to): saves this stack's pointer in *from and switches to the stack `to`, where an
// earlier call of sim_switch then returns.
extern "C" void sim_switch(void** from, void* to);

#if defined(__x86_64__)
asm(R"(
.text
.globl sim_switch
.type sim_switch, @function
sim_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size sim_switch, . - sim_switch
)");
// kFrame: words at the top of a stack that does not run yet. kReturn: the one that holds the return address. 6
// registers lie below the return address; with it taken off, the stack is 8 bytes off a multiple of 16, as after a
// call.
constexpr int kFrame = 8, kReturn = 6;
#elif defined(__aarch64__)
asm(R"(
.text
.globl sim_switch
.type sim_switch, %function
sim_switch:
  sub sp, sp, #160
  stp x19, x20, [sp, #0]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #0]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
.size sim_switch, . - sim_switch
)");
constexpr int kFrame = 20, kReturn = 11;
#else
#error "sim_switch is written for x86-64 and aarch64"
#endif

namespace sim {

Fiber::Fiber() {
  const size_t guard = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  void* memory =
      mmap(nullptr, guard + kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) std::abort();
  mprotect(memory, guard, PROT_NONE);  // a stack that overflows faults at once
  stack_ = static_cast<u8*>(memory) + guard;
}

Fiber::~Fiber() {
  const size_t guard = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  munmap(stack_ - guard, guard + kStackBytes);
}

void Fiber::start(void (*body)()) {
  void** saved = reinterpret_cast<void**>(stack_ + kStackBytes) - kFrame;
  for (int i = 0; i < kFrame; ++i) saved[i] = nullptr;
  saved[kReturn] = reinterpret_cast<void*>(body);
  inside_ = saved;
}

void Fiber::resume() { sim_switch(&outside_, inside_); }
void Fiber::suspend() { sim_switch(&inside_, outside_); }

}  // namespace sim
