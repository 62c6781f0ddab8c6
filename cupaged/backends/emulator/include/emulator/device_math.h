// CUDA's math functions, from the host's C library through compiler builtins.
#pragma once
#include "bits.h"

// ---- min and max with CUDA's overloads (mixed signedness compares as unsigned)

// A NaN operand gives the other one; +0 counts as larger than -0.
inline float fmaxf(float a, float b) {
  if (a != a) return b;
  if (b != b) return a;
  if (a == b) return __int_as_float(__float_as_int(a) & __float_as_int(b));
  return a > b ? a : b;
}
inline float fminf(float a, float b) {
  if (a != a) return b;
  if (b != b) return a;
  if (a == b) return __int_as_float(__float_as_int(a) | __float_as_int(b));
  return a < b ? a : b;
}
inline double fmax(double a, double b) { return __builtin_fmax(a, b); }
inline double fmin(double a, double b) { return __builtin_fmin(a, b); }

#define CUPAGED_MIN_MAX(A, B, COMMON)                                                \
  constexpr COMMON min(A a, B b) {                                                   \
    return static_cast<COMMON>(b) < static_cast<COMMON>(a) ? static_cast<COMMON>(b)  \
                                                           : static_cast<COMMON>(a); \
  }                                                                                  \
  constexpr COMMON max(A a, B b) {                                                   \
    return static_cast<COMMON>(a) < static_cast<COMMON>(b) ? static_cast<COMMON>(b)  \
                                                           : static_cast<COMMON>(a); \
  }
CUPAGED_MIN_MAX(int, int, int)
CUPAGED_MIN_MAX(unsigned int, unsigned int, unsigned int)
CUPAGED_MIN_MAX(int, unsigned int, unsigned int)
CUPAGED_MIN_MAX(unsigned int, int, unsigned int)
CUPAGED_MIN_MAX(long, long, long)
CUPAGED_MIN_MAX(unsigned long, unsigned long, unsigned long)
CUPAGED_MIN_MAX(long, unsigned long, unsigned long)
CUPAGED_MIN_MAX(unsigned long, long, unsigned long)
CUPAGED_MIN_MAX(long long, long long, long long)
CUPAGED_MIN_MAX(unsigned long long, unsigned long long, unsigned long long)
CUPAGED_MIN_MAX(long long, unsigned long long, unsigned long long)
CUPAGED_MIN_MAX(unsigned long long, long long, unsigned long long)
#undef CUPAGED_MIN_MAX

inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }
inline double min(double a, double b) { return fmin(a, b); }
inline double max(double a, double b) { return fmax(a, b); }
inline double min(float a, double b) { return fmin(a, b); }
inline double max(float a, double b) { return fmax(a, b); }
inline double min(double a, float b) { return fmin(a, b); }
inline double max(double a, float b) { return fmax(a, b); }

// ---- functions of one and of two floats

