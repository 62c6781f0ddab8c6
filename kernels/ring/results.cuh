// Where results go, and what becomes of a state on its way out.
#pragma once
#include "attention/block_attention.cuh"
#include "ring/shape.cuh"

// output [num_seqs, query_tokens, num_q_heads, HEAD_DIM] of Spec::Element; lse F32 of the same rows,
// natural units, or null.
struct Results {
  u16* output;
  float* lse;
  float value_factor;     // v_scale, and what V's operands lack
  const float* v_scales;  // [num_kv_heads] on top of it, or null

  // Stores the LSE of a row, whose state is complete, and returns what its o must be multiplied by.
  template <class Row>
  DEVICE float finish_row(SoftmaxState state, const Row& row, u32 seq, bool writes_lse) const {
    if (lse != nullptr && writes_lse) lse[row.flat(seq)] = state.log2_sum() * LN_2;
    const float factor = v_scales == nullptr ? value_factor : value_factor * v_scales[row.kv_head];
    return state.normalizer() * factor;
  }
};

template <class Spec>
struct ResultStore {
  using Index = QueryRowIndex<Spec>;

  static DEVICE void store4(const Results& results, u64 row, int dim, float4 v, float factor) {
    *reinterpret_cast<uint2*>(results.output + row * Spec::HEAD_DIM + dim) =
        make_uint2(Spec::Element::pack(v.x * factor, v.y * factor),
                   Spec::Element::pack(v.z * factor, v.w * factor));
  }

  // The rows of one warp, whole sequences.
  template <class Warp>
  static DEVICE void store_warp(const Results& results, const Warp& warp, u32 seq) {
    using Shape = RingShape<Spec>;
    float factor[Warp::COLUMNS] = {};
    Index row[Warp::COLUMNS];
    UNROLL for (int k = 0; k < Warp::COLUMNS; k++) {
      const int column = warp.lane.column(k);
      if (column >= Shape::rows()) continue;
      row[k] = Index::of(Shape::kv_head(), Shape::head_row(column));
      factor[k] = results.finish_row(warp.state[k], row[k], seq, warp.lane.row == 0);
    }
    visit_output<typename Spec::ValueFormat>(warp, Shape::rows(), [&](int, int k, int dim, float4 values) {
      store4(results, row[k].flat(seq), dim, values, factor[k]);
    });
  }

  // All rows of a sequence that has no tokens, by one warp; NaN where its length is wrong.
  static DEVICE void store_empty(const Results& results, const float* sinks, u32 seq, bool fits) {
    const u32 lane = threadIdx.x % WARP_SIZE;
    const float sum = fits ? 0.0f : quiet_nan();
    for (u32 i = lane; i < Spec::ROWS * Spec::HEAD_DIM / 4; i += WARP_SIZE)
      store4(results, static_cast<u64>(seq) * Spec::ROWS, 4 * i, make_float4(sum, sum, sum, sum), 1.0f);
    for (u32 i = lane; i < Spec::ROWS; i += WARP_SIZE) {
      const int head = static_cast<int>(i) % Spec::NUM_Q_HEADS;
      const Index row = {head / Spec::GQA_RATIO, static_cast<int>(i) / Spec::NUM_Q_HEADS, head};
      SoftmaxState state = sinks == nullptr ? SoftmaxState::empty() : SoftmaxState::of_sink(sinks[head]);
      if (!fits) state.sum = sum;
      results.finish_row(state, row, seq, true);
    }
  }
};
