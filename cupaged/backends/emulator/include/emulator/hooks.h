// Memory accesses and orderings that instrumented kernel code does not show by itself: those that the
// emulator makes on a thread's behalf. Nothing in fast mode; check mode gives the functions bodies.
#pragma once
#include "interface.h"

namespace cupaged_emulator {

enum class Access { read, write, atomic };
enum class Order { relaxed, acquire, release, acquire_release };

#ifdef CUPAGED_EMULATOR_CHECK
// The current thread touches memory through an instruction with a body in the emulator.
CUPAGED_EMULATOR_API void note_access(const void* address, size_t bytes, Access access);
// The current thread makes an ordering access to an address (after the loads, before the stores of it).
CUPAGED_EMULATOR_API void note_order(const void* address, Order order);
CUPAGED_EMULATOR_API void note_fence();
#else
inline void note_access(const void*, size_t, Access) {}
inline void note_order(const void*, Order) {}
inline void note_fence() {}
#endif

}  // namespace cupaged_emulator
