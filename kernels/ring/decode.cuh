// Decode at the memory roofline: persistent blocks, each with all KV heads of its share of the cache,
// streaming whole tiles through a ring of shared-memory stages.
//
// Warp w works on KV head w % NUM_KV_HEADS (times head tiles) and every TOKEN_WARPS-th tile of a stage.
#pragma once
#include "attention/warp_attention.cuh"
#include "ring/merge.cuh"
#include "ring/pipeline.cuh"

// Warps of a ring block: heads fastest, then token warps.
template <int NUM_KV_HEADS, int GQA_RATIO, int TOKEN_WARPS>
struct RingShape {
  static constexpr int HEAD_TILES = (GQA_RATIO + TILE_HEADS - 1) / TILE_HEADS;
  static constexpr int GROUPS = NUM_KV_HEADS * HEAD_TILES;
  static constexpr int WARPS = GROUPS * TOKEN_WARPS;
  static constexpr int THREADS = 32 * WARPS;
  static constexpr int NUM_Q_HEADS = NUM_KV_HEADS * GQA_RATIO;

  static DEVICE int warp() { return static_cast<int>(threadIdx.x / WARP_SIZE); }
  static DEVICE int merge_group() { return warp() % GROUPS; }
  static DEVICE int token_warp() { return warp() / GROUPS; }
  static DEVICE int kv_head() { return merge_group() / HEAD_TILES; }
  static DEVICE int head_tile() { return merge_group() % HEAD_TILES; }
  static DEVICE int first_head() { return kv_head() * GQA_RATIO + head_tile() * TILE_HEADS; }
  static DEVICE int heads() { return smaller(TILE_HEADS, GQA_RATIO - head_tile() * TILE_HEADS); }
};

// Sequences whose plan fits in shared memory; the same figure as in cupaged/registry/ring.py.
constexpr u32 MAX_PLANNED_SEQS = 512;

// The sequences a block shares with others, at most two: the one its share begins with and the one it
// ends with.
struct SharedSequence {
  u32 seq;
  Sharers sharers;
  u32 ticket;  // of its counter
};
struct RingProblem {
  const bf16_bits* q;  // BF16 [num_seqs, num_q_heads, HEAD_DIM], q_stride elements between sequences
  u64 q_stride;
  float score_scale;  // softmax scale, times k_scale
  Lengths lengths;
  Pools pools;
  Results results;
  Parts parts;
  u32* counters;  // MergeCounter, one a sequence; zero before the first launch
};

template <class Format, int HEAD_DIM, int NUM_KV_HEADS, int GQA_RATIO, int BLOCK_SIZE, int STAGE_TILES,
          int STAGES, int TOKEN_WARPS, bool JOINED, int FILL_DELAY, int SEQUENCE_COST>
struct RingDecode {
  using Shape = RingShape<NUM_KV_HEADS, GQA_RATIO, TOKEN_WARPS>;
  using Layout = StageLayout<Format, NUM_KV_HEADS, BLOCK_SIZE, STAGE_TILES, JOINED>;
  using Ring = Pipeline<Layout, BLOCK_SIZE, STAGES, Shape::WARPS>;
  using Warp = WarpAttention<Format, HEAD_DIM, LazyReference>;
  using Part = PartLayout<Shape::NUM_Q_HEADS, HEAD_DIM>;
  using Tiles = StagedTiles<Format, Layout, TOKEN_WARPS>;
  static constexpr int WARP_TILES = STAGE_TILES / TOKEN_WARPS;
  static_assert(STAGE_TILES % TOKEN_WARPS == 0, "every warp has as many tiles");

  struct Shared {
    typename Ring::Shared ring;
    u32 starts[MAX_PLANNED_SEQS + 1];
    i32 seq_lens[MAX_PLANNED_SEQS];  // a copy: it is looked up all the time
    SharedSequence to_merge[2];
  };

  const RingProblem& problem;
  Shared& shared;
  u8* stages;
  Ring ring;
  Lengths lengths;
  Shares shares;
  u32 begin, end;  // this block's share, in the plan's positions

  // Where a block is in its share.
  struct Cursor {
    u32 seq;
    u32 at;   // position of the next tile
    u32 end;  // of this sequence's part of the share

