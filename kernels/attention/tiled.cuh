// The streaming step: fold one tile of blocks into running states (m, l, o) that live in memory, so that
// a context of any size can pass through a small pool of scratch blocks.
//
// A sequence has num_splits states, each of which takes its own contiguous part of every tile: one long
// sequence then keeps the whole GPU busy. `merge_states` makes one state of them in the end.
//
// Two things are called tile. A tile of blocks (tile_blocks, tile_tokens, tile_m) is what one launch
// takes of a sequence; a tile of tokens (TILE_TOKENS, WARP_TILES, PooledTiles) is 16 of them, a warp's
// work.
#pragma once
#include "attention/block_attention.cuh"

constexpr float LOG2_E_REST = 1.9259630e-8f;  // log2(e) - LOG2_E

// Pointers: q BF16 [num_seqs, num_q_heads, HEAD_DIM]; tile_blocks i32 [num_seqs, tile_capacity];
// tile_block_counts i32 [num_seqs]; m_state, l_state F32 [num_seqs, num_splits, num_q_heads]; o_state
// F32 [num_seqs, num_splits, num_q_heads, HEAD_DIM], in real units (value_scale is applied).
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
  u32 num_splits;
  i32 last_block_valid_slots;
  const i32* last_block_valid_slots_per_seq;  // null: the scalar holds for every sequence
  float score_scale;                          // softmax scale, times k_scale
  float value_scale;                          // v_scale
  PoolGeometry geometry;
};

// The reference follows every new largest score, so that m can be told from it. F16 weights are largest
// at 2^12, which leaves all bits to weights down to 2^-26 of the largest.
template <class Format>
struct FollowingReference {
  static constexpr float HEADROOM = Format::QUERY_IS_F16 ? 12.0f : 0.0f;
  static constexpr float GROWTH = 0.0f;
};

// COUNT tiles of 16 tokens next to each other, from `start` on.
template <int BLOCK_SIZE, int COUNT>
struct PooledTiles {
  const PageWalk<BLOCK_SIZE>& walk;
  Lane lane;
  u32 start;
  TokenRange range;

  DEVICE u32 position(int n) const { return start + TILE_TOKENS * n; }
  DEVICE PooledTile<BLOCK_SIZE> tile(int n) const { return {walk, lane, position(n), range}; }
  DEVICE KeyRows keys(int n) const { return tile(n).keys(0); }
  DEVICE ValueRows values(int n) const { return tile(n).values(0); }
};

// 2^(reference - m in log2 units): the distance is small and both are large, so it is formed exactly.
DEVICE float weight_of(float log2_reference, float m) {
  return ptx::exp2_approx(fmaf(-m, LOG2_E_REST, fmaf(-m, LOG2_E, log2_reference)));
}

// e^(m - target) for m <= target; 1 where nothing moves, -inf to -inf included.
DEVICE float rescaling(float m, float target) {
  return m == target ? 1.0f : ptx::exp2_approx((m - target) * LOG2_E);
}

// A block of threads takes at most this many groups of 8 query heads: with more warps, registers run
// out.
constexpr int MAX_HEAD_TILES = 8;

// One block works on one KV head of one sequence, or on one of HEAD_PARTS parts of its query heads:
// HEAD_TILES groups of 8 of them times TOKEN_WARPS warps that take alternate tiles.
template <int GQA_RATIO, int TOKEN_WARPS>
struct TiledShape {
  static constexpr int ALL_TILES = (GQA_RATIO + TILE_HEADS - 1) / TILE_HEADS;
  static constexpr int HEAD_TILES = smaller(ALL_TILES, MAX_HEAD_TILES);
  static constexpr int HEAD_PARTS = (ALL_TILES + HEAD_TILES - 1) / HEAD_TILES;
  static constexpr int WARPS = HEAD_TILES * TOKEN_WARPS;
  static constexpr int THREADS = WARPS * 32;

  static DEVICE int warp() { return static_cast<int>(threadIdx.x / WARP_SIZE); }
  static DEVICE int merge_group() { return warp() % HEAD_TILES; }
  static DEVICE int token_warp() { return warp() / HEAD_TILES; }
  static DEVICE u32 kv_head() { return blockIdx.y / HEAD_PARTS; }
  // First of the warp's query heads within the KV head's.
  static DEVICE int head() {
    return TILE_HEADS * (static_cast<int>(blockIdx.y % HEAD_PARTS) * HEAD_TILES + merge_group());
  }
  // Query heads of the warp; none where the parts do not come out even.
  static DEVICE int heads() { return larger(0, smaller(TILE_HEADS, GQA_RATIO - head())); }
};

template <class Format, int HEAD_DIM, int GQA_RATIO, int BLOCK_SIZE, int TOKEN_WARPS, int WARP_TILES>
struct Tiled {
  using Shape = TiledShape<GQA_RATIO, TOKEN_WARPS>;
  using Warp = WarpAttention<AttentionTypes<Bf16Element, Format, Format, FollowingReference<Format>>>;
  static constexpr u32 WARP_TOKENS = TILE_TOKENS * WARP_TILES;

