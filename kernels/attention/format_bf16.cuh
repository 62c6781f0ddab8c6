// BF16 cache: rows of HEAD_DIM BF16 values. Operands are BF16, no conversion at all.
#pragma once
#include "attention/fragments.cuh"
#include "ptx.cuh"

template <int HEAD_DIM>
struct Bf16Format {
  static constexpr bool QUERY_IS_F16 = false;
  static constexpr float OPERAND_SHIFT = 1.0f;  // what K and V operands must be multiplied by
  static constexpr int ROW_BYTES = 2 * HEAD_DIM;
  static constexpr int SCALE_BYTES = 0;

  static constexpr int KEY_CHUNK = 8;  // elements a lane reads at once, 16 bytes
  static constexpr int KEY_CHUNKS = HEAD_DIM / (4 * KEY_CHUNK);
  static constexpr int VALUE_CHUNK = smaller(8, power_of_two_divisor(HEAD_DIM / 8));
  using Dims = ValueDims<HEAD_DIM, VALUE_CHUNK>;

  // Which of the lane's own elements of q belongs into half `half` of B register `reg` of a product. A
  // lane owns the dims of its K chunks, in their order.
  static DEVICE constexpr int query_element(int product, int reg, int half) {
    return 4 * product + 2 * reg + half;
  }

  static DEVICE u32 pack_weights(float low, float high) { return ptx::pack_bf16x2(low, high); }

  // scores += K rows (this lane's two) times q.
  static DEVICE void score(float (&scores)[4], CacheRow row0, CacheRow row1, int quad,
                           const u32 (&query)[HEAD_DIM / 16][2]) {
    UNROLL for (int chunk = 0; chunk < KEY_CHUNKS; chunk++) {
      const int offset = 2 * KEY_CHUNK * (quad + 4 * chunk);
      const Words<4> a = load_words<4>(row0.data + offset), b = load_words<4>(row1.data + offset);
      UNROLL for (int half = 0; half < 2; half++) {
        const u32(&q)[2] = query[2 * chunk + half];
        ptx::mma_m16n8k16_bf16(scores, a.word[2 * half], b.word[2 * half], a.word[2 * half + 1],
                               b.word[2 * half + 1], q[0], q[1]);
      }
    }
  }

  // output += V^T (this lane's four tokens) times weights.
  static DEVICE void accumulate(float (&output)[HEAD_DIM / 16][4], const CacheRow (&rows)[4], int row,
                                const bool (&dead)[4], u32 weights0, u32 weights1) {
    constexpr int WORDS = VALUE_CHUNK / 2;
    UNROLL for (int chunk = 0; chunk < Dims::CHUNKS; chunk++) {
      Words<WORDS> v[4];
      UNROLL for (int j = 0; j < 4; j++) {
        v[j] = load_words<WORDS>(rows[j].data + 2 * Dims::chunk_start(row, chunk));
        zero_if(dead[j], v[j]);
      }
      UNROLL for (int w = 0; w < WORDS; w++) {
        // Word w of two tokens holds dims 2w, 2w + 1 of each: pair the tokens instead.
        const u32 v0 = v[0].word[w], v1 = v[1].word[w], v2 = v[2].word[w], v3 = v[3].word[w];
        ptx::mma_m16n8k16_bf16(output[chunk * Dims::PRODUCTS_PER_CHUNK + w],
                               ptx::prmt(v0, v1, 0x5410), ptx::prmt(v0, v1, 0x7632),
                               ptx::prmt(v2, v3, 0x5410), ptx::prmt(v2, v3, 0x7632), weights0,
                               weights1);
      }
    }
  }
};