    static DEVICE Cursor first(const RingDecode& block) {
      Cursor cursor = {sequence_at(block.shared.starts, block.lengths.num_seqs, block.begin),
                       block.begin, 0};
      cursor.enter_sequence(block);
      return cursor;
    }
    // From any position to the tile there, or the next that there is in the share.
    DEVICE void enter_sequence(const RingDecode& block) {
      if (at >= block.end) return;
      const u32* starts = block.shared.starts;
      while (at >= starts[seq + 1]) seq++;
      at = max(at, starts[seq] + SEQUENCE_COST);
      end = min(block.end, starts[seq + 1]);
    }
    DEVICE bool done(const RingDecode& block) const { return at >= block.end; }

    DEVICE void next_sequence(const RingDecode& block) {
      at = end;
      enter_sequence(block);
    }
    // Over the tiles of that many stages.
    DEVICE void skip_stages(const RingDecode& block, u32 stages) {
      const u32 ahead = at + stages * STAGE_TILES;
      if (ahead < end) {
        at = ahead;
        return;
      }
      for (; stages > 0 && !done(block); stages--) {
        at += STAGE_TILES;
        if (at >= end) next_sequence(block);
      }
    }

    DEVICE Unit unit(const RingDecode& block) const {
      TokenRange range = block.lengths.range(seq);
      // From positions to tiles of the sequence; may wrap: it is a difference.
      const u32 shift = range.begin / TILE_TOKENS - (block.shared.starts[seq] + SEQUENCE_COST);
      range.end = min(range.end, (shift + end) * TILE_TOKENS);
      return {seq, (shift + at) * TILE_TOKENS, range};
    }
  };

  // Iteration counters of the ring, and whose turn it is to fetch. Turn j refills stage j % STAGES with
  // the tiles of iteration j + STAGES, by warp j % WARPS.
  struct Progress {
    Cursor fetching;             // this warp's next turn
    typename Ring::Order order;  // looked up for it
    u32 iteration;

    DEVICE u32 stage() const { return iteration % STAGES; }
    DEVICE u32 parity() const { return iteration / STAGES % 2; }

    DEVICE void look_up(const RingDecode& block) {
      if (!fetching.done(block)) order = block.ring.prepare(fetching.unit(block));
    }
    DEVICE void take_turn(const RingDecode& block) {
      if (iteration == 0 || fetching.done(block)) return;
      const u32 turn = iteration - 1;
      if (turn % Shape::WARPS != static_cast<u32>(Shape::warp())) return;
      const int s = turn % STAGES;
      block.ring.wait_empty(s, turn / STAGES % 2);
      block.ring.fill(s, order);
      fetching.skip_stages(block, Shape::WARPS);
      look_up(block);
    }
  };

  // Warp w fills stages w, w + WARPS, ...; then each warp looks up its first turn.
  DEVICE Progress start(Cursor cursor) const {
    Progress progress = {cursor, {}, 0};
    int at = 0;
    for (int s = Shape::warp(); s < STAGES; s += Shape::WARPS) {
      progress.fetching.skip_stages(*this, s - at);
      at = s;
      if (progress.fetching.done(*this)) break;
      progress.look_up(*this);
      // The later stages are asked for later, so that the first is not held up behind them.
      if (FILL_DELAY > 0 && s > 0) ptx::delay_cycles(s * FILL_DELAY);
      ring.fill(s, progress.order);
    }
    progress.fetching.skip_stages(*this, Shape::warp() + STAGES - at);
    progress.look_up(*this);
    return progress;
  }

  // Whether every token of the unit counts.
  static DEVICE bool is_whole(const Unit& unit) {
    return unit.start >= unit.range.begin && unit.start + Layout::STAGE_TOKENS <= unit.range.end;
  }

  // One stage: this warp's tiles of it. Moves on to the next.
  template <bool MASKED>
  DEVICE void step(Warp& warp, Progress& progress, Unit& unit, bool& invalid) const {
    const u32 s = progress.stage();
    ring.wait_full(s, progress.parity());
    invalid |= shared.ring.invalid[s] != 0;
    const Tiles tiles = {stages + s * Layout::STAGE_BYTES, warp.lane, unit.start, Shape::kv_head(),
                         Shape::token_warp()};
    warp.template fold<WARP_TILES, MASKED>(tiles, unit.range, [&] { progress.take_turn(*this); });
    ring.release(s);
    progress.iteration++;
    unit.start += Layout::STAGE_TOKENS;
  }

