// Atomics and fences. Real atomic instructions, because blocks may run on several OS threads. Each lets
// other threads run first, so that a spin on an atomic gets what it waits for.
#pragma once
#include "bits.h"
#include "hooks.h"

namespace cupaged_emulator {

// Replaces *address by update(*address), with acquire or release as `order` says; returns the old value.
template <class T, class Update>
inline T read_modify_write(const char* what, T* address, Order order, Update update) {
  using Bits = typename BitsOfSize<sizeof(T)>::type;
  Bits* bits = reinterpret_cast<Bits*>(address);
  note_atomic(address, sizeof(T), Access::atomic_update, order);
  Bits old_bits = __atomic_load_n(bits, __ATOMIC_RELAXED), new_bits;
  T old;
  do {
    old = bit_cast<T>(old_bits);
    new_bits = bit_cast<Bits>(update(old));
  } while (!__atomic_compare_exchange_n(bits, &old_bits, new_bits, false, __ATOMIC_SEQ_CST,
                                        __ATOMIC_RELAXED));
  yield(what, address, old_bits != new_bits);
  return old;
}

}  // namespace cupaged_emulator

#define CUPAGED_ATOMIC(NAME, T, EXPRESSION)                                                      \
  inline T NAME(T* address, T value) {                                                           \
    return cupaged_emulator::read_modify_write(#NAME, address, cupaged_emulator::Order::relaxed, \
                                               [=](T old) -> T { return EXPRESSION; });          \
  }
#define CUPAGED_ATOMIC_INTEGERS(NAME, EXPRESSION) \
  CUPAGED_ATOMIC(NAME, int, EXPRESSION)           \
  CUPAGED_ATOMIC(NAME, unsigned int, EXPRESSION)  \
  CUPAGED_ATOMIC(NAME, unsigned long long, EXPRESSION)

CUPAGED_ATOMIC(atomicAdd, unsigned int, old + value)
CUPAGED_ATOMIC(atomicAdd, unsigned long long, old + value)
CUPAGED_ATOMIC(atomicAdd, int,
               static_cast<int>(static_cast<unsigned int>(old) + static_cast<unsigned int>(value)))
CUPAGED_ATOMIC(atomicAdd, float, old + value)
CUPAGED_ATOMIC(atomicAdd, double, old + value)
CUPAGED_ATOMIC(atomicSub, unsigned int, old - value)
CUPAGED_ATOMIC(atomicSub, int,
               static_cast<int>(static_cast<unsigned int>(old) - static_cast<unsigned int>(value)))
CUPAGED_ATOMIC_INTEGERS(atomicMax, old < value ? value : old)
CUPAGED_ATOMIC(atomicMax, long long, old < value ? value : old)
CUPAGED_ATOMIC_INTEGERS(atomicMin, value < old ? value : old)
CUPAGED_ATOMIC(atomicMin, long long, value < old ? value : old)
CUPAGED_ATOMIC_INTEGERS(atomicAnd, (old & value))
CUPAGED_ATOMIC_INTEGERS(atomicOr, old | value)
CUPAGED_ATOMIC_INTEGERS(atomicXor, old ^ value)
CUPAGED_ATOMIC_INTEGERS(atomicExch, value)
CUPAGED_ATOMIC(atomicExch, float, value)
CUPAGED_ATOMIC(atomicInc, unsigned int, old >= value ? 0u : old + 1u)
CUPAGED_ATOMIC(atomicDec, unsigned int, old == 0u || old > value ? value : old - 1u)
#undef CUPAGED_ATOMIC_INTEGERS
#undef CUPAGED_ATOMIC

#define CUPAGED_ATOMIC_CAS(T)                                      \
  inline T atomicCAS(T* address, T compare, T value) {             \
    return cupaged_emulator::read_modify_write(                    \
        "atomicCAS", address, cupaged_emulator::Order::relaxed,    \
        [=](T old) -> T { return old == compare ? value : old; }); \
  }
CUPAGED_ATOMIC_CAS(int)
CUPAGED_ATOMIC_CAS(unsigned int)
CUPAGED_ATOMIC_CAS(unsigned long long)
CUPAGED_ATOMIC_CAS(unsigned short)
#undef CUPAGED_ATOMIC_CAS

inline void __threadfence_block() { cupaged_emulator::note_fence(cupaged_emulator::Scope::block); }
inline void __threadfence() {
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
  cupaged_emulator::note_fence(cupaged_emulator::Scope::device);
}
inline void __threadfence_system() { __threadfence(); }
