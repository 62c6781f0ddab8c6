// The streaming loop: a block works through its pieces of sequences, which come through the ring.
//
// A Work says what the pieces are. It has a Cursor (where the block is) with
//   first(work), done(work), at_end() (nothing left of this piece), unit(work), next_piece(work),
//   skip_stages(work, n): over the tiles of n stages, and into later pieces.
#pragma once
#include "attention/block_attention.cuh"
#include "ring/pipeline.cuh"

// The inputs that every streaming kernel has.
struct RingInputs {
  const u16* q;           // [num_seqs, query_tokens, num_q_heads, HEAD_DIM]
  u64 q_stride;           // elements between query tokens
  const float* k_scales;  // [num_kv_heads] that come on top of score.scale, or null
  const float* sinks;     // [num_q_heads], natural units, or null
  ScoreRule score;
  Pools pools;
};

template <class Spec, class Work>
struct RingLoop {
  using Shape = RingShape<Spec>;
  using Layout = StageLayout<Spec>;
  using Ring = Pipeline<Spec, Shape::WARPS>;
  using Types =
      AttentionTypes<typename Spec::Element, typename Spec::KeyFormat, typename Spec::ValueFormat,
                     LazyReference<typename Spec::ValueFormat>, Spec::WARP_ROW_TILES, Spec::SOFT_CAP>;
  using Warp = WarpAttention<Types>;
  using Cursor = typename Work::Cursor;
  static constexpr int WARP_TILES = Spec::STAGE_TILES / Spec::TOKEN_WARPS;
  static_assert(Spec::STAGE_TILES % Spec::TOKEN_WARPS == 0, "every warp has as many tiles");

  const RingInputs& inputs;
  const Work& work;
  Ring ring;

  // Iteration counters of the ring, and whose turn it is to fetch. Turn j refills stage j % STAGES with
  // the tiles of iteration j + STAGES, by warp j % WARPS.
  struct Progress {
    Cursor fetching;             // this warp's next turn
    typename Ring::Order order;  // looked up for it
    u32 iteration;

    DEVICE u32 stage() const { return iteration % Spec::STAGES; }
    DEVICE u32 parity() const { return iteration / Spec::STAGES % 2; }

    DEVICE void look_up(const RingLoop& loop) {
      if (!fetching.done(loop.work)) order = loop.ring.prepare(fetching.unit(loop.work));
    }
    DEVICE void take_turn(const RingLoop& loop) {
      if (iteration == 0 || fetching.done(loop.work)) return;
      const u32 turn = iteration - 1;
      if (turn % Shape::WARPS != static_cast<u32>(Shape::warp())) return;
      const int s = turn % Spec::STAGES;
      loop.ring.wait_empty(s, turn / Spec::STAGES % 2);
      loop.ring.fill(s, order);
      fetching.skip_stages(loop.work, Shape::WARPS);
      look_up(loop);
    }
  };

  // Warp w fills stages w, w + WARPS, ...; then each warp looks up its first turn.
  DEVICE Progress start(Cursor cursor) const {
    Progress progress = {cursor, {}, 0};
    int at = 0;
#pragma unroll 1
    for (int s = Shape::warp(); s < Spec::STAGES; s += Shape::WARPS) {
      progress.fetching.skip_stages(work, s - at);
      at = s;
      if (progress.fetching.done(work)) break;
      progress.look_up(*this);
      // The later stages are asked for later, so that the first is not held up behind them.
      if (Spec::FILL_DELAY > 0 && s > 0) ptx::delay_cycles(s * Spec::FILL_DELAY);
      ring.fill(s, progress.order);
    }
    progress.fetching.skip_stages(work, Shape::warp() + Spec::STAGES - at);
    progress.look_up(*this);
    return progress;
  }

  // A sequence's rows of q, asked for ahead where registers can hold them meanwhile.
  static constexpr bool QUERY_AHEAD = Warp::ROW_TILES <= 2;
  struct Query {
    u32 seq;
    typename Warp::Row row[QUERY_AHEAD ? Warp::ROW_TILES : 1];
  };

  DEVICE Query load_query(u32 seq) const {
    Query query = {seq, {}};
    if constexpr (QUERY_AHEAD) {
#pragma unroll
      for (int t = 0; t < Warp::ROW_TILES; t++) query.row[t] = load_row(seq, t);
    }
    return query;
  }

