// What the warps of a block do together: those that share a head's tokens merge, and results leave the
// fragments.
#pragma once
#include "attention/lengths.cuh"
#include "attention/warp_attention.cuh"
#include "cache/page_walk.cuh"

// Of one tile of query rows: its two columns' states and its output.
template <class Shape, int TOKEN_WARPS, int PRODUCTS_AT_ONCE, int PRODUCTS>
DEVICE void merge_row_tile(SoftmaxState* state, float (&output)[PRODUCTS][4]) {
  constexpr int SLOTS = TOKEN_WARPS / 2 * (Shape::WARPS / TOKEN_WARPS);
  __shared__ float4 outputs[SLOTS][PRODUCTS_AT_ONCE][WARP_SIZE];
  __shared__ float4 states[SLOTS][WARP_SIZE];
  const int lane = static_cast<int>(threadIdx.x % WARP_SIZE), position = Shape::token_warp();
  UNROLL for (int half = TOKEN_WARPS / 2; half > 0; half /= 2) {
    const int slot = position % half + half * Shape::merge_group();
    const bool gives = position >= half && position < 2 * half, takes = position < half;
    if (gives)
      states[slot][lane] = make_float4(state[0].reference, state[1].reference,
                                       state[0].sum, state[1].sum);
    float2 factor[2] = {};
    UNROLL for (int first = 0; first < PRODUCTS; first += PRODUCTS_AT_ONCE) {
      if (gives) {
        UNROLL for (int p = 0; p < PRODUCTS_AT_ONCE; p++) {
          const float(&o)[4] = output[first + p];
          outputs[slot][p][lane] = make_float4(o[0], o[1], o[2], o[3]);
        }
      }
      __syncthreads();
      if (takes) {
        if (first == 0) {
          const float4 other = states[slot][lane];
          factor[0] = state[0].merge({other.x, other.z});
          factor[1] = state[1].merge({other.y, other.w});
        }
        UNROLL for (int p = 0; p < PRODUCTS_AT_ONCE; p++) {
          const float4 o = outputs[slot][p][lane];
          float(&own)[4] = output[first + p];
          own[0] = own[0] * factor[0].x + o.x * factor[0].y;
          own[1] = own[1] * factor[1].x + o.y * factor[1].y;
          own[2] = own[2] * factor[0].x + o.z * factor[0].y;
          own[3] = own[3] * factor[1].x + o.w * factor[1].y;
        }
      }
      __syncthreads();
    }
  }
}

// Merges the token warps of each head tile into token warp 0, in a fixed order: the result is the same
// bits every time. All threads of the block must call it. A Shape says which warp is which: warp(),
// token_warp(), and merge_group(), the same for warps that work on the same heads. PRODUCTS_AT_ONCE
// trades shared memory against barriers.
template <class Shape, int TOKEN_WARPS, int PRODUCTS_AT_ONCE, class Warp>
DEVICE void merge_token_warps(Warp& warp) {
  if constexpr (TOKEN_WARPS > 1) {
    UNROLL for (int t = 0; t < Warp::ROW_TILES; t++)
      merge_row_tile<Shape, TOKEN_WARPS, PRODUCTS_AT_ONCE>(warp.state + 2 * t, warp.output[t]);
  }
}

// Calls visit(column, k, dim, values) for every query row of the warp that this lane holds, with four
// consecutive dims from `dim` on; the row is in accumulator column k of the lane.
template <class Format, class Warp, class Visit>
DEVICE void visit_output(const Warp& warp, int rows, Visit visit) {
  using Dims = typename Format::Value;
  UNROLL for (int k = 0; k < Warp::COLUMNS; k++) {
    const int column = warp.lane.column(k);
    if (column >= rows) continue;
    const float(&output)[Warp::PRODUCTS][4] = warp.output[k / 2];
    UNROLL for (int p = 0; p < Warp::PRODUCTS; p += 2) {
      const int round = p / Dims::PRODUCTS_PER_ROUND;
      if (!Dims::exists(warp.lane.row, round)) continue;
      visit(column, k, Dims::start(warp.lane.row, round) + 2 * (p % Dims::PRODUCTS_PER_ROUND),
            make_float4(output[p][k % 2], output[p][k % 2 + 2], output[p + 1][k % 2],
                        output[p + 1][k % 2 + 2]));
    }
  }
}
