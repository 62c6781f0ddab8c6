// What the compiler calls for instrumented kernels: the names of its thread sanitizer and undefined
// behaviour sanitizer, whose own libraries are never linked.
#include <string.h>

#include <atomic>

#include "access.h"

namespace cupaged_emulator {
namespace check {
namespace {

inline void touched(const void* address, size_t bytes, Access access, const void* site) {
  check_access(reinterpret_cast<uintptr_t>(address), bytes, access, site);
}

// Volatile accesses are relaxed atomics to CUDA, and what old kernels spin on.
void touched_volatile(const void* address, size_t bytes, Access access, const void* site) {
  running().check.site = site;
  if (access == Access::atomic_read) yield("a volatile load", address, false);
  check_atomic(address, bytes, access, Order::relaxed, site);
}

// ---- structures that the undefined behaviour sanitizer passes

struct SourcePlace {
  const char* file;
  uint32_t line, column;
};
struct TypeDescriptor {
  uint16_t kind, info;
  char name[1];
};
struct TypeMismatch {
  SourcePlace place;
  const TypeDescriptor* type;
  uint8_t log_alignment;
  uint8_t kind;
};
struct OutOfBounds {
  SourcePlace place;
  const TypeDescriptor* array;
  const TypeDescriptor* index;
};

void report_type_mismatch(const TypeMismatch& data, uintptr_t address, const void* site) {
  if (address == 0)
    check_fault(FaultKind::out_of_bounds, site, 0, "access to %s through a null pointer",
                data.type->name);
  check_fault(FaultKind::misaligned, site, 0,
              "access to %s at address %p, which is not a multiple of %lu", data.type->name,
              reinterpret_cast<void*>(address), 1ul << data.log_alignment);
}

// Small indices come as they are, 128-bit ones by address.
void report_index(const OutOfBounds& data, uintptr_t index, const void* site) {
  check_fault(FaultKind::out_of_bounds, site, 0, "index %lld is outside an array of type %s",
              static_cast<long long>(index), data.array->name);
}

void report_division(const void* site) {
  check_fault(FaultKind::trap, site, 0, "integer division by zero, or with a result out of range");
}

}  // namespace
}  // namespace check
}  // namespace cupaged_emulator

namespace {
using namespace cupaged_emulator;
using namespace cupaged_emulator::check;
}  // namespace

#define CALLER __builtin_return_address(0)

extern "C" {

CUPAGED_EMULATOR_API void __tsan_init() {}
CUPAGED_EMULATOR_API void __tsan_func_entry(void*) {}
CUPAGED_EMULATOR_API void __tsan_func_exit() {}

#define CUPAGED_PLAIN(BYTES)                                              \
  CUPAGED_EMULATOR_API void __tsan_read##BYTES(void* address) {           \
    touched(address, BYTES, Access::read, CALLER);                        \
  }                                                                       \
  CUPAGED_EMULATOR_API void __tsan_write##BYTES(void* address) {          \
    touched(address, BYTES, Access::write, CALLER);                       \
  }                                                                       \
  CUPAGED_EMULATOR_API void __tsan_read_write##BYTES(void* address) {     \
    touched(address, BYTES, Access::read, CALLER);                        \
    touched(address, BYTES, Access::write, CALLER);                       \
  }                                                                       \
  CUPAGED_EMULATOR_API void __tsan_volatile_read##BYTES(void* address) {  \
    touched_volatile(address, BYTES, Access::atomic_read, CALLER);        \
  }                                                                       \
  CUPAGED_EMULATOR_API void __tsan_volatile_write##BYTES(void* address) { \
    touched_volatile(address, BYTES, Access::atomic_write, CALLER);       \
  }
CUPAGED_PLAIN(1)
CUPAGED_PLAIN(2)
CUPAGED_PLAIN(4)
CUPAGED_PLAIN(8)
CUPAGED_PLAIN(16)
#undef CUPAGED_PLAIN

#define CUPAGED_UNALIGNED(BYTES)                                                    \
  CUPAGED_EMULATOR_API void __tsan_unaligned_read##BYTES(void* address) {           \
    touched(address, BYTES, Access::read, CALLER);                                  \
  }                                                                                 \
  CUPAGED_EMULATOR_API void __tsan_unaligned_write##BYTES(void* address) {          \
    touched(address, BYTES, Access::write, CALLER);                                 \
  }                                                                                 \
  CUPAGED_EMULATOR_API void __tsan_unaligned_read_write##BYTES(void* address) {     \
    touched(address, BYTES, Access::read, CALLER);                                  \
    touched(address, BYTES, Access::write, CALLER);                                 \
  }                                                                                 \
  CUPAGED_EMULATOR_API void __tsan_unaligned_volatile_read##BYTES(void* address) {  \
    touched_volatile(address, BYTES, Access::atomic_read, CALLER);                  \
  }                                                                                 \
  CUPAGED_EMULATOR_API void __tsan_unaligned_volatile_write##BYTES(void* address) { \
    touched_volatile(address, BYTES, Access::atomic_write, CALLER);                 \
  }
CUPAGED_UNALIGNED(2)
CUPAGED_UNALIGNED(4)
CUPAGED_UNALIGNED(8)
CUPAGED_UNALIGNED(16)
#undef CUPAGED_UNALIGNED

CUPAGED_EMULATOR_API void __tsan_read_range(void* address, size_t bytes) {
  if (bytes != 0) touched(address, bytes, Access::read, CALLER);
}
CUPAGED_EMULATOR_API void __tsan_write_range(void* address, size_t bytes) {
  if (bytes != 0) touched(address, bytes, Access::write, CALLER);
}

