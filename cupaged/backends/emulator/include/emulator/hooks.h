// Memory accesses and orderings that instrumented kernel code does not show by itself: those that the
// emulator makes on a thread's behalf. Nothing in fast mode; check mode gives the functions bodies.
#pragma once
#include "interface.h"

namespace cupaged_emulator {

enum class Access : uint8_t { read, write, atomic_read, atomic_write, atomic_update };
enum class Order { relaxed, acquire, release, acquire_release };
enum class Scope { block, device };

#ifdef CUPAGED_EMULATOR_CHECK
// The current thread touches memory through an instruction with a body in the runtime library.
CUPAGED_EMULATOR_API void note_access(const void* address, size_t bytes, Access access);
// The current thread makes an atomic access; nothing runs between this call and the access.
CUPAGED_EMULATOR_API void note_atomic(const void* address, size_t bytes, Access access, Order order);
CUPAGED_EMULATOR_API void note_fence(Scope scope);
// The current thread asks for global memory to be cached: it must be there, but is not read.
void note_prefetch(const void* address, size_t bytes);
#else
inline void note_access(const void*, size_t, Access) {}
inline void note_atomic(const void*, size_t, Access, Order) {}
inline void note_fence(Scope) {}
inline void note_prefetch(const void*, size_t) {}
#endif

}  // namespace cupaged_emulator
