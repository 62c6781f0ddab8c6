// E2M1 (OCP FP4): 1 sign, 2 exponent bits, 1 mantissa bit; magnitudes 0, 0.5, 1, 1.5, 2, 3, 4, 6.
#pragma once
#include "numeric/bf16.cuh"
#include "numeric/magnitudes.cuh"

constexpr float E2M1_MAX = 6.0f;

// A factor that every decoded E2M1 value still lacks: see e2m1x8_to_f16x2, and bf16x8_to_e2m1.
constexpr float E2M1_DECODE_SHIFT = 16384.0f;  // 2^14

// Eight BF16 values (pairs in order), each times 2^14 * factor, to codes, first in the lowest nibble:
// round to nearest, ties to the even code, saturating. Not for NaN.
//
// 1 / factor is 2^14 times an E4M3 scale, within 2^-20. A tie times the scale has at most 7 significant
// bits, so a BF16 value is either a tie or 2^-8 of it away. Rounding the product to F16 makes it the tie
// in the first case and keeps it on its side in the second. A half then has its E2M1 magnitude in bits 9
// and up, as F16 becomes subnormal where E2M1 times 2^-14 does, and is rounded there as an integer.
DEVICE u32 bf16x8_to_e2m1(const u32 (&pairs)[4], float factor) {
  u32 halves[4];
  UNROLL for (int i = 0; i < 4; i++) {
    const u32 products = ptx::pack_f16x2(__fmul_rn(bf16x2_low(pairs[i]), factor),
                                         __fmul_rn(bf16x2_high(pairs[i]), factor));
    const u32 limited = min_magnitude_f16x2(products, 0x0e000e00u /* 6 * 2^-14 */);
    halves[i] = limited + 0x00ff00ffu + ((limited >> 9) & 0x00010001u);
  }
  // Each half's upper byte, by even and by odd values: sign in bit 7, magnitude in bits 3..1.
  const u32 first = ptx::prmt(halves[0], halves[1], 0x7351u);
  const u32 second = ptx::prmt(halves[2], halves[3], 0x7351u);
  const u32 even = ptx::prmt(first, second, 0x5410u), odd = ptx::prmt(first, second, 0x7632u);
  const u32 low = ptx::bit_select(even >> 4, even >> 1, 0x08080808u);
  const u32 high = ptx::bit_select(odd, odd << 3, 0x80808080u);
  return ptx::bit_select(high, low, 0xf0f0f0f0u);
}

// One code (the low four bits) to float, exactly.
DEVICE float e2m1_to_float(u32 code) {
  // The magnitude's fields placed at the float's: value * 2^-126.
  const float scaled = __uint_as_float(((code & 8u) << 28) | ((code & 7u) << 22));
  return __fmul_rn(scaled, __uint_as_float(0x7e800000u) /* 2^126 */);
}

// Multipliers that the compiler must not know. Multiplying by them shifts on the multiply-add pipe; it
// would turn a known power of two into a shift on the integer pipe, which is the busier one here.
__constant__ u32 SHIFT_MULTIPLIERS[3] = {2, 16, 256};

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
