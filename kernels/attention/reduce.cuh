// Merging split-K partials: one warp a query row.
#pragma once
#include "attention/online_softmax.cuh"
#include "platform.cuh"

// The sum of a row's splits. A lane owns dim pairs lane, lane + 32, ... and walks the splits in order,
// so any number of splits takes constant memory and the result is the same bits every time.
template <int HEAD_DIM>
struct SplitSum {
  static constexpr int ROW = HEAD_DIM + 2;  // o, m, l; rows are 8-byte aligned only
  static constexpr int PAIRS = HEAD_DIM / 2;
  static constexpr int LANE_PAIRS = (PAIRS + 31) / 32;
  static constexpr int AT_ONCE = 4;  // splits whose loads are in flight together

  SoftmaxState state;
  float2 total[LANE_PAIRS];

  // splits F32 [num_splits, HEAD_DIM + 2], m in natural units.
  static DEVICE SplitSum of(const float* splits, u32 num_splits) {
    SplitSum sum = {SoftmaxState::empty(), {}};
    for (u32 first = 0; first < num_splits; first += AT_ONCE) {
      float2 m_l[AT_ONCE], o[AT_ONCE][LANE_PAIRS];
#pragma unroll
      for (int i = 0; i < AT_ONCE; i++) {
        const float* row = splits + static_cast<u64>(min(first + i, num_splits - 1)) * ROW;
        m_l[i] = *reinterpret_cast<const float2*>(row + HEAD_DIM);
#pragma unroll
        for (int p = 0; p < LANE_PAIRS; p++)
          if (pair(p) < PAIRS) o[i][p] = *reinterpret_cast<const float2*>(row + 2 * pair(p));
      }
#pragma unroll
      for (int i = 0; i < AT_ONCE; i++)
        if (first + i < num_splits) sum.add(SoftmaxState::from_natural(m_l[i].x, m_l[i].y), o[i]);
    }
    return sum;
  }

  static DEVICE int pair(int p) { return static_cast<int>(threadIdx.x % WARP_SIZE) + 32 * p; }

  // Calls visit(dim, pair of values) for this lane's dims.
  template <class Visit>
  DEVICE void visit(Visit visit) const {
    UNROLL for (int p = 0; p < LANE_PAIRS; p++)
      if (pair(p) < PAIRS) visit(2 * pair(p), total[p]);
  }

 private:
  DEVICE void add(SoftmaxState other, const float2 (&o)[LANE_PAIRS]) {
    const float2 factor = state.merge(other);
    UNROLL for (int p = 0; p < LANE_PAIRS; p++) {
      if (pair(p) >= PAIRS) continue;
      total[p].x = total[p].x * factor.x + o[p].x * factor.y;
      total[p].y = total[p].y * factor.x + o[p].y * factor.y;
    }
  }
};

// workspace F32 [num_seqs, num_q_heads, num_splits, HEAD_DIM + 2]; output BF16 [num_seqs, num_q_heads,
// HEAD_DIM]. Grid (num_seqs, num_q_heads).
template <int HEAD_DIM>
DEVICE void reduce_splits(const float* workspace, bf16_bits* output, u32 num_q_heads, u32 num_splits) {
  ptx::grid_launch_dependents();
  ptx::grid_dependency_wait();
  const u64 row = static_cast<u64>(blockIdx.x) * num_q_heads + blockIdx.y;
  const auto sum =
      SplitSum<HEAD_DIM>::of(workspace + row * num_splits * (HEAD_DIM + 2), num_splits);
  const float normalizer = sum.state.normalizer();
  sum.visit([&](int dim, float2 o) {
    *reinterpret_cast<u32*>(output + row * HEAD_DIM + dim) =
        ptx::pack_bf16x2(o.x * normalizer, o.y * normalizer);
  });
}
