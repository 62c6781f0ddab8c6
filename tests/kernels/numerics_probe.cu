// Exposes the number conversions of the kernels, one value a thread.
#include "numeric/bf16.cuh"
#include "numeric/division.cuh"
#include "numeric/e2m1.cuh"
#include "numeric/e4m3.cuh"
#include "ring/plan.cuh"

static DEVICE float half_to_float(u32 bits) {
  // Exact, through a float with the half's fields and its exponent bias.
  const u32 magnitude = bits & 0x7fffu;
  if (magnitude > 0x7c00u) return __uint_as_float(0x7fc00000u);
  const float scaled = __uint_as_float(((bits & 0x8000u) << 16) | (magnitude << 13));
  return scaled * __uint_as_float(0x77800000u) /* 2^112 */;
}

extern "C" __global__ void decode_e4m3(float* single, float* pair_low, float* pair_high, u32 count) {
  const u32 code = blockIdx.x * blockDim.x + threadIdx.x;
  if (code >= count) return;
  single[code] = e4m3_to_float(code);
  const u32 pair = e4m3x2_to_f16x2(code | ((255u - code) << 8));
  pair_low[code] = half_to_float(pair & 0xffffu);
  pair_high[code] = half_to_float(pair >> 16);
}

// Four values a thread to E4M3 at once, and each to BF16.
extern "C" __global__ void encode(const float4* values, u32* e4m3, u16* bf16, u32 count) {
  const u32 i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= count) return;
  const float4 v = values[i];
  e4m3[i] = floats_to_e4m3x4(v.x, v.y, v.z, v.w);
  bf16[4 * i] = float_to_bf16(v.x), bf16[4 * i + 1] = float_to_bf16(v.y);
  bf16[4 * i + 2] = float_to_bf16(v.z), bf16[4 * i + 3] = float_to_bf16(v.w);
}

// codes[c * words + i]: the eight values of word i, divided by the scale of code c, for a grid of [i,
// c].
extern "C" __global__ void encode_e2m1(const uint4* values, const u32* scale_codes, u32* codes,
                                       u32 words) {
  const u32 i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= words) return;
  const uint4 v = values[i];
  const u32 pairs[4] = {v.x, v.y, v.z, v.w};
  const float scale = e4m3_to_float(scale_codes[blockIdx.y]);
  codes[blockIdx.y * words + i] =
      bf16x8_to_e2m1(pairs, ptx::reciprocal_approx(scale * E2M1_DECODE_SHIFT));
}

// Both halves of a and b against each other.
extern "C" __global__ void compare_magnitudes(const u32* a, const u32* b, u32* larger, u32* smaller,
                                              u32* smaller_f16, u32 count) {
  const u32 i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= count) return;
  larger[i] = max_magnitude_bf16x2(a[i], b[i]);
  smaller[i] = min_magnitude_bf16x2(a[i], b[i]);
  smaller_f16[i] = min_magnitude_f16x2(a[i], b[i]);
}

// decoded[8i .. 8i + 8): the codes of word i times the scale, times 2^14.
extern "C" __global__ void decode_e2m1(const u32* words, const u32* scales, float* decoded, u32 count) {
  const u32 i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= count) return;
  u32 pairs[4];
  e2m1x8_to_f16x2(words[i], ptx::prmt(e4m3x2_to_f16x2(scales[i]), 0u, 0x1010u), pairs);
  for (u32 k = 0; k < 4; k++) {
    decoded[8 * i + k] = half_to_float(pairs[k] & 0xffffu) * E2M1_DECODE_SHIFT;
    decoded[8 * i + k + 4] = half_to_float(pairs[k] >> 16) * E2M1_DECODE_SHIFT;
  }
}

// For a divisor in [1, 2) with the mantissa bits first + step * thread: how many quotients of the 128
// BF16 numbers in [1, 2) are not correctly rounded. Exponents change nothing but over- and underflow.
extern "C" __global__ void count_wrong_quotients(u32* wrong, u32 first, u32 step, u32 count) {
  const u32 i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= count) return;
  const Divisor divisor = Divisor::of(__uint_as_float(0x3f800000u | (first + step * i)));
  u32 found = 0;
  for (u32 value = 0x3f80u; value < 0x4000u; value++) {
    const float dividend = bf16_to_float(value);
    found += divisor.quotient(dividend) != __fdiv_rn(dividend, divisor.divisor);
  }
  wrong[i] = found;
}

// found[2i, 2i + 1]: whose the first and the last position of share i are, of total positions.
extern "C" __global__ void ends_of_shares(u32* found, u32 total, u32 count) {
  const u32 i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= count) return;
  const Shares shares = Shares::among(total, count);
  found[2 * i] = shares.block_of(shares.begin(i));
  found[2 * i + 1] = shares.block_of(shares.begin(i + 1u) - 1u);
}
