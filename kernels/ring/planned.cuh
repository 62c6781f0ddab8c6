// Decode at the memory roofline: persistent blocks work through equal shares of all sequences, planned
// on the device, and merge what they share.
#pragma once
#include "ring/loop.cuh"
#include "ring/merge.cuh"
#include "ring/planned_work.cuh"

// Sequences whose plan fits in shared memory; the same figure as in cupaged/registry/ring.py.
constexpr u32 MAX_PLANNED_SEQS = 512;

// The sequences a block shares with others, at most two: the one its share begins with and the one it
// ends with.
struct SharedSequence {
  u32 seq;
  Sharers sharers;
  u32 ticket;  // of its counter
};

template <class Spec>
struct PlannedProblem {
  RingInputs inputs;
  Lengths lengths;
  Results results;
  Parts<Spec> parts;
  u32* counters;      // MergeCounter, one a sequence and slice; zero before the first launch
  const u32* starts;  // SPEC_MANY: the plan of plan_sequences, [num_seqs + 1] and then the lengths
};

template <class Spec, bool MANY>
struct PlannedDecode {
  using Shape = RingShape<Spec>;
  using Work = PlannedWork<Spec>;
  using Loop = RingLoop<Spec, Work>;
  using Ring = typename Loop::Ring;
  using Warp = typename Loop::Warp;
  using Cursor = typename Work::Cursor;
  static constexpr u32 COST = Spec::SEQUENCE_COST;

  struct Shared {
    typename Ring::Shared ring;
    u32 starts[MANY ? 1 : MAX_PLANNED_SEQS + 1];
    u32 lengths[MANY ? 1 : MAX_PLANNED_SEQS];
    SharedSequence to_merge[2];
  };

  const PlannedProblem<Spec>& problem;
  Shared& shared;
  Parts<Spec> parts;  // of this slice
  Work work;
  Shares shares;

  static DEVICE void run(const PlannedProblem<Spec>& problem) {
    DYNAMIC_SHARED(u8, stages);
    __shared__ Shared shared;
    if (threadIdx.x == 0) Ring::init(shared.ring);
    // The next kernel may become resident as this one's blocks leave; nothing is read before the kernel
    // before has ended.
    ptx::grid_launch_dependents();
    ptx::grid_dependency_wait();
    if (!MANY && Shape::warp() == 0)
      scan_sequences(problem.lengths, COST, shared.starts, shared.lengths);
    __syncthreads();

    const u32 num_seqs = problem.lengths.num_seqs;
    Work work = {problem.lengths, shared.starts, shared.lengths, 0, 0};
    if constexpr (MANY) work.starts = problem.starts, work.length_of = problem.starts + num_seqs + 1;
    PlannedDecode block = {problem, shared, problem.parts.of_slice(), work,
                           Shares::among(work.starts[num_seqs], gridDim.x)};
    block.store_unattended();
    if (blockIdx.x >= block.shares.blocks) return;
    const TokenRange own = block.shares.positions(blockIdx.x);
    block.work.begin = own.begin, block.work.end = own.end;
    block.run_share(stages);
  }

  DEVICE void run_share(u8* stages) const {
    Cursor cursor = Cursor::first(work);
    if (cursor.done(work)) return;
    const Loop loop = {problem.inputs, work,
                       Ring::of(shared.ring, stages, problem.inputs.pools, Shape::slice_head())};
    // Asked for before the ring is filled, so that it arrives no later than the first stage; but where
    // one short stage is all that a block has, nothing may come before that.
    typename Loop::Query query;
    if constexpr (!Spec::SHORT) query = loop.load_query(cursor.seq);
    typename Loop::Progress progress = loop.start(cursor);
    if constexpr (Spec::SHORT) query = loop.load_query(cursor.seq);
    int merges = 0;
    while (true) {
      Warp warp;
      const bool valid = loop.attend(warp, progress, query, cursor);
      merges = finish_piece(warp, valid, cursor.seq, merges);
      cursor.next_piece(work);
      if (cursor.done(work)) break;
      query = loop.load_query(cursor.seq);
    }
    merge_shared(merges);
  }

