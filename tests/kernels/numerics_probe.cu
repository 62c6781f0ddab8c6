// Exposes the number conversions of the kernels, one value a thread.
#include "numeric/bf16.cuh"
#include "numeric/e2m1.cuh"
#include "numeric/e4m3.cuh"

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

extern "C" __global__ void encode(const float* values, u8* e4m3, u8* e2m1, u16* bf16, u32 count) {
  const u32 i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= count) return;
  e4m3[i] = static_cast<u8>(float_to_e4m3(values[i]));
  e2m1[i] = static_cast<u8>(float_to_e2m1(values[i]));
  bf16[i] = float_to_bf16(values[i]);
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
