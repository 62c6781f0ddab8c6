// E4M3 (OCP FP8, "fn"): 1 sign, 4 exponent bits (bias 7), 3 mantissa bits; largest 448; no infinities;
// 0x7F and 0xFF are NaN.
#pragma once
#include "numeric/f32.cuh"
#include "ptx.cuh"

// Round to nearest even, saturating (infinities too); NaN becomes 0x7F or 0xFF.
DEVICE u32 float_to_e4m3(float value) {
  const u32 bits = __float_as_uint(value);
  const u32 sign = (bits >> 24) & 0x80u;
  const u32 magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return sign | 0x7fu;
  // 464 lies halfway to the first value beyond 448; from there on everything saturates.
  if (magnitude >= 0x43e80000u) return sign | 0x7eu;
  if (magnitude < 0x3c800000u) {
    // Below 2^-6 the codes are multiples of 2^-9, which is one ulp of 2^14: the addition rounds.
    const float sum = __fadd_rn(__uint_as_float(magnitude), 16384.0f);
    return sign | (__float_as_uint(sum) - 0x46800000u);
  }
  const u32 rounded = magnitude + 0x7ffffu + ((magnitude >> 20) & 1u);
  return sign | ((rounded >> 20) - (120u << 3));
}

// Four codes, the first in the lowest byte; the sign of a NaN is arbitrary.
DEVICE u32 floats_to_e4m3x4(float a, float b, float c, float d) {
#ifdef CUPAGED_HARDWARE_E4M3
  return ptx::floats_to_e4m3x4(a, b, c, d);
#else
  return float_to_e4m3(a) | float_to_e4m3(b) << 8 | float_to_e4m3(c) << 16 | float_to_e4m3(d) << 24;
#endif
}

// Two codes (low and high byte of the low 16 bits) to f16x2, exactly.
DEVICE u32 e4m3x2_to_f16x2(u32 codes) {
#ifdef CUPAGED_HARDWARE_E4M3
  return ptx::e4m3x2_to_f16x2(codes);
#else
  // A code placed in the upper byte of a half, magnitude one bit lower, reads as value * 2^-8:
  // the two exponent biases differ by 8, for subnormals too.
  const u32 spread = ptx::prmt(codes, 0u, 0x1404u);
  const u32 scaled = (spread & 0x80008000u) | ((spread & 0x7f007f00u) >> 1);
  const u32 is_nan = (((spread & 0x7f007f00u) + 0x01000100u) & 0x80008000u) >> 15;
  return ptx::mul_f16x2(scaled, 0x5c005c00u /* 256 */) | is_nan * 0x7e00u;
#endif
}

// One code to float, exactly.
DEVICE float e4m3_to_float(u32 code) {
  const u32 magnitude = code & 0x7fu;
  if (magnitude == 0x7fu) return quiet_nan();
  // The code's fields placed at the float's: value * 2^-120.
  const float scaled = __uint_as_float(((code & 0x80u) << 24) | (magnitude << 20));
  return __fmul_rn(scaled, __uint_as_float(0x7b800000u) /* 2^120 */);
}