// The emulator's headers say themselves what their atomics do (note_atomic): here they only happen.
#define CUPAGED_ATOMIC_UPDATE(BITS, NAME)                                 \
  CUPAGED_EMULATOR_API uint##BITS##_t __tsan_atomic##BITS##_fetch_##NAME( \
      volatile uint##BITS##_t* address, uint##BITS##_t value, int) {      \
    return __atomic_fetch_##NAME(address, value, __ATOMIC_SEQ_CST);       \
  }
#define CUPAGED_ATOMICS(BITS)                                                                          \
  CUPAGED_EMULATOR_API uint##BITS##_t __tsan_atomic##BITS##_load(                                      \
      const volatile uint##BITS##_t* address, int) {                                                   \
    return __atomic_load_n(address, __ATOMIC_SEQ_CST);                                                 \
  }                                                                                                    \
  CUPAGED_EMULATOR_API void __tsan_atomic##BITS##_store(volatile uint##BITS##_t* address,              \
                                                        uint##BITS##_t value, int) {                   \
    __atomic_store_n(address, value, __ATOMIC_SEQ_CST);                                                \
  }                                                                                                    \
  CUPAGED_EMULATOR_API uint##BITS##_t __tsan_atomic##BITS##_exchange(volatile uint##BITS##_t* address, \
                                                                     uint##BITS##_t value, int) {      \
    return __atomic_exchange_n(address, value, __ATOMIC_SEQ_CST);                                      \
  }                                                                                                    \
  CUPAGED_EMULATOR_API int __tsan_atomic##BITS##_compare_exchange_strong(                              \
      volatile uint##BITS##_t* address, uint##BITS##_t* expected, uint##BITS##_t value, int, int) {    \
    return __atomic_compare_exchange_n(address, expected, value, false, __ATOMIC_SEQ_CST,              \
                                       __ATOMIC_SEQ_CST);                                              \
  }                                                                                                    \
  CUPAGED_EMULATOR_API int __tsan_atomic##BITS##_compare_exchange_weak(                                \
      volatile uint##BITS##_t* address, uint##BITS##_t* expected, uint##BITS##_t value, int, int) {    \
    return __atomic_compare_exchange_n(address, expected, value, false, __ATOMIC_SEQ_CST,              \
                                       __ATOMIC_SEQ_CST);                                              \
  }                                                                                                    \
  CUPAGED_ATOMIC_UPDATE(BITS, add)                                                                     \
  CUPAGED_ATOMIC_UPDATE(BITS, sub)                                                                     \
  CUPAGED_ATOMIC_UPDATE(BITS, and)                                                                     \
  CUPAGED_ATOMIC_UPDATE(BITS, or)                                                                      \
  CUPAGED_ATOMIC_UPDATE(BITS, xor)                                                                     \
  CUPAGED_ATOMIC_UPDATE(BITS, nand)
CUPAGED_ATOMICS(8)
CUPAGED_ATOMICS(16)
CUPAGED_ATOMICS(32)
CUPAGED_ATOMICS(64)
#undef CUPAGED_ATOMICS
#undef CUPAGED_ATOMIC_UPDATE
CUPAGED_EMULATOR_API void __tsan_atomic_thread_fence(int) {
  std::atomic_thread_fence(std::memory_order_seq_cst);
}
CUPAGED_EMULATOR_API void __tsan_atomic_signal_fence(int) {}

// Kernels are linked with --wrap: copies of many bytes end here instead of in the C library. clang calls
// the second set by itself.
#define CUPAGED_BULK(NAME)                                                                   \
  CUPAGED_EMULATOR_API void* NAME##memcpy(void* to, const void* from, size_t bytes) {        \
    if (bytes != 0)                                                                          \
      touched(from, bytes, Access::read, CALLER), touched(to, bytes, Access::write, CALLER); \
    return memcpy(to, from, bytes);                                                          \
  }                                                                                          \
  CUPAGED_EMULATOR_API void* NAME##memmove(void* to, const void* from, size_t bytes) {       \
    if (bytes != 0)                                                                          \
      touched(from, bytes, Access::read, CALLER), touched(to, bytes, Access::write, CALLER); \
    return memmove(to, from, bytes);                                                         \
  }                                                                                          \
  CUPAGED_EMULATOR_API void* NAME##memset(void* to, int value, size_t bytes) {               \
    if (bytes != 0) touched(to, bytes, Access::write, CALLER);                               \
    return memset(to, value, bytes);                                                         \
  }
CUPAGED_BULK(__wrap_)
CUPAGED_BULK(__tsan_)
#undef CUPAGED_BULK

#define CUPAGED_HANDLERS(SUFFIX)                                                                        \
  CUPAGED_EMULATOR_API void __ubsan_handle_type_mismatch_v1##SUFFIX(const TypeMismatch* data,           \
                                                                    uintptr_t address) {                \
    report_type_mismatch(*data, address, CALLER);                                                       \
  }                                                                                                     \
  CUPAGED_EMULATOR_API void __ubsan_handle_out_of_bounds##SUFFIX(const OutOfBounds* data,               \
                                                                 uintptr_t index) {                     \
    report_index(*data, index, CALLER);                                                                 \
  }                                                                                                     \
  CUPAGED_EMULATOR_API void __ubsan_handle_divrem_overflow##SUFFIX(const void*, uintptr_t, uintptr_t) { \
    report_division(CALLER);                                                                            \
  }
CUPAGED_HANDLERS()
CUPAGED_HANDLERS(_abort)
#undef CUPAGED_HANDLERS

}  // extern "C"
