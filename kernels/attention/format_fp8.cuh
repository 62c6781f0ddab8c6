// FP8 cache: rows of HEAD_DIM E4M3 codes. Operands are F16, to which E4M3 converts exactly; k_scale
// and v_scale are applied outside (to the scores' factor and to o).
#pragma once
#include "attention/fragments.cuh"
#include "numeric/e4m3.cuh"

template <int HEAD_DIM>
struct Fp8Format {
  static constexpr bool QUERY_IS_F16 = true;
  static constexpr float OPERAND_SHIFT = 1.0f;
  static constexpr int ROW_BYTES = HEAD_DIM;
  static constexpr int SCALE_BYTES = 0;

  static constexpr int KEY_CHUNK = 16;  // elements a lane reads at once, 16 bytes
  static constexpr int KEY_CHUNKS = HEAD_DIM / (4 * KEY_CHUNK);
  static constexpr int VALUE_CHUNK = smaller(16, power_of_two_divisor(HEAD_DIM / 8));
  using Dims = ValueDims<HEAD_DIM, VALUE_CHUNK>;

  static DEVICE constexpr int query_element(int product, int reg, int half) {
    return 4 * product + 2 * reg + half;
  }

  static DEVICE u32 pack_weights(float low, float high) { return ptx::pack_f16x2(low, high); }

  static DEVICE void score(float (&scores)[4], CacheRow row0, CacheRow row1, int quad,
                           const u32 (&query)[HEAD_DIM / 16][2]) {
    UNROLL for (int chunk = 0; chunk < KEY_CHUNKS; chunk++) {
      const int offset = KEY_CHUNK * (quad + 4 * chunk);
      const Words<4> a = load_words<4>(row0.data + offset), b = load_words<4>(row1.data + offset);
      UNROLL for (int w = 0; w < 4; w++) {
        const u32(&q)[2] = query[4 * chunk + w];
        ptx::mma_m16n8k16_f16(scores, e4m3x2_to_f16x2(a.word[w]), e4m3x2_to_f16x2(b.word[w]),
                              e4m3x2_to_f16x2(a.word[w] >> 16), e4m3x2_to_f16x2(b.word[w] >> 16),
                              q[0], q[1]);
      }
    }
  }

  static DEVICE void accumulate(float (&output)[HEAD_DIM / 16][4], const CacheRow (&rows)[4], int row,
                                const bool (&dead)[4], u32 weights0, u32 weights1) {
    constexpr int WORDS = VALUE_CHUNK / 4;
    UNROLL for (int chunk = 0; chunk < Dims::CHUNKS; chunk++) {
      Words<WORDS> v[4];
      UNROLL for (int j = 0; j < 4; j++) {
        v[j] = load_words<WORDS>(rows[j].data + Dims::chunk_start(row, chunk));
        zero_if(dead[j], v[j]);
      }
      UNROLL for (int w = 0; w < WORDS; w++) {
        // Interleave the bytes of two tokens: (token, next token) pairs of dims 4w, 4w + 1, then of
        // 4w + 2, 4w + 3.
        UNROLL for (int half = 0; half < 2; half++) {
          const u32 selector = half == 0 ? 0x5140 : 0x7362;
          const u32 first = ptx::prmt(v[0].word[w], v[1].word[w], selector);
          const u32 second = ptx::prmt(v[2].word[w], v[3].word[w], selector);
          ptx::mma_m16n8k16_f16(output[chunk * Dims::PRODUCTS_PER_CHUNK + 2 * w + half],
                                e4m3x2_to_f16x2(first), e4m3x2_to_f16x2(first >> 16),
                                e4m3x2_to_f16x2(second), e4m3x2_to_f16x2(second >> 16), weights0,
                                weights1);
        }
      }
    }
  }
};
