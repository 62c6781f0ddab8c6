// Split-K decode: each block takes pieces of sequences in turn and leaves one state for each; a sequence
// that is one piece is finished at once.
#pragma once
#include "attention/reduce.cuh"
#include "ring/loop.cuh"
#include "ring/results.cuh"
#include "ring/split_work.cuh"

// A cache of one format, K and V alike, and what is asked of it: the launchers of a format.
struct CacheProblem {
  const bf16_bits* q;  // q_stride elements between sequences
  u64 q_stride;
  const u8* k;
  const u8* v;
  PoolGeometry geometry;
  u32 num_blocks;
  const i32* block_tables;
  const i32* seq_lens;
  u32 max_blocks_per_seq;
  u32 num_seqs;
  u32 sliding_window;
  float score_scale;  // softmax scale times k_scale
  float v_scale;
};

template <class Spec>
struct SplitDecode {
  using Shape = RingShape<Spec>;
  using Work = SplitWork<Spec>;
  using Loop = RingLoop<Spec, Work>;
  using Ring = typename Loop::Ring;
  using Warp = typename Loop::Warp;
  using Cursor = typename Work::Cursor;

  // workspace F32 [num_seqs, ROWS, num_splits, HEAD_DIM + 2]: o, m, l in natural and real units; null:
  // results go to their place. With split_tiles, pieces without tokens are not stored.
  static DEVICE void run(const RingInputs& inputs, const Work& work, const Results& results,
                         float* workspace) {
    DYNAMIC_SHARED(u8, stages);
    __shared__ typename Ring::Shared shared;
    if (threadIdx.x == 0) Ring::init(shared);
    ptx::grid_launch_dependents();
    ptx::grid_dependency_wait();
    __syncthreads();
    const Loop loop = {inputs, work, Ring::of(shared, stages, inputs.pools, Shape::slice_head())};
    Cursor cursor = Cursor::first(work);
    Cursor fetching = cursor;
    fetching.skip_empty(work);
    typename Loop::Progress progress = loop.start(fetching);
    for (; !cursor.done(work); cursor.next_piece(work)) {
      if (work.split_tiles != 0 && cursor.at_end()) continue;
      Warp warp;
      const bool valid = loop.attend(warp, progress, loop.load_query(cursor.seq), cursor);
      if (!valid || !work.lengths.fits(cursor.seq)) warp.poison();
      if (Shape::token_warp() != 0) continue;
      if (workspace == nullptr) {
        ResultStore<Spec>::store_warp(results, warp, cursor.seq);
      } else {
        store_split(warp, results, workspace, cursor, work.num_splits);
      }
    }
  }

  // To `output`, or with a workspace the splits' states there.
  static DEVICE void run(const CacheProblem& p, u32 num_splits, bf16_bits* output, float* workspace) {
    run({p.q,
         p.q_stride,
         nullptr,
         nullptr,
         {p.score_scale, 0.0f},
         {p.k, p.v, p.block_tables, p.max_blocks_per_seq, p.num_blocks, p.geometry, p.geometry}},
        {{p.seq_lens, p.num_seqs, p.sliding_window, p.max_blocks_per_seq, Spec::BLOCK_SIZE, 0},
         num_splits,
         0},
        {output, nullptr, Spec::ValueFormat::OPERAND_SHIFT * p.v_scale, nullptr}, workspace);
  }

 private:
  static DEVICE void store_split(const Warp& warp, const Results& results, float* workspace,
                                 const Cursor& cursor, u32 num_splits) {
    const auto target = [&](int column) {
      const auto row = QueryRowIndex<Spec>::of(Shape::kv_head(), Shape::head_row(column));
      return workspace + (row.flat(cursor.seq) * num_splits + cursor.split) * (Spec::HEAD_DIM + 2);
    };
    float factor = results.value_factor;
    if (results.v_scales != nullptr) factor *= results.v_scales[Shape::kv_head()];
    visit_output<typename Spec::ValueFormat>(
        warp, Shape::rows(), [&](int column, int, int dim, float4 v) {
          float2* pairs = reinterpret_cast<float2*>(target(column) + dim);
          pairs[0] = make_float2(v.x * factor, v.y * factor);
          pairs[1] = make_float2(v.z * factor, v.w * factor);
        });
    UNROLL for (int k = 0; k < Warp::COLUMNS; k++) {
      const int column = warp.lane.column(k);
      if (warp.lane.row != 0 || column >= Shape::rows()) continue;
      *reinterpret_cast<float2*>(target(column) + Spec::HEAD_DIM) =
          make_float2(warp.state[k].natural_reference(), warp.state[k].sum);
    }
  }
};

// Merges the states of a sequence's chunks, as SplitDecode leaves them with split_tiles: one warp a query row,
// in their order. Grid (num_seqs, ROWS). value_factor and v_scales of `results` are in the states already.
template <class Spec>
DEVICE void merge_chunks(const float* states, const Lengths& lengths, const float* sinks,
                         const Results& results, u32 max_chunks,
                         u32 chunk_tiles) {
  ptx::grid_launch_dependents();
  ptx::grid_dependency_wait();
  const u32 seq = blockIdx.x, index = blockIdx.y;
  const u32 chunk_tokens = chunk_tiles * TILE_TOKENS;
  const TokenRange range = lengths.range_of(lengths.length(seq));
  // Those before the window have no tokens and were not stored.
  const u32 first = range.begin / chunk_tokens, end = (range.end + chunk_tokens - 1) / chunk_tokens;
  const int head = static_cast<int>(index) % Spec::NUM_Q_HEADS;
  const QueryRowIndex<Spec> row = {head / Spec::GQA_RATIO, static_cast<int>(index) / Spec::NUM_Q_HEADS, head};
  const u64 flat = row.flat(seq);
  auto sum = SplitSum<Spec::HEAD_DIM>::of(
      states + (flat * max_chunks + first) * (Spec::HEAD_DIM + 2), range.empty() ? 0 : end - first);
  if (range.empty() && sinks != nullptr) sum.state = SoftmaxState::of_sink(sinks[head]);
  if (!lengths.fits(seq)) sum.state.sum = quiet_nan();
  const float factor = results.finish_row(sum.state, row, seq, threadIdx.x == 0);
  sum.visit([&](int dim, float2 o) {
    *reinterpret_cast<u32*>(results.output + flat * Spec::HEAD_DIM + dim) =
        Spec::Element::pack(o.x * factor, o.y * factor);
  });
}
