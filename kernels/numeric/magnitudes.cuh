// The larger and the smaller magnitude of packed 16-bit floats: without their signs, finite numbers and
// infinities order like integers.
#pragma once
#include "ptx.cuh"

constexpr u32 SIGNS_X2 = 0x80008000u;

// Of each half the larger magnitude; its sign is arbitrary. A NaN is larger than everything.
DEVICE u32 max_magnitude_bf16x2(u32 a, u32 b) {
#ifdef CUPAGED_HARDWARE_MAGNITUDES
  return ptx::max_magnitude_bf16x2(a, b);
#else
  return max(a & 0x7fff0000u, b & 0x7fff0000u) | max(a & 0x7fffu, b & 0x7fffu);
#endif
}

// A magnitude and a limit in the low 16 bits; what is above BF16's infinity stays as it is.
DEVICE u32 limited_magnitude(u32 magnitude, u32 limit) {
  return magnitude > 0x7f80u ? magnitude : min(magnitude, limit);
}

DEVICE u32 portable_min_magnitude_x2(u32 pair, u32 limits) {
  const u32 low = limited_magnitude(pair & 0x7fffu, limits & 0x7fffu);
  const u32 high = limited_magnitude((pair >> 16) & 0x7fffu, limits >> 16);
  return (pair & SIGNS_X2) | low | (high << 16);
}

// Halves of `pair` cut to the magnitudes `limits` (positive), their signs kept; a NaN stays one.
DEVICE u32 min_magnitude_bf16x2(u32 pair, u32 limits) {
#ifdef CUPAGED_HARDWARE_MAGNITUDES
  return ptx::min_magnitude_bf16x2(pair, limits);
#else
  return portable_min_magnitude_x2(pair, limits);
#endif
}

// The same for F16, whose NaNs may become numbers.
DEVICE u32 min_magnitude_f16x2(u32 pair, u32 limits) {
#ifdef CUPAGED_HARDWARE_MAGNITUDES
  return ptx::min_magnitude_f16x2(pair, limits);
#else
  return portable_min_magnitude_x2(pair, limits);
#endif
}

// The larger half of a pair of magnitudes, as a BF16 pattern.
DEVICE u32 larger_half(u32 magnitudes) {
  return max(magnitudes & 0x7fffu, (magnitudes >> 16) & 0x7fffu);
}
