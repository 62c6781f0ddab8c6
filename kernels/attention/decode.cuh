// Decode attention over a paged cache: the bodies of the single-pass and the split-K entry points.
#pragma once
#include "attention/block_attention.cuh"
#include "attention/lengths.cuh"

// What the decode kernels of all formats share. Pointers: q BF16 [num_seqs, num_q_heads, HEAD_DIM] with
// q_stride elements between sequences; block_tables i32 [num_seqs, max_blocks_per_seq]; seq_lens i32
// [num_seqs].
struct DecodeProblem {
  const bf16_bits* q;
  const u8* k_cache;
  const u8* v_cache;
  const i32* block_tables;
  const i32* seq_lens;
  u32 max_blocks_per_seq;
  u32 num_q_heads;
  u32 num_kv_heads;
  u32 q_stride;
  u32 sliding_window;  // 0: none
  u32 num_blocks;      // pool size; larger or negative ids make their row NaN
  float score_scale;   // softmax scale, times k_scale
  float value_scale;   // v_scale
  PoolGeometry geometry;
};

template <class Format, int HEAD_DIM, int GQA_RATIO, int BLOCK_SIZE, int TOKEN_WARPS>
struct Decode {
  using Shape = BlockShape<HEAD_DIM, GQA_RATIO, TOKEN_WARPS>;
  using Warp = WarpAttention<Format, HEAD_DIM, LazyReference>;

  // Grid (num_seqs, num_kv_heads, splits): see `Grid` in cupaged/registry.py.
  static DEVICE u32 sequence() { return blockIdx.x; }
  static DEVICE u32 kv_head() { return blockIdx.y; }
  static DEVICE u32 first_head() { return kv_head() * GQA_RATIO + Shape::head_tile() * TILE_HEADS; }

  // After this, the warps of token position 0 hold the state of the whole range. False: not in this
  // warp.
  static DEVICE bool run(const DecodeProblem& problem, Warp& warp, TokenRange range) {
    const bf16_bits* q_rows = problem.q + static_cast<u64>(sequence()) * problem.q_stride +
                              static_cast<u64>(first_head()) * HEAD_DIM;
    warp.begin(load_query_row<Format, HEAD_DIM>(q_rows, Shape::heads(), Lane::current()),
               problem.score_scale * LOG2_E);
    const PageWalk<BLOCK_SIZE> walk = {
        problem.k_cache,
        problem.v_cache,
        problem.block_tables + static_cast<u64>(sequence()) * problem.max_blocks_per_seq,
        problem.num_blocks,
        kv_head(),
        problem.geometry};
    attend<Shape>(warp, walk, range, TOKEN_WARPS);
    merge_token_warps<Shape, TOKEN_WARPS, Warp::PRODUCTS>(warp);
    return Shape::token_warp() == 0;
  }

  // output BF16 [num_seqs, num_q_heads, HEAD_DIM], contiguous.
  static DEVICE void single_pass(const DecodeProblem& problem, bf16_bits* output) {
    const i32 seq_len = problem.seq_lens[sequence()];
    const bool fits = length_fits(seq_len, problem.max_blocks_per_seq, BLOCK_SIZE);
    Warp warp;
    const TokenRange range = fits ? attended_range(seq_len, problem.sliding_window) : TokenRange{0, 0};
    if (!run(problem, warp, range)) return;
    float factor[2];
    UNROLL for (int k = 0; k < 2; k++) {
      factor[k] = warp.state[k].normalizer() * Format::OPERAND_SHIFT * problem.value_scale;
      if (!fits) factor[k] = quiet_nan();
    }
    bf16_bits* rows =
        output + (static_cast<u64>(sequence()) * problem.num_q_heads + first_head()) * HEAD_DIM;
    visit_output<Format>(warp, Shape::heads(), [&](int head, int k, int dim, float4 values) {
      store_bf16x4(rows + head * HEAD_DIM + dim, values, factor[k]);
    });
  }

  // workspace F32 [num_seqs, num_q_heads, num_splits, HEAD_DIM + 2]: o, m, l in natural units.
  static DEVICE void split(const DecodeProblem& problem, float* workspace, u32 num_splits) {
    const i32 seq_len = problem.seq_lens[sequence()];
    const bool fits = length_fits(seq_len, problem.max_blocks_per_seq, BLOCK_SIZE);
    Warp warp;
    const TokenRange range =
        fits ? split_range(attended_range(seq_len, problem.sliding_window), blockIdx.z, num_splits)
             : TokenRange{0, 0};
    if (!run(problem, warp, range)) return;
    const u64 first_row =
        (static_cast<u64>(sequence()) * problem.num_q_heads + first_head()) * num_splits + blockIdx.z;
    const u64 head_stride = static_cast<u64>(num_splits) * (HEAD_DIM + 2);
    float* rows = workspace + first_row * (HEAD_DIM + 2);
    const float factor = fits ? Format::OPERAND_SHIFT * problem.value_scale : quiet_nan();
    visit_output<Format>(warp, Shape::heads(), [&](int head, int, int dim, float4 v) {
      float2* target = reinterpret_cast<float2*>(rows + head * head_stride + dim);
      target[0] = make_float2(v.x * factor, v.y * factor);
      target[1] = make_float2(v.z * factor, v.w * factor);
    });
    if (warp.lane.row != 0) return;
    UNROLL for (int k = 0; k < 2; k++) {
      const int head = 2 * warp.lane.quad + k;
      if (head < Shape::heads()) {
        const SoftmaxState state = warp.state[k];
        *reinterpret_cast<float2*>(rows + head * head_stride + HEAD_DIM) =
            fits ? make_float2(state.natural_reference(), state.sum) : make_float2(0.0f, quiet_nan());
      }
    }
  }
};
