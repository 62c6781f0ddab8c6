// Bit casts and integer intrinsics.
#pragma once
#include "interface.h"

namespace cupaged_emulator {

template <class To, class From>
inline To bit_cast(From value) {
  static_assert(sizeof(To) == sizeof(From), "a bit cast keeps the size");
  To result;
  __builtin_memcpy(&result, &value, sizeof(To));
  return result;
}

template <size_t BYTES>
struct BitsOfSize;
template <>
struct BitsOfSize<2> {
  using type = uint16_t;
};
template <>
struct BitsOfSize<4> {
  using type = uint32_t;
};
template <>
struct BitsOfSize<8> {
  using type = uint64_t;
};

}  // namespace cupaged_emulator

inline unsigned int __float_as_uint(float value) {
  return cupaged_emulator::bit_cast<unsigned int>(value);
}
inline int __float_as_int(float value) { return cupaged_emulator::bit_cast<int>(value); }
inline float __uint_as_float(unsigned int value) { return cupaged_emulator::bit_cast<float>(value); }
inline float __int_as_float(int value) { return cupaged_emulator::bit_cast<float>(value); }
inline long long __double_as_longlong(double value) {
  return cupaged_emulator::bit_cast<long long>(value);
}
inline double __longlong_as_double(long long value) { return cupaged_emulator::bit_cast<double>(value); }

inline int __popc(unsigned int value) { return __builtin_popcount(value); }
inline int __popcll(unsigned long long value) { return __builtin_popcountll(value); }
inline int __ffs(int value) { return __builtin_ffs(value); }
inline int __ffsll(long long value) { return __builtin_ffsll(value); }
inline int __clz(int value) { return value == 0 ? 32 : __builtin_clz(static_cast<unsigned int>(value)); }
inline int __clzll(long long value) {
  return value == 0 ? 64 : __builtin_clzll(static_cast<unsigned long long>(value));
}

inline unsigned int __brev(unsigned int value) {
  value = ((value >> 1) & 0x55555555u) | ((value & 0x55555555u) << 1);
  value = ((value >> 2) & 0x33333333u) | ((value & 0x33333333u) << 2);
  value = ((value >> 4) & 0x0f0f0f0fu) | ((value & 0x0f0f0f0fu) << 4);
  return __builtin_bswap32(value);
}

// Result byte i is byte (selector >> 4i) & 7 of the eight bytes {b, a}; bit 3 of the nibble asks for
// that byte's sign in all eight bits instead.
inline unsigned int __byte_perm(unsigned int a, unsigned int b, unsigned int selector) {
  const unsigned long long bytes = (static_cast<unsigned long long>(b) << 32) | a;
  unsigned int result = 0;
  for (int i = 0; i < 4; i++) {
    const unsigned int nibble = selector >> (4 * i);
    unsigned int byte = static_cast<unsigned int>(bytes >> (8 * (nibble & 7u))) & 0xffu;
    if (nibble & 8u) byte = (byte & 0x80u) ? 0xffu : 0u;
    result |= byte << (8 * i);
  }
  return result;
}

inline unsigned int __umulhi(unsigned int a, unsigned int b) {
  return static_cast<unsigned int>((static_cast<unsigned long long>(a) * b) >> 32);
}
inline int __mulhi(int a, int b) { return static_cast<int>((static_cast<long long>(a) * b) >> 32); }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  return static_cast<unsigned long long>((static_cast<unsigned __int128>(a) * b) >> 64);
}

inline unsigned int __funnelshift_l(unsigned int low, unsigned int high, unsigned int shift) {
  const unsigned long long both = (static_cast<unsigned long long>(high) << 32) | low;
  return static_cast<unsigned int>((both << (shift & 31u)) >> 32);
}
inline unsigned int __funnelshift_r(unsigned int low, unsigned int high, unsigned int shift) {
  const unsigned long long both = (static_cast<unsigned long long>(high) << 32) | low;
  return static_cast<unsigned int>(both >> (shift & 31u));
}

// Loads and stores with cache hints: the hints mean nothing here.
template <class T>
inline T __ldg(const T* address) {
  return *address;
}
template <class T>
inline T __ldca(const T* address) {
  return *address;
}
template <class T>
inline T __ldcg(const T* address) {
  return *address;
}
template <class T>
inline T __ldcs(const T* address) {
  return *address;
}
template <class T>
inline T __ldcv(const T* address) {
  return *const_cast<const volatile T*>(address);
}
template <class T>
inline T __ldlu(const T* address) {
  return *address;
}
template <class T>
inline void __stcg(T* address, T value) {
  *address = value;
}
template <class T>
inline void __stcs(T* address, T value) {
  *address = value;
}
template <class T>
inline void __stwb(T* address, T value) {
  *address = value;
}
