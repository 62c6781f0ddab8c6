// E2M1 (OCP FP4): 1 sign, 2 exponent bits, 1 mantissa bit; magnitudes 0, 0.5, 1, 1.5, 2, 3, 4, 6.
#pragma once
#include "ptx.cuh"

constexpr float E2M1_MAX = 6.0f;

// Round to nearest, ties to the even code, saturating. Not for NaN: a group with one has no codes.
DEVICE u32 float_to_e2m1(float value) {
  const float a = fabsf(value);
  const u32 magnitude =
      (a > 0.25f) + (a >= 0.75f) + (a > 1.25f) + (a >= 1.75f) + (a > 2.5f) + (a >= 3.5f) + (a > 5.0f);
  return ((__float_as_uint(value) >> 28) & 8u) | magnitude;
}

// Multipliers that the compiler must not know. Multiplying by them shifts on the multiply-add pipe; it
// would turn a known power of two into a shift on the integer pipe, which is the busier one here.
__constant__ u32 SHIFT_MULTIPLIERS[3] = {2, 16, 256};

// A factor that every decoded E2M1 value still lacks: see e2m1x8_to_f16x2.
constexpr float E2M1_DECODE_SHIFT = 16384.0f;  // 2^14

// Eight codes (one word, first in the lowest nibble) to four f16x2, times 2^-14, times `scale` (f16x2):
// pairs[i] holds values (i, i + 4). Exact: a product has at most 6 significant bits, and even with the
// 2^-14 it is a multiple of 2^-24, the smallest half.
//
// A byte with its sign in bit 7 and a magnitude in bits 3..1 is the high byte of the half with that
// value times 2^-14. Sign and magnitude of the four high nibbles are put there at once (`high`), and
// those of the four low nibbles (`low`); bytes 1 and 3 of each are picked by a mask, bytes 0 and 2 by
// a shift and the same mask.
DEVICE void e2m1x8_to_f16x2(u32 codes, u32 scale, u32 (&pairs)[4]) {
  constexpr u32 SIGNS = 0x80808080u;
  constexpr u32 HIGH_BYTES = 0x8e008e00u;
  const u32 high = ptx::bit_select(codes, codes >> 3, SIGNS);
  const u32 low = ptx::bit_select(codes * SHIFT_MULTIPLIERS[1], codes * SHIFT_MULTIPLIERS[0], SIGNS);
  pairs[0] = ptx::mul_f16x2((low * SHIFT_MULTIPLIERS[2]) & HIGH_BYTES, scale);
  pairs[1] = ptx::mul_f16x2((high * SHIFT_MULTIPLIERS[2]) & HIGH_BYTES, scale);
  pairs[2] = ptx::mul_f16x2(low & HIGH_BYTES, scale);
  pairs[3] = ptx::mul_f16x2(high & HIGH_BYTES, scale);
}
