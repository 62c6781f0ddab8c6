// Reading cached values as floats: 16 consecutive values of one (token, KV head). A format is a struct
// with
//   DATA_BYTES: what the codes of 16 values take,
//   read(data, scales, factor, values): values[i] = stored value * factor, with one rounding at most.
#pragma once
#include "numeric/bf16.cuh"
#include "numeric/e2m1.cuh"
#include "numeric/e4m3.cuh"

constexpr int READ_GROUP = 16;

struct Bf16Values {
  static constexpr int DATA_BYTES = 2 * READ_GROUP;

  static DEVICE void read(const u8* data, const u8*, float, float (&values)[READ_GROUP]) {
    const uint4* words = reinterpret_cast<const uint4*>(data);
    UNROLL for (int half = 0; half < 2; half++) {
      const uint4 word = words[half];
      const u32 pairs[4] = {word.x, word.y, word.z, word.w};
      UNROLL for (int i = 0; i < 4; i++) {
        values[8 * half + 2 * i] = bf16x2_low(pairs[i]);
        values[8 * half + 2 * i + 1] = bf16x2_high(pairs[i]);
      }
    }
  }
};

struct Fp8Values {
  static constexpr int DATA_BYTES = READ_GROUP;

  static DEVICE void read(const u8* data, const u8*, float factor, float (&values)[READ_GROUP]) {
    const uint4 word = *reinterpret_cast<const uint4*>(data);
    const u32 codes[4] = {word.x, word.y, word.z, word.w};
    UNROLL for (int i = 0; i < READ_GROUP; i++)
      values[i] = __fmul_rn(e4m3_to_float((codes[i / 4] >> (8 * (i % 4))) & 0xffu), factor);
  }
};

struct Nvfp4Values {
  static constexpr int DATA_BYTES = READ_GROUP / 2;

  static DEVICE void read(const u8* data, const u8* scales, float factor, float (&values)[READ_GROUP]) {
    const uint2 word = *reinterpret_cast<const uint2*>(data);
    const u32 codes[2] = {word.x, word.y};
    const float scale = e4m3_to_float(*scales);
    UNROLL for (int i = 0; i < READ_GROUP; i++) {
      const float exact = __fmul_rn(e2m1_to_float((codes[i / 8] >> (4 * (i % 8))) & 0xfu), scale);
      values[i] = __fmul_rn(exact, factor);
    }
  }
};