  // This piece's state, complete over the block and held by the warps of token position 0. False where a
  // block of the sequence was outside the pool.
  DEVICE bool attend(Warp& warp, Progress& progress, const Query& query, const Cursor& cursor) const {
    ScoreRule rule = inputs.score;
    if (inputs.k_scales != nullptr) rule.scale *= inputs.k_scales[Shape::kv_head()];
    warp.begin(
        [&](int t) {
          if constexpr (QUERY_AHEAD) return query.row[t];
          return load_row(query.seq, t);
        },
        rule);
    if (inputs.sinks != nullptr && cursor.begins_sequence(work)) add_sinks(warp);
    bool valid = true;
    if (!cursor.at_end()) {
      Unit unit = cursor.unit(work);
      while (true) {
        while (is_whole(unit)) step<false>(warp, progress, unit, valid);
        if (unit.start >= unit.range.end) break;
        step<true>(warp, progress, unit, valid);
      }
    }
    warp.finish();
    merge_token_warps<Shape, Spec::TOKEN_WARPS, 2>(warp);
    return valid;
  }

 private:
  // This lane's row of q of tile t.
  DEVICE typename Warp::Row load_row(u32 seq, int t) const {
    const int row = TILE_HEADS * t + Lane::current().row;
    const u16* pointer = nullptr;
    if (row < Shape::rows()) {
      const auto index = QueryRowIndex<Spec>::of(Shape::kv_head(), Shape::head_row(row));
      pointer = inputs.q + (static_cast<u64>(seq) * Spec::QUERY_TOKENS + index.token) * inputs.q_stride +
                static_cast<u64>(index.head) * Spec::HEAD_DIM;
    }
    return load_query_row<typename Spec::Element, typename Spec::KeyFormat>(pointer, Lane::current());
  }

  // Each row has its sink once: in one lane, of the warps that begin the sequence.
  DEVICE void add_sinks(Warp& warp) const {
    UNROLL for (int k = 0; k < Warp::COLUMNS; k++) {
      const int column = warp.lane.column(k);
      if (column >= Shape::rows() || Shape::token_warp() != 0) continue;
      const auto index = QueryRowIndex<Spec>::of(Shape::kv_head(), Shape::head_row(column));
      warp.state[k] = SoftmaxState::of_sink(inputs.sinks[index.head], Types::Reference::HEADROOM);
      if (warp.lane.row != 0) warp.state[k].sum = 0.0f;
    }
  }

  // Whether every token of the unit counts, for every query token.
  static DEVICE bool is_whole(const Unit& unit) {
    return unit.start >= unit.whole.begin && unit.start + Layout::TOKENS <= unit.whole.end;
  }

  // One stage: this warp's tiles of it. Moves on to the next.
  template <bool MASKED>
  DEVICE void step(Warp& warp, Progress& progress, Unit& unit, bool& valid) const {
    const u32 s = progress.stage();
    ring.wait_full(s, progress.parity());
    valid &= ring.shared.invalid[s] == 0;
    const StagedTiles<Spec> tiles = {ring.stage(s), warp.lane, unit.start, Shape::local_head(),
                                     Shape::token_warp()};
    const auto between = [&] { progress.take_turn(*this); };
    if constexpr (MASKED && Spec::CAUSAL) {
      warp.template fold<WARP_TILES, MASKED>(tiles, row_mask(warp.lane, unit), between);
    } else {
      warp.template fold<WARP_TILES, MASKED>(tiles, CommonMask{unit.range}, between);
    }
    ring.release(s);
    progress.iteration++;
    unit.start += Layout::TOKENS;
  }

  // What the query tokens of this lane's rows may see.
  DEVICE RowMask<Warp::ROW_TILES> row_mask(Lane lane, const Unit& unit) const {
    RowMask<Warp::ROW_TILES> mask = {unit.range, {}};
    const u32 length = work.length(unit.seq);
    UNROLL for (int k = 0; k < Warp::COLUMNS; k++) {
      const int token = Shape::head_row(lane.column(k)) / Spec::GQA_RATIO;
      const TokenRange own = work.lengths.range_before(length, max(0, Spec::QUERY_TOKENS - 1 - token));
      mask.row[k] = {max(own.begin, unit.range.begin), min(own.end, unit.range.end)};
    }
    return mask;
  }
};
