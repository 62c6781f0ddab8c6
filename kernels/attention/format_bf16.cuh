// BF16 cache: rows of HEAD_DIM BF16 values. Operands are BF16, no conversion at all.
#pragma once
#include "attention/fragments.cuh"
#include "ptx.cuh"

template <int HEAD_DIM>
struct Bf16Format {
  static constexpr bool QUERY_IS_F16 = false;
  // Of the largest weight when the reference is set, log2: so small that 2^20 values of BF16's largest,
  // with weights 2^7 larger, add up to less than F32's largest.
  static constexpr float WEIGHT_HEADROOM = -27.0f;
  static constexpr float OPERAND_SHIFT = 1.0f;  // what K and V operands must be multiplied by
  static constexpr int ROW_BYTES = 2 * HEAD_DIM;
  static constexpr int SCALE_BYTES = 0;

  // What a lane reads of a row of K at once (16 bytes), and of V.
  using Key = KeyDims<HEAD_DIM, 8>;
  using Value = ValueDims<HEAD_DIM, larger(4, smaller(8, power_of_two_divisor(HEAD_DIM / 8)))>;

  // Which of the lane's own elements of q belongs into half `half` of B register `reg` of a product. A
  // lane owns the dims of its K chunks, in their order.
  static DEVICE constexpr int query_element(int product, int reg, int half) {
    return 4 * product + 2 * reg + half;
  }

  static DEVICE u32 pack_weights(float low, float high) { return ptx::pack_bf16x2(low, high); }

  // scores += K rows (this lane's two) times q, for each tile of query rows.
  template <int ROW_TILES>
  static DEVICE void score(float (&scores)[ROW_TILES][4], CacheRow row0, CacheRow row1, int quad,
                           const u32 (&query)[ROW_TILES][Key::PRODUCTS][2]) {
    UNROLL for (int round = 0; round < Key::ROUNDS; round++) {
      const int offset = 2 * Key::start(quad, round);
      const bool exists = Key::exists(quad, round);
      const Words<4> a = load_words_if<4>(exists, row0.data + offset);
      const Words<4> b = load_words_if<4>(exists, row1.data + offset);
      UNROLL for (int half = 0; half < 2; half++) {
        UNROLL for (int t = 0; t < ROW_TILES; t++) {
          const u32(&q)[2] = query[t][2 * round + half];
          ptx::mma_m16n8k16_bf16(scores[t], a.word[2 * half], b.word[2 * half], a.word[2 * half + 1],
                                 b.word[2 * half + 1], q[0], q[1]);
        }
      }
    }
  }

  // output += V^T (this lane's four tokens) times weights, for each tile of query rows.
  template <int ROW_TILES>
  static DEVICE void accumulate(float (&output)[ROW_TILES][Value::PRODUCTS][4], const CacheRow (&rows)[4],
                                int row, const bool (&dead)[4], const u32 (&weights)[ROW_TILES][2]) {
    constexpr int WORDS = Value::PRODUCTS_PER_ROUND;
    UNROLL for (int round = 0; round < Value::ROUNDS; round++) {
      Words<WORDS> v[4];
      UNROLL for (int j = 0; j < 4; j++) {
        v[j] = load_words_if<WORDS>(Value::exists(row, round), rows[j].data + 2 * Value::start(row, round));
        zero_if(dead[j], v[j]);
      }
      UNROLL for (int w = 0; w < WORDS; w++) {
        // Word w of two tokens holds dims 2w, 2w + 1 of each: pair the tokens instead.
        const u32 v0 = v[0].word[w], v1 = v[1].word[w], v2 = v[2].word[w], v3 = v[3].word[w];
        const u32 a[4] = {ptx::prmt(v0, v1, 0x5410), ptx::prmt(v0, v1, 0x7632), ptx::prmt(v2, v3, 0x5410),
                          ptx::prmt(v2, v3, 0x7632)};
        UNROLL for (int t = 0; t < ROW_TILES; t++)
          ptx::mma_m16n8k16_bf16(output[t][round * WORDS + w], a[0], a[1], a[2], a[3], weights[t][0],
                                 weights[t][1]);
      }
    }
  }
};