  // Stores the result of a sequence, or this block's part of it. Returns how many sequences this block
  // has to merge, `merges` before.
  DEVICE int finish_piece(Warp& warp, bool valid, u32 seq, int merges) const {
    if (!valid) warp.poison();
    const u32 start = work.starts[seq], end = work.starts[seq + 1];
    if (start + COST >= work.begin && end <= work.end) {
      if (Shape::token_warp() == 0) ResultStore<Spec>::store_warp(problem.results, warp, seq);
      return merges;
    }
    if (Shape::token_warp() == 0) store_part(warp, Sharers::slot(blockIdx.x, start > work.begin));
    const Sharers sharers = Sharers::of(shares, start, end, COST);
    const u32 ticket = counter_of(seq).arrive(blockIdx.x - sharers.first, sharers.count);
    if (threadIdx.x == 0) shared.to_merge[merges] = {seq, sharers, ticket};
    return merges + 1;
  }

  DEVICE MergeCounter counter_of(u32 seq) const {
    return {problem.counters + static_cast<u64>(seq) * Shape::SLICES + Shape::slice()};
  }

  DEVICE void store_part(const Warp& warp, u32 slot) const {
    visit_output<typename Spec::ValueFormat>(
        warp, Shape::rows(), [&](int column, int, int dim, float4 values) {
          *parts.o_at(slot, Shape::slice_index(column), dim) = values;
        });
    UNROLL for (int k = 0; k < Warp::COLUMNS; k++) {
      const int column = warp.lane.column(k);
      if (warp.lane.row == 0 && column < Shape::rows())
        *parts.state_at(slot, Shape::slice_index(column)) =
            make_float2(warp.state[k].reference, warp.state[k].sum);
    }
  }

  // Merges the sequences that this block shares: one, or two side by side. So that one batch of loads covers
  // the parts where it can, few sharers take whole rows a warp, more take 32 dims a warp, and many take 32
  // dims a block.
  DEVICE void merge_shared(int merges) const {
    using ByWarps = PartMerge<Spec, Shape::WARPS, 1>;
    using ByBlock = PartMerge<Spec, Shape::WARPS, Shape::WARPS>;
    __shared__ typename ByBlock::Shared scratch;
    if (threadIdx.x == 0) {
      for (int i = 0; i < merges; i++) counter_of(shared.to_merge[i].seq).wait(shared.to_merge[i].ticket);
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
      if (sharers.count > 2 * ByWarps::one_batch(ByWarps::NARROW)) {
        ByBlock{parts, sharers, seq, problem.results, ByBlock::NARROW}.run(index, all, &scratch);
      } else if (team.contains_caller()) {
        const bool few = sharers.count <= ByWarps::one_batch(ByWarps::WIDE);
        ByWarps{parts, sharers, seq, problem.results, few ? ByWarps::WIDE : ByWarps::NARROW}.run(
            index, team, nullptr);
      }
    }
  }

  // Sequences without tiles belong to nobody's share: their rows are zeros, or NaN where the length was
  // wrong. The warps of all blocks of the first slice take 32 sequences at a time.
  DEVICE void store_unattended() const {
    if (Shape::slice() != 0) return;
    const u32 lane = threadIdx.x % WARP_SIZE, num_seqs = work.lengths.num_seqs;
    const u32 step = gridDim.x * Shape::WARPS * WARP_SIZE;
    for (u32 base = (blockIdx.x * Shape::WARPS + Shape::warp()) * WARP_SIZE; base < num_seqs; base += step) {
      const u32 mine = base + lane;
      const bool none = mine < num_seqs && work.starts[mine] == work.starts[mine + 1];
      u32 found = __ballot_sync(FULL_WARP, none);
      while (found != 0) {
        const u32 seq = base + __ffs(static_cast<int>(found)) - 1;
        found &= found - 1;
        ResultStore<Spec>::store_empty(problem.results, problem.inputs.sinks, seq, problem.lengths.fits(seq));
      }
    }
  }
};
