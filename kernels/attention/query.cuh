// The query operand: up to 8 heads of one sequence, as B fragments in the order a format stores K.
#pragma once
#include "attention/fragments.cuh"
#include "numeric/bf16.cuh"
#include "ptx.cuh"

// A lane's own elements of q, as they come from memory: HEAD_DIM / 4 BF16 values of one head.
template <int HEAD_DIM>
struct QueryRow {
  u32 word[HEAD_DIM / 8];

  DEVICE u32 element(int i) const { return (word[i / 2] >> (16 * (i % 2))) & 0xffffu; }

  // Largest magnitude, as a BF16 bit pattern, over the four lanes that hold the head.
  DEVICE u32 magnitude() const {
    u32 largest = 0;
    UNROLL for (int i = 0; i < HEAD_DIM / 8; i++)
      largest = max(largest, max(word[i] & 0x7fffu, (word[i] >> 16) & 0x7fffu));
    largest = max(largest, __shfl_xor_sync(FULL_WARP, largest, 1));
    return max(largest, __shfl_xor_sync(FULL_WARP, largest, 2));
  }
};

template <int HEAD_DIM>
struct QueryTile {
  u32 fragment[HEAD_DIM / 16][2];
  // What scores of heads 2c and 2c + 1 must be multiplied by to undo the normalisation.
  float restore[2];
};

// Rows `rows[0 .. heads)` are HEAD_DIM elements apart; heads from `heads` on read as zeros.
template <class Format, int HEAD_DIM>
DEVICE QueryRow<HEAD_DIM> load_query_row(const bf16_bits* rows, int heads, Lane lane) {
  constexpr int VECTORS = Format::KEY_CHUNK / 8;  // 16-byte loads a chunk
  QueryRow<HEAD_DIM> row = {};
  if (lane.row >= heads) return row;
  UNROLL for (int chunk = 0; chunk < Format::KEY_CHUNKS; chunk++) {
    UNROLL for (int v = 0; v < VECTORS; v++) {
      const int dim = Format::KEY_CHUNK * (lane.quad + 4 * chunk) + 8 * v;
      const uint4 four = *reinterpret_cast<const uint4*>(rows + lane.row * HEAD_DIM + dim);
      u32* words = row.word + 4 * (chunk * VECTORS + v);
      words[0] = four.x, words[1] = four.y, words[2] = four.z, words[3] = four.w;
    }
  }
  return row;
}

// F16 has a narrower range than BF16, so each head is multiplied by the power of two that brings its
// largest magnitude into [2^14, 2^15): exact for all that F16 then resolves (38 binary orders below).
// Returns the biased float32 exponent of that power.
DEVICE u32 normalising_exponent(u32 magnitude) {
  const u32 exponent = magnitude >> 7;
  if (exponent == 0xffu || magnitude == 0u) return 127u;  // Inf or NaN stay what they are
  return min(254u - 1u, 127u + 14u + 127u - max(exponent, 1u));
}

template <class Format, int HEAD_DIM>
DEVICE QueryTile<HEAD_DIM> make_query_tile(const QueryRow<HEAD_DIM>& row, Lane lane) {
  QueryTile<HEAD_DIM> tile;
  float factor = 1.0f;
  tile.restore[0] = tile.restore[1] = 1.0f;
  if constexpr (Format::QUERY_IS_F16) {
    const u32 exponent = normalising_exponent(row.magnitude());
    factor = __uint_as_float(exponent << 23);
    const float inverse = __uint_as_float((254u - exponent) << 23);
    UNROLL for (int k = 0; k < 2; k++)
      tile.restore[k] = __shfl_sync(FULL_WARP, inverse, 4 * (2 * lane.quad + k));
  }
  UNROLL for (int product = 0; product < HEAD_DIM / 16; product++) {
    UNROLL for (int reg = 0; reg < 2; reg++) {
      const u32 low = row.element(Format::query_element(product, reg, 0));
      const u32 high = row.element(Format::query_element(product, reg, 1));
      if constexpr (Format::QUERY_IS_F16) {
        tile.fragment[product][reg] =
            ptx::pack_f16x2(bf16_to_float(low) * factor, bf16_to_float(high) * factor);
      } else {
        tile.fragment[product][reg] = low | (high << 16);
      }
    }
  }
  return tile;
}
