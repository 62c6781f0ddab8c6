// Parts of sequences that several blocks share, and their merge by those same blocks.
//
// A part, in the planner's private workspace: o F32 [SLICE_ROWS, HEAD_DIM] (not normalised, V's operands
// as they are) and, apart, (reference in log2 units, sum) F32 pairs [SLICE_ROWS].
#pragma once
#include "ring/plan.cuh"
#include "ring/results.cuh"

template <class Spec>
struct Parts {
  float* o;
  float2* state;

  static DEVICE u64 row(u32 slot, int index) {
    return static_cast<u64>(slot) * RingShape<Spec>::SLICE_ROWS + index;
  }
  DEVICE float4* o_at(u32 slot, int index, int dim) const {
    return reinterpret_cast<float4*>(o + row(slot, index) * Spec::HEAD_DIM + dim);
  }
  DEVICE float2* state_at(u32 slot, int index) const { return state + row(slot, index); }

  // The slots of this block's slice: two for each of its blocks.
  DEVICE Parts of_slice() const {
    const u32 first = 2u * gridDim.x * RingShape<Spec>::slice();
    return {o + row(first, 0) * Spec::HEAD_DIM, state + row(first, 0)};
  }
};

// The weighted sum of parts that one lane has so far, for four dims.
struct PartSum {
  SoftmaxState state;
  float4 o;

  static DEVICE PartSum empty() { return {SoftmaxState::empty(), make_float4(0.0f, 0.0f, 0.0f, 0.0f)}; }

  DEVICE void scale_o(float factor) { o.x *= factor, o.y *= factor, o.z *= factor, o.w *= factor; }
  DEVICE void add_o(float4 other, float factor) {
    o.x += other.x * factor, o.y += other.y * factor, o.z += other.z * factor, o.w += other.w * factor;
  }
  DEVICE void merge(SoftmaxState other, float4 other_o) {
    const float2 factor = state.merge(other);
    scale_o(factor.x);
    add_o(other_o, factor.y);
  }
  DEVICE void merge_lane(int lane_distance) {
    const SoftmaxState other = {__shfl_xor_sync(FULL_WARP, state.reference, lane_distance),
                                __shfl_xor_sync(FULL_WARP, state.sum, lane_distance)};
    const float4 other_o = make_float4(
        __shfl_xor_sync(FULL_WARP, o.x, lane_distance), __shfl_xor_sync(FULL_WARP, o.y, lane_distance),
        __shfl_xor_sync(FULL_WARP, o.z, lane_distance), __shfl_xor_sync(FULL_WARP, o.w, lane_distance));
    merge(other, other_o);
  }
};

// The warps that work on a merge together: `warp` is the caller's number among `warps`.
struct Team {
  int warp;
  int warps;

  DEVICE bool contains_caller() const { return warp >= 0 && warp < warps; }
};

// The merge of a sequence. An item is a query row and `4 * column_lanes` of its dims, worked on by
// ITEM_WARPS warps; in a warp, groups of column_lanes lanes take different parts.
template <class Spec, int WARPS, int ITEM_WARPS>
struct PartMerge {
  static constexpr int HEAD_DIM = Spec::HEAD_DIM;
  static constexpr int WIDE = 32, NARROW = 8;  // column lanes: whole rows a warp, or 32 dims
  static constexpr int BATCH = 5;              // parts a lane reads at once
  // Items whose parts a warp has in flight together.
  static constexpr int AT_ONCE = ITEM_WARPS == 1 ? 2 : 1;

  struct Shared {
    float4 o[WARPS][NARROW];
    float2 state[WARPS];
  };

  const Parts<Spec>& parts;
  Sharers sharers;
  u32 seq;
  const Results& results;
  int column_lanes;

  // Parts that are read at once for an item.
  static DEVICE constexpr u32 one_batch(int column_lanes) {
    return BATCH * ITEM_WARPS * (32 / column_lanes);
  }

  DEVICE int lane() const { return static_cast<int>(threadIdx.x % 32); }
  DEVICE int column() const { return lane() & (column_lanes - 1); }
  DEVICE u32 parts_at_once() const { return ITEM_WARPS * (column_lanes == WIDE ? 1 : 32 / NARROW); }

  // Chunks of a row's dims.
  static DEVICE constexpr u32 chunks_of(int column_lanes) {
    return divide_up(HEAD_DIM, 4 * column_lanes);
  }
  DEVICE u32 chunks() const { return column_lanes == WIDE ? chunks_of(WIDE) : chunks_of(NARROW); }

