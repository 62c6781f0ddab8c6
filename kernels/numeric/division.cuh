// Division of BF16 values by one float, with the bits of a true division but without its instructions.
#pragma once
#include "numeric/bf16.cuh"
#include "numeric/magnitudes.cuh"

// A divisor from 2^-60 to 2^60, by which multiplications divide.
struct Divisor {
  float divisor;
  float reciprocal;  // rounded to nearest
  u32 limits;        // of dividends: about 4096 * divisor, for both halves of a pair

  static DEVICE Divisor of(float divisor) {
    return {divisor, __fdiv_rn(1.0f, divisor), (__float_as_uint(divisor * 4096.0f) >> 16) * 0x10001u};
  }

  // Both values of a pair cut so that no quotient overflows; a NaN stays one.
  DEVICE u32 limited(u32 pair) const { return min_magnitude_bf16x2(pair, limits); }

  // value / divisor, rounded to nearest, for a BF16 value that was limited. The sign of a zero is
  // arbitrary, and quotients below 2^-40, where remainders may underflow, are inexact.
  //
  // For dividends of 24 bits one correction by the remainder could miss by an ulp. For those of 8 it
  // does not, whichever of its 2^23 mantissas the divisor has: a test goes through them.
  DEVICE float quotient(float value) const {
    const float first = __fmul_rn(value, reciprocal);
    return __fmaf_rn(__fmaf_rn(-first, divisor, value), reciprocal, first);
  }
};

// Quotients as BF16 (see floats_to_bf16x2_odd), with the signs of another pair: those of zeros and NaN
// are arbitrary.
DEVICE u32 signed_odd_pair(float low, float high, u32 signs) {
  return ptx::bit_select(signs, floats_to_bf16x2_odd(low, high), SIGNS_X2);
}

// Makes any divisor one from 2^-60 to 2^60: where it is not (or is a NaN), the values are divided by it
// here, rounded to odd BF16 numbers, and 1 is left to divide by. Their comparisons with numbers of up to
// 7 significant bits are those of the correctly rounded quotients, their signs those of the values.
//
// Rare, so its code is kept small: pairs leave at one end and come back at the other.
template <int PAIRS>
DEVICE float without_extremes(u32 (&pairs)[PAIRS], float divisor) {
  if (divisor >= 0x1p-60f && divisor <= 0x1p60f) return divisor;
#pragma unroll 1
  for (int n = 0; n < PAIRS; n++) {
    const u32 pair = pairs[0];
    const float low = __fdiv_rn(bf16x2_low(pair), divisor), high = __fdiv_rn(bf16x2_high(pair), divisor);
#pragma unroll
    for (int i = 0; i + 1 < PAIRS; i++) pairs[i] = pairs[i + 1];
    pairs[PAIRS - 1] = signed_odd_pair(low, high, pair);
  }
  return 1.0f;
}