#define CUPAGED_MATH_1(NAME)                                       \
  inline float NAME##f(float x) { return __builtin_##NAME##f(x); } \
  inline double NAME(double x) { return __builtin_##NAME(x); }
#define CUPAGED_MATH_2(NAME)                                                   \
  inline float NAME##f(float x, float y) { return __builtin_##NAME##f(x, y); } \
  inline double NAME(double x, double y) { return __builtin_##NAME(x, y); }

CUPAGED_MATH_1(exp)
CUPAGED_MATH_1(exp2)
CUPAGED_MATH_1(expm1)
CUPAGED_MATH_1(log)
CUPAGED_MATH_1(log2)
CUPAGED_MATH_1(log10)
CUPAGED_MATH_1(log1p)
CUPAGED_MATH_1(sqrt)
CUPAGED_MATH_1(cbrt)
CUPAGED_MATH_1(sin)
CUPAGED_MATH_1(cos)
CUPAGED_MATH_1(tan)
CUPAGED_MATH_1(tanh)
CUPAGED_MATH_1(erf)
CUPAGED_MATH_1(floor)
CUPAGED_MATH_1(ceil)
CUPAGED_MATH_1(trunc)
CUPAGED_MATH_1(round)
CUPAGED_MATH_1(rint)
CUPAGED_MATH_1(nearbyint)
CUPAGED_MATH_1(fabs)
CUPAGED_MATH_2(pow)
CUPAGED_MATH_2(fmod)
CUPAGED_MATH_2(copysign)
CUPAGED_MATH_2(fdim)
#undef CUPAGED_MATH_1
#undef CUPAGED_MATH_2

inline float fmaf(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline double fma(double a, double b, double c) { return __builtin_fma(a, b, c); }
inline float rsqrtf(float x) { return 1.0f / __builtin_sqrtf(x); }
inline float exp10f(float x) { return __builtin_powf(10.0f, x); }
inline float ldexpf(float x, int exponent) { return __builtin_ldexpf(x, exponent); }
inline float scalbnf(float x, int exponent) { return __builtin_ldexpf(x, exponent); }
inline float frexpf(float x, int* exponent) { return __builtin_frexpf(x, exponent); }

constexpr int abs(int x) { return x < 0 ? -x : x; }
constexpr long long abs(long long x) { return x < 0 ? -x : x; }
inline float abs(float x) { return __builtin_fabsf(x); }
inline double abs(double x) { return __builtin_fabs(x); }

template <class T>
inline bool isnan(T x) {
  return __builtin_isnan(x);
}
template <class T>
inline bool isinf(T x) {
  return __builtin_isinf(x);
}
template <class T>
inline bool isfinite(T x) {
  return __builtin_isfinite(x);
}
template <class T>
inline bool signbit(T x) {
  return __builtin_signbit(x);
}

// ---- explicitly rounded arithmetic: bit for bit what the device gives

inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline float __frcp_rn(float a) { return 1.0f / a; }
inline float __fsqrt_rn(float a) { return __builtin_sqrtf(a); }
inline float __frsqrt_rn(float a) {
  return static_cast<float>(1.0 / __builtin_sqrt(static_cast<double>(a)));
}

// ---- approximate functions: the device is less exact, so results differ in the last bits

inline float __fdividef(float a, float b) { return a / b; }
inline float __expf(float x) { return __builtin_expf(x); }
inline float __exp10f(float x) { return exp10f(x); }
inline float __logf(float x) { return __builtin_logf(x); }
inline float __log2f(float x) { return __builtin_log2f(x); }
inline float __log10f(float x) { return __builtin_log10f(x); }
inline float __powf(float x, float y) { return __builtin_powf(x, y); }
inline float __sinf(float x) { return __builtin_sinf(x); }
inline float __cosf(float x) { return __builtin_cosf(x); }
inline float __saturatef(float x) { return fminf(fmaxf(x, 0.0f), 1.0f); }  // NaN gives 0

// ---- conversions; out of range they saturate, and NaN gives 0

namespace cupaged_emulator {

// `rounded` has no fraction; [low, high) is what T holds.
template <class T>
inline T saturating_convert(double rounded, double low, double high, T lowest, T highest) {
  if (rounded != rounded) return 0;
  if (rounded < low) return lowest;
  return rounded >= high ? highest : static_cast<T>(rounded);
}
inline int to_int(double rounded) {
  return saturating_convert<int>(rounded, -2147483648.0, 2147483648.0, -2147483647 - 1, 2147483647);
}
inline unsigned int to_uint(double rounded) {
  return saturating_convert<unsigned int>(rounded, 0.0, 4294967296.0, 0u, 4294967295u);
}

}  // namespace cupaged_emulator

inline int __float2int_rn(float x) { return cupaged_emulator::to_int(__builtin_rint(x)); }
inline int __float2int_rz(float x) { return cupaged_emulator::to_int(__builtin_trunc(x)); }
inline int __float2int_rd(float x) { return cupaged_emulator::to_int(__builtin_floor(x)); }
inline int __float2int_ru(float x) { return cupaged_emulator::to_int(__builtin_ceil(x)); }
inline unsigned int __float2uint_rn(float x) { return cupaged_emulator::to_uint(__builtin_rint(x)); }
inline unsigned int __float2uint_rz(float x) { return cupaged_emulator::to_uint(__builtin_trunc(x)); }
inline float __int2float_rn(int x) { return static_cast<float>(x); }
inline float __uint2float_rn(unsigned int x) { return static_cast<float>(x); }
inline float __double2float_rn(double x) { return static_cast<float>(x); }
