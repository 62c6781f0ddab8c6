// The streaming step: fold one tile of blocks into running states (m, l, o) that live in memory, so that
// a context of any size can pass through a small pool of scratch blocks.
#pragma once
#include "attention/block_attention.cuh"

// Pointers: q BF16 [num_seqs, num_q_heads, HEAD_DIM]; tile_blocks i32 [num_seqs, tile_capacity];
// tile_block_counts i32 [num_seqs]; states F32 [num_seqs, num_q_heads] and [num_seqs, num_q_heads,
// HEAD_DIM].
struct TiledProblem {
  const bf16_bits* q;
  const u8* k_pool;
  const u8* v_pool;
  const i32* tile_blocks;
  const i32* tile_block_counts;
  float* m_state;
  float* l_state;
  float* o_state;
  u32 num_q_heads;
  u32 tile_capacity;
  u32 num_blocks;
  i32 last_block_valid_slots;
  const i32* last_block_valid_slots_per_seq;  // null: the scalar holds for every sequence
  float softmax_scale;
  PoolGeometry geometry;
};

template <class Format, int HEAD_DIM, int GQA_RATIO, int BLOCK_SIZE, int TOKEN_WARPS>
struct Tiled {
  using Shape = BlockShape<HEAD_DIM, GQA_RATIO, TOKEN_WARPS>;
  // m is part of the result, so the reference is the largest score itself.
  using Warp = WarpAttention<Format, HEAD_DIM, ExactReference>;

  // Grid (num_seqs, num_kv_heads).
  static DEVICE u32 sequence() { return blockIdx.x; }
  static DEVICE u32 first_head() { return blockIdx.y * GQA_RATIO + Shape::head_tile() * TILE_HEADS; }

  // False where the count or the last block's valid slots are out of range.
  static DEVICE bool tile_tokens(const TiledProblem& problem, u32& tokens) {
    const i32 count = problem.tile_block_counts[sequence()];
    const i32 valid = problem.last_block_valid_slots_per_seq != nullptr
                          ? problem.last_block_valid_slots_per_seq[sequence()]
                          : problem.last_block_valid_slots;
    tokens = 0;
    if (count == 0) return true;
    if (count < 0 || static_cast<u32>(count) > problem.tile_capacity || valid < 0 || valid > BLOCK_SIZE)
      return false;
    tokens = static_cast<u32>(count - 1) * BLOCK_SIZE + static_cast<u32>(valid);
    return true;
  }

  static DEVICE void step(const TiledProblem& problem) {
    u32 tokens;
    const bool fits = tile_tokens(problem, tokens);
    const u64 state_row = static_cast<u64>(sequence()) * problem.num_q_heads + first_head();
    Warp warp;
    warp.begin(load_query_row<Format, HEAD_DIM>(problem.q + state_row * HEAD_DIM, Shape::heads(),
                                                Lane::current()),
               problem.softmax_scale * LOG2_E);
    const PageWalk<BLOCK_SIZE> walk = {
        problem.k_pool,
        problem.v_pool,
        problem.tile_blocks + static_cast<u64>(sequence()) * problem.tile_capacity,
        problem.num_blocks,
        blockIdx.y,
        problem.geometry};
    attend<Shape>(warp, walk, TokenRange{0, tokens}, TOKEN_WARPS);
    merge_token_warps<Shape, TOKEN_WARPS, Warp::PRODUCTS>(warp);
    if (Shape::token_warp() != 0) return;
    fold_into_memory(problem, warp, state_row, fits);
  }

  // States in memory move to the larger of both references; a tile without tokens leaves their bits.
  static DEVICE void fold_into_memory(const TiledProblem& problem, const Warp& warp, u64 state_row,
                                      bool fits) {
    float2 factor[2];
    float m[2], l[2];
    UNROLL for (int k = 0; k < 2; k++) {
      const int head = 2 * warp.lane.quad + k;
      if (head >= Shape::heads()) continue;
      const float old_m = problem.m_state[state_row + head], old_l = problem.l_state[state_row + head];
      SoftmaxState state = SoftmaxState::from_natural(old_m, old_l);
      factor[k] = state.merge(warp.state[k]);
      // The larger m is kept as it was given or found, not converted back and forth.
      m[k] = fmaxf(old_m, warp.state[k].natural_reference());
      l[k] = fits ? state.sum : quiet_nan();
    }
    __syncwarp();  // every lane of a column has read m and l
    UNROLL for (int k = 0; k < 2; k++) {
      const int head = 2 * warp.lane.quad + k;
      if (head < Shape::heads() && warp.lane.row == 0) {
        problem.m_state[state_row + head] = m[k];
        problem.l_state[state_row + head] = l[k];
      }
    }
    const float poison = fits ? 1.0f : quiet_nan();
    float* rows = problem.o_state + state_row * HEAD_DIM;
    visit_output<Format>(warp, Shape::heads(), [&](int head, int k, int dim, float4 v) {
      const float2 f = factor[k];
      float2* o = reinterpret_cast<float2*>(rows + head * HEAD_DIM + dim);
      const float2 low = o[0], high = o[1];
      o[0] = make_float2((low.x * f.x + v.x * f.y) * poison, (low.y * f.x + v.y * f.y) * poison);
      o[1] = make_float2((high.x * f.x + v.z * f.y) * poison, (high.y * f.x + v.w * f.y) * poison);
    });
  }
};

// output BF16 = o / l, 0 where l is 0. Grid (num_seqs, num_q_heads), one thread a pair of dims.
template <int HEAD_DIM>
DEVICE void finalize(const float* l_state, const float* o_state, bf16_bits* output, u32 num_q_heads) {
  const u64 row = static_cast<u64>(blockIdx.x) * num_q_heads + blockIdx.y;
  const float normalizer = SoftmaxState{0.0f, l_state[row]}.normalizer();
  for (u32 pair = threadIdx.x; pair < HEAD_DIM / 2; pair += blockDim.x) {
    const float2 o = *reinterpret_cast<const float2*>(o_state + row * HEAD_DIM + 2 * pair);
    *reinterpret_cast<u32*>(output + row * HEAD_DIM + 2 * pair) =
        ptx::pack_bf16x2(o.x * normalizer, o.y * normalizer);
  }
}
