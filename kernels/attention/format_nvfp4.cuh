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
  // Of the largest weight when the reference is set, log2: F16 holds weights 2^7 larger, and has all
  // bits of those down to 2^-22 of the largest.
  static constexpr float WEIGHT_HEADROOM = 8.0f;
  static constexpr float OPERAND_SHIFT = E2M1_DECODE_SHIFT;
  static constexpr int ROW_BYTES = HEAD_DIM / 2;
  static constexpr int SCALE_BYTES = HEAD_DIM / GROUP;

  // Whole scale groups a lane reads of K at once: two (16 bytes) where HEAD_DIM allows, else one.
  static constexpr int KEY_CHUNK = larger(GROUP, smaller(2 * GROUP, power_of_two_divisor(HEAD_DIM / 4)));
  static constexpr int KEY_WORDS = KEY_CHUNK / 8;
  using Key = KeyDims<HEAD_DIM, KEY_CHUNK>;
  // Half a group of V or a whole one, so that one scale serves a lane's chunk.
  using Value = ValueDims<HEAD_DIM, larger(8, smaller(GROUP, power_of_two_divisor(HEAD_DIM / 8)))>;

  // A word's conversion pairs nibbles i and i + 4, so q is laid out the same way.
  static DEVICE constexpr int query_element(int product, int reg, int half) {
    return 8 * (product / 2) + 2 * (product % 2) + reg + 4 * half;
  }

  static DEVICE u32 pack_weights(float low, float high) { return ptx::pack_f16x2(low, high); }

  // The scales of a lane's chunk as f16x2: group 0 low, group 1 (if any) high.
  static DEVICE u32 key_scales(bool exists, const u8* scales, int start) {
    const u8* pointer = scales + start / GROUP;
    u32 codes = 0;
    if (exists) codes = KEY_CHUNK == GROUP ? *pointer : *reinterpret_cast<const u16*>(pointer);
    return e4m3x2_to_f16x2(codes);
  }

  template <int ROW_TILES>
  static DEVICE void score(float (&scores)[ROW_TILES][4], CacheRow row0, CacheRow row1, int quad,
                           const u32 (&query)[ROW_TILES][Key::PRODUCTS][2]) {
    UNROLL for (int round = 0; round < Key::ROUNDS; round++) {
      const int start = Key::start(quad, round);
      const bool exists = Key::exists(quad, round);
      const Words<KEY_WORDS> a = load_words_if<KEY_WORDS>(exists, row0.data + start / 2);
      const Words<KEY_WORDS> b = load_words_if<KEY_WORDS>(exists, row1.data + start / 2);
      const u32 scales_a = key_scales(exists, row0.scales, start);
      const u32 scales_b = key_scales(exists, row1.scales, start);
      UNROLL for (int w = 0; w < KEY_WORDS; w++) {
        const u32 broadcast = w < 2 ? 0x1010 : 0x3232;  // two words to a group
        u32 f[4], g[4];
        e2m1x8_to_f16x2(a.word[w], ptx::prmt(scales_a, 0u, broadcast), f);
        e2m1x8_to_f16x2(b.word[w], ptx::prmt(scales_b, 0u, broadcast), g);
        const int product = 2 * (round * KEY_WORDS + w);
        UNROLL for (int t = 0; t < ROW_TILES; t++) {
          const u32(&first)[2] = query[t][product];
          const u32(&second)[2] = query[t][product + 1];
          ptx::mma_m16n8k16_f16(scores[t], f[0], g[0], f[1], g[1], first[0], first[1]);
          ptx::mma_m16n8k16_f16(scores[t], f[2], g[2], f[3], g[3], second[0], second[1]);
        }
      }
    }
  }

  template <int ROW_TILES>
  static DEVICE void accumulate(float (&output)[ROW_TILES][Value::PRODUCTS][4], const CacheRow (&rows)[4],
                                int row, const bool (&dead)[4], const u32 (&weights)[ROW_TILES][2]) {
    constexpr int WORDS = Value::PRODUCTS_PER_ROUND / 4;
    UNROLL for (int round = 0; round < Value::ROUNDS; round++) {
      const int start = Value::start(row, round);
      const bool exists = Value::exists(row, round);
      Words<WORDS> v[4];
      u32 scale[4];
      UNROLL for (int j = 0; j < 4; j++) {
        v[j] = load_words_if<WORDS>(exists, rows[j].data + start / 2);
        // Codes are always finite: zeroing a dead token's scale is enough.
        scale[j] = 0;
        if (exists && !dead[j]) scale[j] = rows[j].scales[start / GROUP];
      }
      const u32 scales01 = e4m3x2_to_f16x2(scale[0] | (scale[1] << 8));
      const u32 scales23 = e4m3x2_to_f16x2(scale[2] | (scale[3] << 8));
      UNROLL for (int w = 0; w < 2 * WORDS; w++) {
        // Half words of two tokens side by side: the conversion then pairs token with next token.
        const u32 selector = w % 2 ? 0x7632 : 0x5410;
        u32 f[4], g[4];
        e2m1x8_to_f16x2(ptx::prmt(v[0].word[w / 2], v[1].word[w / 2], selector), scales01, f);
        e2m1x8_to_f16x2(ptx::prmt(v[2].word[w / 2], v[3].word[w / 2], selector), scales23, g);
        const int product = round * Value::PRODUCTS_PER_ROUND + 2 * w;
        UNROLL for (int t = 0; t < ROW_TILES; t++) {
          ptx::mma_m16n8k16_f16(output[t][product], f[0], f[1], g[0], g[1], weights[t][0], weights[t][1]);
          ptx::mma_m16n8k16_f16(output[t][product + 1], f[2], f[3], g[2], g[3], weights[t][0], weights[t][1]);
        }
      }
    }
  }
};
