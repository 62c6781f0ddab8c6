// The query operand: up to 8 heads of one sequence, as B fragments in the order a format stores K.
#pragma once
#include "attention/fragments.cuh"
#include "numeric/bf16.cuh"
#include "ptx.cuh"

template <int HEAD_DIM>
struct QueryTile {
  u32 fragment[HEAD_DIM / 16][2];
  // What scores of heads 2c and 2c + 1 must be multiplied by to undo the normalisation.
  float restore[2];
};

// Largest magnitude (BF16 bit pattern) of q's row, over the four lanes that hold it.
template <int HEAD_DIM>
DEVICE u32 row_magnitude(const bf16_bits* row, bool exists, int quad) {
  u32 largest = 0;
  if (exists) {
    for (int d = quad * 2; d < HEAD_DIM; d += 8) {
      const u32 pair = *reinterpret_cast<const u32*>(row + d);
      largest = max(largest, max(pair & 0x7fffu, (pair >> 16) & 0x7fffu));
    }
  }
  largest = max(largest, __shfl_xor_sync(FULL_WARP, largest, 1));
  return max(largest, __shfl_xor_sync(FULL_WARP, largest, 2));
}

// F16 has a narrower range than BF16, so each head is multiplied by the power of two that brings its
// largest magnitude into [2^14, 2^15): exact for all that F16 then resolves (38 binary orders below).
// Returns the biased float32 exponent of that power.
DEVICE u32 normalising_exponent(u32 magnitude) {
  const u32 exponent = magnitude >> 7;
  if (exponent == 0xffu || magnitude == 0u) return 127u;  // Inf or NaN stay what they are
  return min(254u - 1u, 127u + 14u + 127u - max(exponent, 1u));
}

// Rows `rows[0 .. heads)` are HEAD_DIM elements apart; heads from `heads` on read as zeros.
template <class Format, int HEAD_DIM>
DEVICE QueryTile<HEAD_DIM> load_query(const bf16_bits* rows, int heads, Lane lane) {
  QueryTile<HEAD_DIM> tile;
  const bool exists = lane.row < heads;
  const bf16_bits* row = rows + static_cast<u64>(exists ? lane.row : 0) * HEAD_DIM;

  float factor = 1.0f;
  tile.restore[0] = tile.restore[1] = 1.0f;
  if constexpr (Format::QUERY_IS_F16) {
    const u32 exponent = normalising_exponent(row_magnitude<HEAD_DIM>(row, exists, lane.quad));
    factor = __uint_as_float(exponent << 23);
    const float inverse = __uint_as_float((254u - exponent) << 23);
    UNROLL for (int k = 0; k < 2; k++)
      tile.restore[k] = __shfl_sync(FULL_WARP, inverse, 4 * (2 * lane.quad + k));
  }

  UNROLL for (int product = 0; product < HEAD_DIM / 16; product++) {
    UNROLL for (int reg = 0; reg < 2; reg++) {
      const u32 low = exists ? row[Format::query_dim(product, reg, 0, lane.quad)] : 0u;
      const u32 high = exists ? row[Format::query_dim(product, reg, 1, lane.quad)] : 0u;
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
