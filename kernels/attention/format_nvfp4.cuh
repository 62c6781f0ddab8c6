// NVFP4 cache: rows of HEAD_DIM E2M1 codes (two a byte, the first in the low nibble) and, apart, one
// E4M3 scale for every 16. Operands are F16 values times 2^-14 (see e2m1x8_to_f16x2), exactly;
// OPERAND_SHIFT undoes it in the scores' factor and in o.
#pragma once
#include "attention/fragments.cuh"
#include "numeric/e2m1.cuh"
#include "numeric/e4m3.cuh"

template <int HEAD_DIM>
struct Nvfp4Format {
  static constexpr int GROUP = 16;  // values that share a scale
  static constexpr bool QUERY_IS_F16 = true;
  static constexpr float OPERAND_SHIFT = E2M1_DECODE_SHIFT;
  static constexpr int ROW_BYTES = HEAD_DIM / 2;
  static constexpr int SCALE_BYTES = HEAD_DIM / GROUP;

  // Whole scale groups a lane reads at once: two (16 bytes) where HEAD_DIM allows, else one.
  static constexpr int KEY_CHUNK = smaller(32, power_of_two_divisor(HEAD_DIM / 4));
  static constexpr int KEY_CHUNKS = HEAD_DIM / (4 * KEY_CHUNK);
  static constexpr int KEY_WORDS = KEY_CHUNK / 8;
  static_assert(KEY_CHUNK >= GROUP, "HEAD_DIM must be a multiple of 64");
  // Half a group or a whole one, so that one scale serves a lane's chunk.
  static constexpr int VALUE_CHUNK = smaller(GROUP, power_of_two_divisor(HEAD_DIM / 8));
  using Dims = ValueDims<HEAD_DIM, VALUE_CHUNK>;

  // A word's conversion pairs nibbles i and i + 4, so q is laid out the same way.
  static DEVICE constexpr int query_element(int product, int reg, int half) {
    return 8 * (product / 2) + 2 * (product % 2) + reg + 4 * half;
  }

  static DEVICE u32 pack_weights(float low, float high) { return ptx::pack_f16x2(low, high); }

  // The scales of chunk `chunk` of this lane as f16x2: group 0 low, group 1 (if any) high.
  static DEVICE u32 key_scales(const u8* scales, int quad, int chunk) {
    constexpr int GROUPS = KEY_CHUNK / GROUP;
    const u8* pointer = scales + GROUPS * (quad + 4 * chunk);
    const u32 codes = GROUPS == 2 ? *reinterpret_cast<const u16*>(pointer) : *pointer;
    return e4m3x2_to_f16x2(codes);
  }

  static DEVICE void score(float (&scores)[4], CacheRow row0, CacheRow row1, int quad,
                           const u32 (&query)[HEAD_DIM / 16][2]) {
    UNROLL for (int chunk = 0; chunk < KEY_CHUNKS; chunk++) {
      const int offset = KEY_CHUNK / 2 * (quad + 4 * chunk);
      const Words<KEY_WORDS> a = load_words<KEY_WORDS>(row0.data + offset);
      const Words<KEY_WORDS> b = load_words<KEY_WORDS>(row1.data + offset);
      const u32 scales_a = key_scales(row0.scales, quad, chunk);
      const u32 scales_b = key_scales(row1.scales, quad, chunk);
      UNROLL for (int w = 0; w < KEY_WORDS; w++) {
        const u32 broadcast = w < 2 ? 0x1010 : 0x3232;  // two words to a group
        u32 f[4], g[4];
        e2m1x8_to_f16x2(a.word[w], ptx::prmt(scales_a, 0u, broadcast), f);
        e2m1x8_to_f16x2(b.word[w], ptx::prmt(scales_b, 0u, broadcast), g);
        const int product = 2 * (chunk * KEY_WORDS + w);
        ptx::mma_m16n8k16_f16(scores, f[0], g[0], f[1], g[1], query[product][0], query[product][1]);
        ptx::mma_m16n8k16_f16(scores, f[2], g[2], f[3], g[3], query[product + 1][0],
                              query[product + 1][1]);
      }
    }
  }

  static DEVICE void accumulate(float (&output)[HEAD_DIM / 16][4], const CacheRow (&rows)[4], int row,
                                const bool (&dead)[4], u32 weights0, u32 weights1) {
    constexpr int WORDS = VALUE_CHUNK / 8;
    UNROLL for (int chunk = 0; chunk < Dims::CHUNKS; chunk++) {
      const int start = Dims::chunk_start(row, chunk);
      Words<WORDS> v[4];
      u32 scale[4];
      UNROLL for (int j = 0; j < 4; j++) {
        v[j] = load_words<WORDS>(rows[j].data + start / 2);
        // Codes are always finite: zeroing a dead token's scale is enough.
        scale[j] = dead[j] ? 0u : rows[j].scales[start / GROUP];
      }
      const u32 scales01 = e4m3x2_to_f16x2(scale[0] | (scale[1] << 8));
      const u32 scales23 = e4m3x2_to_f16x2(scale[2] | (scale[3] << 8));
      UNROLL for (int w = 0; w < 2 * WORDS; w++) {
        // Half words of two tokens side by side: the conversion then pairs token with next token.
        const u32 selector = w % 2 ? 0x7632 : 0x5410;
        u32 f[4], g[4];
        e2m1x8_to_f16x2(ptx::prmt(v[0].word[w / 2], v[1].word[w / 2], selector), scales01, f);
        e2m1x8_to_f16x2(ptx::prmt(v[2].word[w / 2], v[3].word[w / 2], selector), scales23, g);
        const int product = chunk * Dims::PRODUCTS_PER_CHUNK + 2 * w;
        ptx::mma_m16n8k16_f16(output[product], f[0], f[1], g[0], g[1], weights0, weights1);
        ptx::mma_m16n8k16_f16(output[product + 1], f[2], f[3], g[2], g[3], weights0, weights1);
      }
    }
  }
};
