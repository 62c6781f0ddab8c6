// The query operand: tiles of up to 8 query rows of one sequence and KV head, as B fragments in the
// order a format stores K.
#pragma once
#include "attention/fragments.cuh"
#include "numeric/bf16.cuh"
#include "numeric/f16.cuh"
#include "ptx.cuh"

// What q and the output are made of.
struct Bf16Element {
  static constexpr bool IS_F16 = false;
  static DEVICE float to_float(u32 bits) { return bf16_to_float(bits); }
  static DEVICE u32 pack(float low, float high) { return ptx::pack_bf16x2(low, high); }
};
struct F16Element {
  static constexpr bool IS_F16 = true;
  static DEVICE float to_float(u32 bits) { return f16_to_float(bits); }
  static DEVICE u32 pack(float low, float high) { return ptx::pack_f16x2(low, high); }
};

// A lane's own elements of q, as they come from memory: the dims of its K chunks of one query row.
template <class Element, class Key>
struct QueryRow {
  u32 word[Key::WORDS];

  DEVICE float element(int i) const {
    return Element::to_float((word[i / 2] >> (16 * (i % 2))) & 0xffffu);
  }

  // Largest magnitude over the four lanes that hold the row; NaN where there is one.
  DEVICE float magnitude() const {
    u32 largest = 0;
    UNROLL for (int i = 0; i < Key::WORDS; i++)
      largest = max(largest, max(word[i] & 0x7fffu, (word[i] >> 16) & 0x7fffu));
    largest = max(largest, __shfl_xor_sync(FULL_WARP, largest, 1));
    return Element::to_float(max(largest, __shfl_xor_sync(FULL_WARP, largest, 2)));
  }
};

// row: HEAD_DIM elements, 16-byte aligned; null reads as zeros.
template <class Element, class Format>
DEVICE QueryRow<Element, typename Format::Key> load_query_row(const u16* row, Lane lane) {
  using Key = typename Format::Key;
  constexpr int VECTORS = Key::WORDS / Key::ROUNDS / 4;  // 16-byte loads a chunk
  QueryRow<Element, Key> result = {};
  if (row == nullptr) return result;
  UNROLL for (int round = 0; round < Key::ROUNDS; round++) {
    if (!Key::exists(lane.quad, round)) continue;
    UNROLL for (int v = 0; v < VECTORS; v++) {
      const uint4 four = *reinterpret_cast<const uint4*>(row + Key::start(lane.quad, round) + 8 * v);
      u32* words = result.word + 4 * (round * VECTORS + v);
      words[0] = four.x, words[1] = four.y, words[2] = four.z, words[3] = four.w;
    }
  }
  return result;
}

// B fragments. F16 elements over BF16 keys are held as a sum of two BF16 numbers, `rest` the smaller:
// exact, for F16 has 11 significant bits and two BF16 have 16.
template <class Element, class Format, int ROW_TILES>
struct QueryTiles {
  using Key = typename Format::Key;
  static constexpr bool HAS_REST = Element::IS_F16 && !Format::QUERY_IS_F16;

  u32 fragment[ROW_TILES][Key::PRODUCTS][2];
  u32 rest[HAS_REST ? ROW_TILES : 1][HAS_REST ? Key::PRODUCTS : 1][2];
  // What scores must be multiplied by to undo the normalisation: of rows 2c and 2c + 1 of tile t at 2t and
  // 2t + 1.
  float restore[2 * ROW_TILES];
};

// F16 has a narrower range than BF16, so each row is multiplied by the power of two that brings its
// largest magnitude into [2^14, 2^15): exact for all that F16 then resolves (38 binary orders below).
// Returns the biased float32 exponent of that power.
DEVICE u32 normalising_exponent(float magnitude) {
  const u32 exponent = __float_as_uint(magnitude) >> 23;
  if (exponent == 0xffu || magnitude == 0.0f) return 127u;  // Inf or NaN stay what they are
  return min(254u - 1u, 127u + 14u + 127u - max(exponent, 1u));
}

// Tile t of `tiles` from this lane's row of it.
template <class Element, class Format, int ROW_TILES>
DEVICE void make_query_tile(QueryTiles<Element, Format, ROW_TILES>& tiles, int t,
                            const QueryRow<Element, typename Format::Key>& row, Lane lane) {
  float factor = 1.0f;
  tiles.restore[2 * t] = tiles.restore[2 * t + 1] = 1.0f;
  if constexpr (Format::QUERY_IS_F16) {
    const u32 exponent = normalising_exponent(row.magnitude());
    factor = __uint_as_float(exponent << 23);
    const float inverse = __uint_as_float((254u - exponent) << 23);
    UNROLL for (int k = 0; k < 2; k++)
      tiles.restore[2 * t + k] = __shfl_sync(FULL_WARP, inverse, 4 * (2 * lane.quad + k));
  }
  UNROLL for (int product = 0; product < Format::Key::PRODUCTS; product++) {
    UNROLL for (int reg = 0; reg < 2; reg++) {
      const float low = row.element(Format::query_element(product, reg, 0));
      const float high = row.element(Format::query_element(product, reg, 1));
      if constexpr (Format::QUERY_IS_F16) {
        tiles.fragment[t][product][reg] = ptx::pack_f16x2(low * factor, high * factor);
      } else {
        const u32 pair = ptx::pack_bf16x2(low, high);
        tiles.fragment[t][product][reg] = pair;
        if constexpr (QueryTiles<Element, Format, ROW_TILES>::HAS_REST)
          tiles.rest[t][product][reg] = ptx::pack_bf16x2(low - bf16x2_low(pair), high - bf16x2_high(pair));
      }
    }
  }
}
