// Saving one flow of control and continuing another, within one OS thread.
#pragma once
#include <stddef.h>

#if !defined(CUPAGED_EMULATOR_UCONTEXT) && !defined(__x86_64__) && !defined(__aarch64__)
#define CUPAGED_EMULATOR_UCONTEXT 1
#endif
#ifdef CUPAGED_EMULATOR_UCONTEXT
#include <ucontext.h>
#endif

namespace cupaged_emulator {

class Context {
 public:
  // The next switch to this context calls `entry` on the given stack. `entry` must never return.
  void prepare(char* stack_low, char* stack_high, void (*entry)());

  // Saves the caller in `from` and continues `to`; returns when something switches to `from` again.
  static void switch_to(Context& from, Context& to);

 private:
#ifdef CUPAGED_EMULATOR_UCONTEXT
  ucontext_t saved_;
#else
  void* stack_pointer_ = nullptr;
#endif
};

}  // namespace cupaged_emulator