  // Grid (num_seqs, num_kv_heads * HEAD_PARTS, num_splits).
  static DEVICE u32 sequence() { return blockIdx.x; }
  static DEVICE u32 first_head() { return Shape::kv_head() * GQA_RATIO + Shape::head(); }

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
    // The next step may be started meanwhile; nothing is read before the one before has ended.
    ptx::grid_launch_dependents();
    ptx::grid_dependency_wait();
    u32 tokens;
    const bool fits = tile_tokens(problem, tokens);
    const TokenRange range = split_range({0, tokens}, blockIdx.z, problem.num_splits);
    if (fits && range.empty()) return;  // the state keeps its bits
    const u64 q_row = static_cast<u64>(sequence()) * problem.num_q_heads + first_head();
    Warp warp;
    const int row = Lane::current().row;
    const bf16_bits* q = row < Shape::heads() ? problem.q + (q_row + row) * HEAD_DIM : nullptr;
    warp.begin([&](int) { return load_query_row<Bf16Element, Format>(q, Lane::current()); },
               {problem.score_scale, 0.0f});
    const PageWalk<BLOCK_SIZE> walk = {
        problem.k_pool,
        problem.v_pool,
        problem.tile_blocks + static_cast<u64>(sequence()) * problem.tile_capacity,
        problem.num_blocks,
        Shape::kv_head(),
        problem.geometry};
    if (!range.empty()) attend_range(warp, walk, range);
    warp.finish();
    merge_token_warps<Shape, TOKEN_WARPS, Warp::PRODUCTS>(warp);
    if (Shape::token_warp() == 0) fold_into_memory(problem, warp, fits);
  }

  // This warp's share: every TOKEN_WARPS-th run of WARP_TILES tiles.
  static DEVICE void attend_range(Warp& warp, const PageWalk<BLOCK_SIZE>& walk, TokenRange range) {
    const auto nothing = [] {};
    u32 start = range.begin + WARP_TOKENS * Shape::token_warp();
    for (; start < range.end; start += WARP_TOKENS * TOKEN_WARPS) {
      const PooledTiles<BLOCK_SIZE, WARP_TILES> source = {walk, warp.lane, start, range};
      if (start + WARP_TOKENS <= range.end) {
        warp.template fold<WARP_TILES, false>(source, CommonMask{range}, nothing);
      } else {
        warp.template fold<WARP_TILES, true>(source, CommonMask{range}, nothing);
      }
    }
  }

  // Both states move to the larger m.
  static DEVICE void fold_into_memory(const TiledProblem& problem, const Warp& warp, bool fits) {
    const u64 split = static_cast<u64>(sequence()) * problem.num_splits + blockIdx.z;
    const u64 state_row = split * problem.num_q_heads + first_head();
    float old_factor[2], new_factor[2], m[2], l[2];
    UNROLL for (int k = 0; k < 2; k++) {
      const int head = 2 * warp.lane.quad + k;
      if (head >= Shape::heads()) continue;
      const float old_m = problem.m_state[state_row + head], old_l = problem.l_state[state_row + head];
      const float tile_m = largest_score(warp.state[k]);
      m[k] = fmaxf(old_m, tile_m);
      old_factor[k] = rescaling(old_m, m[k]);
      new_factor[k] = tile_m == negative_infinity()
                          ? 0.0f
                          : weight_of(warp.state[k].reference, tile_m) * rescaling(tile_m, m[k]);
      l[k] = fits ? old_l * old_factor[k] + warp.state[k].sum * new_factor[k] : quiet_nan();
      new_factor[k] *= Format::OPERAND_SHIFT * problem.value_scale;
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
      const float old_scale = old_factor[k], scale = new_factor[k];
      float2* o = reinterpret_cast<float2*>(rows + head * HEAD_DIM + dim);
      const float2 low = o[0], high = o[1];
      o[0] = make_float2((low.x * old_scale + v.x * scale) * poison,
                         (low.y * old_scale + v.y * scale) * poison);
      o[1] = make_float2((high.x * old_scale + v.z * scale) * poison,
                         (high.y * old_scale + v.w * scale) * poison);
    });
  }

  // In natural units; -inf where no score was finite.
  static DEVICE float largest_score(const SoftmaxState& state) {
    if (state.reference == EMPTY_REFERENCE) return negative_infinity();
    return (state.reference + FollowingReference<Format>::HEADROOM) * LN_2;
  }
};

// One state of a sequence's num_parts. Parts m, l F32 [rows, num_q_heads], o F32 [rows, num_q_heads,
// HEAD_DIM]: (seq, part) is row seq * seq_stride + part * part_stride. Out [num_seqs, num_q_heads] and
// [num_seqs, num_q_heads, HEAD_DIM]. Grid (num_seqs, num_q_heads), one thread a pair of dims. In the
// order of the parts: the same bits every time.
template <int HEAD_DIM>
DEVICE void merge_states(const float* m_parts, const float* l_parts, const float* o_parts, float* m_out,
                         float* l_out, float* o_out, u32 num_q_heads, u32 num_parts, u64 seq_stride,
                         u64 part_stride) {
  const u64 first = blockIdx.x * seq_stride * num_q_heads + blockIdx.y;
  const u64 stride = part_stride * num_q_heads;
  const u64 target = static_cast<u64>(blockIdx.x) * num_q_heads + blockIdx.y;
  float m = negative_infinity();
  for (u32 part = 0; part < num_parts; part++) m = fmaxf(m, m_parts[first + part * stride]);
  for (u32 pair = threadIdx.x; pair < HEAD_DIM / 2; pair += blockDim.x) {
    float l = 0.0f;
    float2 o = make_float2(0.0f, 0.0f);
    for (u32 part = 0; part < num_parts; part++) {
      const u64 row = first + part * stride;
      const float factor = rescaling(m_parts[row], m);
      const float2 v = reinterpret_cast<const float2*>(o_parts)[row * (HEAD_DIM / 2) + pair];
      l += l_parts[row] * factor;
      o.x += v.x * factor, o.y += v.y * factor;
    }
    reinterpret_cast<float2*>(o_out)[target * (HEAD_DIM / 2) + pair] = o;
    if (pair == 0) m_out[target] = m, l_out[target] = l;
  }
}

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