  // Parts first, first + parts_at_once, ... of a row, dims dim .. dim + 3.
  DEVICE PartSum gather(u32 first, int row, int dim) const {
    PartSum total = PartSum::empty();
#pragma unroll 1
    for (u32 begin = first; begin < sharers.count; begin += BATCH * parts_at_once()) {
      float2 state[BATCH];
      float4 o[BATCH];
      float target = total.state.reference;
#pragma unroll
      for (int b = 0; b < BATCH; b++) {
        const u32 index = begin + b * parts_at_once();
        const bool exists = index < sharers.count;
        const u32 slot = sharers.slot_of(exists ? index : begin);
        state[b] = __ldcg(parts.state_at(slot, row));
        o[b] = __ldcg(parts.o_at(slot, row, dim));
        if (!exists) state[b] = make_float2(EMPTY_REFERENCE, 0.0f), o[b] = make_float4(0, 0, 0, 0);
        target = fmaxf(target, state[b].x);
      }
      total.scale_o(total.state.move_to(target));
#pragma unroll
      for (int b = 0; b < BATCH; b++) {
        const float weight = ptx::exp2_approx(state[b].x - target);
        total.state.sum += weight * state[b].y;
        total.add_o(o[b], weight);
      }
    }
    return total;
  }

  // Block number `index` of the sequence's sharers does its share of the items, an equal and contiguous
  // one, by the team's warps. With ITEM_WARPS > 1 the team is the whole block and every thread calls it.
  DEVICE void run(u32 index, Team team, Shared* shared) const {
    const u32 items = RingShape<Spec>::SLICE_ROWS * chunks();
    const int item_warp = team.warp % ITEM_WARPS;
    const u32 first = index * items / sharers.count, end = (index + 1) * items / sharers.count;
    const u32 stride = team.warps / ITEM_WARPS;
#pragma unroll 1
    for (u32 base = first + team.warp / ITEM_WARPS; base < end; base += AT_ONCE * stride) {
      PartSum sum[AT_ONCE];
#pragma unroll
      for (int i = 0; i < AT_ONCE; i++) {
        const Item item = item_at(base + i * stride, end);
        const u32 own = lane() / static_cast<u32>(column_lanes) + 32 / NARROW * item_warp;
        sum[i] = item.exists ? gather(own, item.row, item.dim) : PartSum::empty();
      }
#pragma unroll
      for (int i = 0; i < AT_ONCE; i++) {
        const Item item = item_at(base + i * stride, end);
#pragma unroll 1
        for (int distance = column_lanes; distance < 32; distance *= 2) sum[i].merge_lane(distance);
        if constexpr (ITEM_WARPS > 1) {
          if (lane() < NARROW) shared->o[team.warp][column()] = sum[i].o;
          if (lane() == 0)
            shared->state[team.warp] = make_float2(sum[i].state.reference, sum[i].state.sum);
          __syncthreads();
          if (item_warp == 0 && lane() < NARROW) sum[i] = combine(*shared, team.warp, column());
          __syncthreads();
        }
        if (item.exists && item_warp == 0 && lane() < column_lanes) store(sum[i], item);
      }
    }
  }

 private:
  struct Item {
    int row;  // of the slice's
    int dim;
    bool exists;
  };

  DEVICE Item item_at(u32 item, u32 end) const {
    const int row =
        static_cast<int>(column_lanes == WIDE ? item / chunks_of(WIDE) : item / chunks_of(NARROW));
    const int chunk = static_cast<int>(item - row * chunks());
    const int dim = 4 * (chunk * column_lanes + column());
    return {row, dim, item < end && dim < HEAD_DIM && QueryRowIndex<Spec>::in_slice(row)};
  }

  DEVICE void store(const PartSum& sum, const Item& item) const {
    const auto row = QueryRowIndex<Spec>::of_slice(item.row);
    const float factor = results.finish_row(sum.state, row, seq, item.dim == 0);
    ResultStore<Spec>::store4(results, row.flat(seq), item.dim, sum.o, factor);
  }

  // The sums of ITEM_WARPS warps from `first` on; their reads and exponentials are independent.
  static DEVICE PartSum combine(const Shared& shared, int first, int column) {
    PartSum total = PartSum::empty();
    float2 state[ITEM_WARPS];
    float target = EMPTY_REFERENCE;
    UNROLL for (int w = 0; w < ITEM_WARPS; w++) {
      state[w] = shared.state[first + w];
      target = fmaxf(target, state[w].x);
    }
    total.state.reference = target;
    UNROLL for (int w = 0; w < ITEM_WARPS; w++) {
      const float weight = ptx::exp2_approx(state[w].x - target);
      total.state.sum += weight * state[w].y;
      total.add_o(shared.o[first + w][column], weight);
    }
    return total;
  }
};

// A counter a sequence tells its sharers when all of them have left their part. It is never set back: every
// launch adds ARRIVALS in all, whatever the number of sharers (the first makes up for those that are missing),
// so it is a multiple of ARRIVALS between launches, and reaches the next one with the last arrival.
constexpr u32 ARRIVALS = 1u << 16;  // more than a grid has blocks

struct MergeCounter {
  u32* counter;

  // By all threads, after their part is written; returns a ticket for wait(), good in thread 0.
  DEVICE u32 arrive(u32 index, u32 count) const {
    __syncthreads();
    if (threadIdx.x != 0) return 0;
    return ptx::atomic_add_acq_rel(counter, index == 0 ? ARRIVALS - (count - 1) : 1u) / ARRIVALS;
  }
  // By one thread: returns once all sharers have arrived. They spin, so the launch is co-operative.
  DEVICE void wait(u32 ticket) const {
    while (ptx::load_acquire(counter) / ARRIVALS == ticket) ptx::spin_pause();
  }
};
