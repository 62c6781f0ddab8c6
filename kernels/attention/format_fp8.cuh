// FP8 cache: rows of HEAD_DIM E4M3 codes. Operands are F16, to which E4M3 converts exactly; k_scale
// and v_scale are applied outside (to the scores' factor and to o).
#pragma once
#include "attention/fragments.cuh"
#include "numeric/e4m3.cuh"

template <int HEAD_DIM>
struct Fp8Format {
  static constexpr bool QUERY_IS_F16 = true;
  // Of the largest weight when the reference is set, log2: F16 holds weights 2^7 larger, and has all
  // bits of those down to 2^-22 of the largest.
  static constexpr float WEIGHT_HEADROOM = 8.0f;
  static constexpr float OPERAND_SHIFT = 1.0f;
  static constexpr int ROW_BYTES = HEAD_DIM;
  static constexpr int SCALE_BYTES = 0;

  using Key = KeyDims<HEAD_DIM, 16>;  // 16 bytes
  using Value = ValueDims<HEAD_DIM, larger(4, smaller(16, power_of_two_divisor(HEAD_DIM / 8)))>;

  static DEVICE constexpr int query_element(int product, int reg, int half) {
    return 4 * product + 2 * reg + half;
  }

  static DEVICE u32 pack_weights(float low, float high) { return ptx::pack_f16x2(low, high); }

  template <int ROW_TILES>
  static DEVICE void score(float (&scores)[ROW_TILES][4], CacheRow row0, CacheRow row1, int quad,
                           const u32 (&query)[ROW_TILES][Key::PRODUCTS][2]) {
    UNROLL for (int round = 0; round < Key::ROUNDS; round++) {
      const int offset = Key::start(quad, round);
      const bool exists = Key::exists(quad, round);
      const Words<4> a = load_words_if<4>(exists, row0.data + offset);
      const Words<4> b = load_words_if<4>(exists, row1.data + offset);
      UNROLL for (int w = 0; w < 4; w++) {
        const u32 k[4] = {e4m3x2_to_f16x2(a.word[w]), e4m3x2_to_f16x2(b.word[w]),
                          e4m3x2_to_f16x2(a.word[w] >> 16), e4m3x2_to_f16x2(b.word[w] >> 16)};
        UNROLL for (int t = 0; t < ROW_TILES; t++) {
          const u32(&q)[2] = query[t][4 * round + w];
          ptx::mma_m16n8k16_f16(scores[t], k[0], k[1], k[2], k[3], q[0], q[1]);
        }
      }
    }
  }

  template <int ROW_TILES>
  static DEVICE void accumulate(float (&output)[ROW_TILES][Value::PRODUCTS][4], const CacheRow (&rows)[4],
                                int row, const bool (&dead)[4], const u32 (&weights)[ROW_TILES][2]) {
    constexpr int WORDS = Value::PRODUCTS_PER_ROUND / 2;
    UNROLL for (int round = 0; round < Value::ROUNDS; round++) {
      Words<WORDS> v[4];
      UNROLL for (int j = 0; j < 4; j++) {
        v[j] = load_words_if<WORDS>(Value::exists(row, round), rows[j].data + Value::start(row, round));
        zero_if(dead[j], v[j]);
      }
      UNROLL for (int w = 0; w < WORDS; w++) {
        // Interleave the bytes of two tokens: (token, next token) pairs of dims 4w, 4w + 1, then of
        // 4w + 2, 4w + 3.
        UNROLL for (int half = 0; half < 2; half++) {
          const u32 selector = half == 0 ? 0x5140 : 0x7362;
          const u32 first = ptx::prmt(v[0].word[w], v[1].word[w], selector);
          const u32 second = ptx::prmt(v[2].word[w], v[3].word[w], selector);
          const u32 a[4] = {e4m3x2_to_f16x2(first), e4m3x2_to_f16x2(first >> 16), e4m3x2_to_f16x2(second),
                            e4m3x2_to_f16x2(second >> 16)};
          const int product = round * Value::PRODUCTS_PER_ROUND + 2 * w + half;
          UNROLL for (int t = 0; t < ROW_TILES; t++)
            ptx::mma_m16n8k16_f16(output[t][product], a[0], a[1], a[2], a[3], weights[t][0], weights[t][1]);
        }
      }
    }
  }
};
