// F16 and BF16 as bit patterns: conversions, round to nearest even.
#pragma once
#include "bits.h"

namespace cupaged_emulator {

inline float half_to_float(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
  const uint32_t magnitude = static_cast<uint32_t>(half & 0x7fffu) << 13;
  // The exponent biases differ by 112; the multiplication also normalises subnormals, exactly.
  const float scaled = bit_cast<float>(magnitude) * bit_cast<float>(0x77800000u /* 2^112 */);
  const uint32_t infinite_or_nan = magnitude >= 0x0f800000u ? 0x7f800000u : 0u;
  return bit_cast<float>(bit_cast<uint32_t>(scaled) | infinite_or_nan | sign);
}

inline float bfloat_to_float(uint16_t bits) {
  return bit_cast<float>(static_cast<uint32_t>(bits) << 16);
}

// A NaN becomes 0x7fff, as the device's conversion gives it.
inline uint16_t float_to_half(float value) {
  const uint32_t bits = bit_cast<uint32_t>(value);
  const uint32_t sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return 0x7fffu;
  if (magnitude >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);  // from 65520 on: infinity
  if (magnitude < 0x38800000u) {
    // Below 2^-14 halves are multiples of 2^-24, one ulp of the floats from 0.5 on: the addition rounds.
    const float sum = bit_cast<float>(magnitude) + 0.5f;
    return static_cast<uint16_t>(sign | (bit_cast<uint32_t>(sum) - 0x3f000000u));
  }
  const uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
  return static_cast<uint16_t>(sign | ((rounded >> 13) - (112u << 10)));
}

inline uint16_t float_to_bfloat(float value) {
  const uint32_t bits = bit_cast<uint32_t>(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fffu;
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

}  // namespace cupaged_emulator
