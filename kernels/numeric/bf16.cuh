// BF16: the upper half of a float32.
#pragma once
#include "ptx.cuh"

DEVICE float bf16_to_float(u32 bits) { return __uint_as_float(bits << 16); }

DEVICE float bf16x2_low(u32 pair) { return __uint_as_float(pair << 16); }
DEVICE float bf16x2_high(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }

// Round to nearest even; a NaN stays a NaN and keeps its sign.
DEVICE bf16_bits float_to_bf16(float value) {
  const u32 bits = __float_as_uint(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<bf16_bits>((bits >> 16) | 0x40u);
  return static_cast<bf16_bits>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

DEVICE u32 floats_to_bf16x2(float low, float high) {
  return static_cast<u32>(float_to_bf16(low)) | (static_cast<u32>(float_to_bf16(high)) << 16);
}

// Two floats to bf16x2, each cut to the upper half of its bits, whose last is set where others were lost
// ("round to odd"): the result compares with numbers of up to 7 significant bits as the float does.
DEVICE u32 floats_to_bf16x2_odd(float low, float high) {
  const u32 a = __float_as_uint(low), b = __float_as_uint(high);
  return ptx::prmt(a | ((a & 0xffffu) + 0xffffu), b | ((b & 0xffffu) + 0xffffu), 0x7632u);
}
