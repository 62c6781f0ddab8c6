#include "context_switch.h"

#include <stdint.h>
#include <string.h>

#ifdef CUPAGED_EMULATOR_UCONTEXT

// Portable, but each switch makes two system calls: about 30 times slower.
namespace cupaged_emulator {

void Context::prepare(char* stack_low, char* stack_high, void (*entry)()) {
  getcontext(&saved_);
  saved_.uc_stack.ss_sp = stack_low;
  saved_.uc_stack.ss_size = static_cast<size_t>(stack_high - stack_low);
  saved_.uc_link = nullptr;
  makecontext(&saved_, entry, 0);
}

void Context::switch_to(Context& from, Context& to) { swapcontext(&from.saved_, &to.saved_); }

}  // namespace cupaged_emulator

#else

// Pushes the registers that a callee must keep, stores the stack pointer at *save, loads `load`, pops.
extern "C" void cupaged_emulator_switch(void** save, void* load);

#if defined(__x86_64__)
asm(R"(
.text
.p2align 4
.globl cupaged_emulator_switch
.hidden cupaged_emulator_switch
.type cupaged_emulator_switch,@function
cupaged_emulator_switch:
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
.size cupaged_emulator_switch, .-cupaged_emulator_switch
)");
#else
asm(R"(
.text
.p2align 4
.globl cupaged_emulator_switch
.hidden cupaged_emulator_switch
.type cupaged_emulator_switch,%function
cupaged_emulator_switch:
  sub sp, sp, #160
  stp x19, x20, [sp]
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
  ldp x19, x20, [sp]
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
.size cupaged_emulator_switch, .-cupaged_emulator_switch
)");
#endif

namespace cupaged_emulator {

// Lays out the frame that cupaged_emulator_switch pops, with `entry` as its return address.
void Context::prepare(char*, char* stack_high, void (*entry)()) {
  const uintptr_t address = reinterpret_cast<uintptr_t>(entry);
#if defined(__x86_64__)
  constexpr size_t SAVED_REGISTERS = 6;
  uintptr_t* top = reinterpret_cast<uintptr_t*>(stack_high);
  *--top = 0;  // the entry's own return address: ends backtraces, and aligns the stack as a call would
  *--top = address;
  top -= SAVED_REGISTERS;
  memset(top, 0, SAVED_REGISTERS * sizeof(uintptr_t));
  stack_pointer_ = top;
#else
  constexpr size_t FRAME_BYTES = 160, RETURN_ADDRESS = 88;
  char* frame = stack_high - FRAME_BYTES;
  memset(frame, 0, FRAME_BYTES);
  memcpy(frame + RETURN_ADDRESS, &address, sizeof(address));
  stack_pointer_ = frame;
#endif
}

void Context::switch_to(Context& from, Context& to) {
  cupaged_emulator_switch(&from.stack_pointer_, to.stack_pointer_);
}

}  // namespace cupaged_emulator

#endif
