// Checks of single accesses.
#pragma once
#include <stddef.h>
#include <stdint.h>

#include "../scheduler.h"
#include "session.h"

namespace cupaged_emulator {
namespace check {

// The running thread touches memory, at a place in the kernel's code. Does not return where that is a
// fault.
void check_access(uintptr_t address, size_t bytes, Access access, const void* site);

// The same for an atomic, with what it orders.
void check_atomic(const void* address, size_t bytes, Access access, Order order, const void* site);

// A copy's courier touches memory on behalf of the running thread; `stamp` is the courier's.
void check_courier(const void* address, size_t bytes, Access access, const Stamp& stamp);

// The running thread asks for global memory to be cached.
void check_prefetch(uintptr_t address, size_t bytes, const void* site);

// Stops the launch with a report about the running thread at `site`. In the text, "@other@" stands for
// the place `other_site` in the kernel's code.
[[noreturn]] void check_fault(FaultKind kind, const void* site, uint32_t other_site, const char* format,
                              ...) __attribute__((format(printf, 4, 5)));

}  // namespace check
}  // namespace cupaged_emulator
