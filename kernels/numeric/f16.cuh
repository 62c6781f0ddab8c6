// F16 (IEEE half) to float.
#pragma once
#include "platform.cuh"

// Exactly, subnormals included; a NaN stays a NaN.
DEVICE float f16_to_float(u32 bits) {
  const u32 magnitude = (bits & 0x7fffu) << 13, sign = (bits & 0x8000u) << 16;
  if (magnitude >= 0x0f800000u) return __uint_as_float(sign | 0x70000000u | magnitude);  // Inf, NaN
  // The fields placed at the float's: value * 2^-112.
  return __fmul_rn(__uint_as_float(sign | magnitude), __uint_as_float(0x77800000u) /* 2^112 */);
}