  DEVICE QueryRow<HEAD_DIM> load_query(u32 seq) const {
    const bf16_bits* rows =
        problem.q + seq * problem.q_stride + static_cast<u64>(Shape::first_head()) * HEAD_DIM;
    return load_query_row<Format, HEAD_DIM>(rows, Shape::heads(), Lane::current());
  }

  // The share's part of one sequence, from the cursor on; then the result, or this block's part of it.
  // Returns how many sequences this block has to merge, `merges` before.
  DEVICE int run_segment(Progress& progress, const QueryRow<HEAD_DIM>& query, Cursor cursor,
                         int merges) const {
    Warp warp;
    warp.begin(query, problem.score_scale * LOG2_E);
    bool invalid = false;
    Unit unit = cursor.unit(*this);
    while (true) {
      while (is_whole(unit)) step<false>(warp, progress, unit, invalid);
      if (unit.start >= unit.range.end) break;
      step<true>(warp, progress, unit, invalid);
    }
    warp.finish();
    merge_token_warps<Shape, TOKEN_WARPS, 2>(warp);
    if (invalid) warp.state[0].sum = warp.state[1].sum = quiet_nan();
    const u32 seq = cursor.seq, start = shared.starts[seq], end = shared.starts[seq + 1];
    if (start + SEQUENCE_COST >= begin && end <= this->end) {
      if (Shape::token_warp() == 0) store_result(warp, seq);
      return merges;
    }
    if (Shape::token_warp() == 0) store_part(warp, Sharers::slot(blockIdx.x, start > begin));
    const Sharers sharers = Sharers::of(shares, start, end, SEQUENCE_COST);
    const MergeCounter counter = {problem.counters + seq};
    const u32 ticket = counter.arrive(blockIdx.x - sharers.first, sharers.count);
    if (threadIdx.x == 0) shared.to_merge[merges] = {seq, sharers, ticket};
    return merges + 1;
  }

  DEVICE void store_result(const Warp& warp, u32 seq) const {
    const u64 row = static_cast<u64>(seq) * Shape::NUM_Q_HEADS + Shape::first_head();
    float factor[2];
    UNROLL for (int k = 0; k < 2; k++) {
      factor[k] = warp.state[k].normalizer() * problem.results.value_factor;
      const int head = 2 * warp.lane.quad + k;
      if (warp.lane.row == 0 && head < Shape::heads())
        problem.results.store_lse(row + head, warp.state[k]);
    }
    visit_output<Format>(warp, Shape::heads(), [&](int head, int k, int dim, float4 values) {
      store_bf16x4(problem.results.output + (row + head) * HEAD_DIM + dim, values, factor[k]);
    });
  }

  DEVICE void store_part(const Warp& warp, u32 slot) const {
    const int first = Shape::first_head();
    visit_output<Format>(warp, Shape::heads(), [&](int head, int, int dim, float4 values) {
      *reinterpret_cast<float4*>(problem.parts.o + Part::o_at(slot, first + head) + dim) = values;
    });
    UNROLL for (int k = 0; k < 2; k++) {
      const int head = 2 * warp.lane.quad + k;
      if (warp.lane.row == 0 && head < Shape::heads())
        problem.parts.state[Part::state_at(slot, first + head)] =
            make_float2(warp.state[k].reference, warp.state[k].sum);
    }
  }

