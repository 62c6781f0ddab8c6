// Merging split-K partials: one warp a (sequence, query head).
#pragma once
#include "attention/online_softmax.cuh"
#include "platform.cuh"

// workspace F32 [num_seqs, num_q_heads, num_splits, HEAD_DIM + 2] (o, m, l in natural units; rows are
// 8-byte aligned only); output BF16 [num_seqs, num_q_heads, HEAD_DIM]. Grid (num_seqs, num_q_heads).
//
// A lane owns dim pairs lane, lane + 32, ... and walks the splits in order, so any number of splits
// takes constant memory and the result is the same bits every time.
template <int HEAD_DIM>
DEVICE void reduce_splits(const float* workspace, bf16_bits* output, u32 num_q_heads, u32 num_splits) {
  constexpr int ROW = HEAD_DIM + 2;
  constexpr int PAIRS = HEAD_DIM / 2;
  constexpr int LANE_PAIRS = (PAIRS + 31) / 32;
  const int lane = static_cast<int>(threadIdx.x);
  const u64 head = static_cast<u64>(blockIdx.x) * num_q_heads + blockIdx.y;
  const float* row = workspace + head * num_splits * ROW;

  SoftmaxState state = SoftmaxState::empty();
  float2 total[LANE_PAIRS] = {};
  for (u32 split = 0; split < num_splits; split++, row += ROW) {
    const float2 m_l = *reinterpret_cast<const float2*>(row + HEAD_DIM);
    const float2 factor = state.merge(SoftmaxState::from_natural(m_l.x, m_l.y));
  UNROLL for (int i = 0; i < LANE_PAIRS; i++) {
      const int pair = lane + 32 * i;
      if (pair < PAIRS) {
        const float2 o = *reinterpret_cast<const float2*>(row + 2 * pair);
        total[i].x = total[i].x * factor.x + o.x * factor.y;
        total[i].y = total[i].y * factor.x + o.y * factor.y;
      }
    }
  }

  const float normalizer = state.normalizer();
  UNROLL for (int i = 0; i < LANE_PAIRS; i++) {
    const int pair = lane + 32 * i;
    if (pair < PAIRS)
      *reinterpret_cast<u32*>(output + head * HEAD_DIM + 2 * pair) =
          ptx::pack_bf16x2(total[i].x * normalizer, total[i].y * normalizer);
  }
}