  // Merges the sequences that this block shares: one, or two side by side. So that one batch of loads covers
  // the parts where it can, few sharers take whole heads a warp, more take 32 dims a warp, and many take 32
  // dims a block.
  DEVICE void merge_shared(int merges) const {
    using Few = PartMerge<Shape::NUM_Q_HEADS, HEAD_DIM, Shape::WARPS, 1, 1>;
    using Some = PartMerge<Shape::NUM_Q_HEADS, HEAD_DIM, Shape::WARPS, 4, 1>;
    using Many = PartMerge<Shape::NUM_Q_HEADS, HEAD_DIM, Shape::WARPS, 4, Shape::WARPS>;
    __shared__ typename Many::Shared scratch;
    if (threadIdx.x == 0) {
      for (int i = 0; i < merges; i++)
        MergeCounter{problem.counters + shared.to_merge[i].seq}.wait(shared.to_merge[i].ticket);
    }
    __syncthreads();

    const bool side_by_side = merges == 2 && Shape::WARPS % 2 == 0;
    for (int i = 0; i < merges; i++) {
      const u32 seq = shared.to_merge[i].seq;
      const Sharers sharers = shared.to_merge[i].sharers;
      const u32 index = blockIdx.x - sharers.first;
      const int half = Shape::WARPS / 2;
      const Team all = {Shape::warp(), Shape::WARPS};
      const Team team = side_by_side ? Team{Shape::warp() - half * i, half} : all;
      if (sharers.count > 2 * Some::ONE_BATCH) {
        Many::run(problem.parts, sharers, index, seq, problem.results, all, &scratch);
      } else if (team.contains_caller()) {
        if (sharers.count <= Few::ONE_BATCH) {
          Few::run(problem.parts, sharers, index, seq, problem.results, team, nullptr);
        } else {
          Some::run(problem.parts, sharers, index, seq, problem.results, team, nullptr);
        }
      }
    }
  }

  // Sequences without tiles belong to nobody's share: their rows are zeros, or NaN where the length was
  // wrong. The warps of all blocks take 32 sequences at a time.
  DEVICE void store_unattended() const {
    const u32 lane = threadIdx.x % WARP_SIZE;
    const u32 step = gridDim.x * Shape::WARPS * 32;
    for (u32 base = (blockIdx.x * Shape::WARPS + Shape::warp()) * 32; base < lengths.num_seqs;
         base += step) {
      const u32 mine = base + lane;
      const bool none = mine < lengths.num_seqs &&
                        shared.starts[mine] == shared.starts[mine + 1];
      u32 found = __ballot_sync(FULL_WARP, none);
      while (found != 0) {
        const u32 seq = base + __ffs(static_cast<int>(found)) - 1;
        found &= found - 1;
        const float sum = lengths.fits(seq) ? 0.0f : quiet_nan();
        const u64 row = static_cast<u64>(seq) * Shape::NUM_Q_HEADS;
        for (u32 i = lane; i < Shape::NUM_Q_HEADS * HEAD_DIM / 4; i += 32)
          store_bf16x4(problem.results.output + row * HEAD_DIM + 4 * i, make_float4(sum, sum, sum, sum), 1.0f);
        for (u32 head = lane; head < Shape::NUM_Q_HEADS; head += 32)
          problem.results.store_lse(row + head, {0.0f, sum});
      }
    }
  }

  static DEVICE void run(const RingProblem& problem) {
    DYNAMIC_SHARED(u8, stages);
    __shared__ Shared shared;
    if (threadIdx.x == 0) Ring::init(shared.ring);
    // The next kernel may become resident as this one's blocks leave; nothing is read before the kernel
    // before has ended.
    ptx::grid_launch_dependents();
    ptx::grid_dependency_wait();
    if (Shape::warp() == 0) scan_sequences(problem.lengths, SEQUENCE_COST, shared.starts, shared.seq_lens);
    __syncthreads();

    Lengths lengths = problem.lengths;
    lengths.seq_lens = shared.seq_lens;
    const u32 num_seqs = lengths.num_seqs;
    RingDecode block = {problem, shared, stages, {shared.ring, stages, problem.pools}, lengths,
                        Shares::among(shared.starts[num_seqs], gridDim.x), 0, 0};
    block.store_unattended();
    if (blockIdx.x >= block.shares.blocks) return;
    block.begin = block.shares.begin(blockIdx.x);
    block.end = block.shares.begin(blockIdx.x + 1);
    block.run_share();
  }

  DEVICE void run_share() const {
    Cursor cursor = Cursor::first(*this);
    if (cursor.done(*this)) return;
    // Asked for before the ring is filled, so that it arrives no later than the first stage.
    QueryRow<HEAD_DIM> query = load_query(cursor.seq);
    Progress progress = start(cursor);
    int merges = 0;
    while (true) {
      merges = run_segment(progress, query, cursor, merges);
      cursor.next_sequence(*this);
      if (cursor.done(*this)) break;
      query = load_query(cursor.seq);
    }
    merge_shared(merges);
  }
};
