// Parts of sequences that several blocks share, and their merge by those same blocks.
//
// A part, in the planner's private workspace: o F32 [NUM_Q_HEADS, HEAD_DIM] (not normalised, V's
// operands as they are) and, apart, (reference in log2 units, sum) F32 pairs [NUM_Q_HEADS].
#pragma once
#include "attention/block_attention.cuh"
#include "ring/plan.cuh"

struct Parts {
  float* o;
  float2* state;
};

template <int NUM_Q_HEADS, int HEAD_DIM>
struct PartLayout {
  static DEVICE u64 state_at(u32 slot, int head) { return static_cast<u64>(slot) * NUM_Q_HEADS + head; }
  static DEVICE u64 o_at(u32 slot, int head) { return state_at(slot, head) * HEAD_DIM; }
};

// Where results go. output BF16 [num_seqs, num_q_heads, HEAD_DIM]; lse F32 [num_seqs, num_q_heads] in
// natural units, or null.
struct Results {
  bf16_bits* output;
  float* lse;
  float value_factor;  // v_scale, and what V's operands lack

  DEVICE void store_lse(u64 row, SoftmaxState state) const {
    if (lse == nullptr) return;
    lse[row] = state.sum == 0.0f ? negative_infinity() : (state.reference + log2f(state.sum)) * LN_2;
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

// One way to spread the merge of a sequence over threads. An item is a query head and DIMS of its dims,
// worked on by ITEM_WARPS warps; in a warp, ROW_LANES groups of lanes take different parts.
template <int NUM_Q_HEADS, int HEAD_DIM, int WARPS, int ROW_LANES, int ITEM_WARPS>
struct PartMerge {
  static constexpr int COLUMN_LANES = 32 / ROW_LANES;
  static constexpr int DIMS = 4 * COLUMN_LANES;
  static constexpr int CHUNKS = (HEAD_DIM + DIMS - 1) / DIMS;
  static constexpr int ITEMS = NUM_Q_HEADS * CHUNKS;
  static constexpr int ROWS_AT_ONCE = ROW_LANES * ITEM_WARPS;
  static constexpr int BATCH = 5;  // parts a lane reads at once
  // Items whose parts a warp has in flight together.
  static constexpr int AT_ONCE = ITEM_WARPS == 1 ? 2 : 1;
  static constexpr u32 ONE_BATCH = BATCH * ROWS_AT_ONCE;  // parts read at once for an item
  using Layout = PartLayout<NUM_Q_HEADS, HEAD_DIM>;

  struct Shared {
    float4 o[WARPS][COLUMN_LANES];
    float2 state[WARPS];
  };

  // Parts first, first + ROWS_AT_ONCE, ... of a head, dims dim .. dim + 3.
  static DEVICE PartSum gather(const Parts& parts, const Sharers& sharers, u32 first, int head,
                               int dim) {
    PartSum total = PartSum::empty();
    for (u32 begin = first; begin < sharers.count; begin += BATCH * ROWS_AT_ONCE) {
      float2 state[BATCH];
      float4 o[BATCH];
      float target = total.state.reference;
    UNROLL for (int b = 0; b < BATCH; b++) {
        const u32 index = begin + b * ROWS_AT_ONCE;
        const bool exists = index < sharers.count;
        const u32 slot = sharers.slot_of(exists ? index : begin);
        state[b] = __ldcg(parts.state + Layout::state_at(slot, head));
        o[b] = __ldcg(reinterpret_cast<const float4*>(parts.o + Layout::o_at(slot, head) + dim));
        if (!exists) state[b] = make_float2(EMPTY_REFERENCE, 0.0f), o[b] = make_float4(0, 0, 0, 0);
        target = fmaxf(target, state[b].x);
      }
      total.scale_o(total.state.move_to(target));
      UNROLL for (int b = 0; b < BATCH; b++) {
        const float weight = ptx::exp2_approx(state[b].x - target);
        total.state.sum += weight * state[b].y;
        total.add_o(o[b], weight);
      }
    }
    return total;
  }

  // Block number `index` of the sequence's sharers does its share of the items, an equal and contiguous one,
  // by the team's warps. With ITEM_WARPS > 1 the team is the whole block and every thread calls it.
  static DEVICE void run(const Parts& parts, const Sharers& sharers, u32 index, u32 seq,
                         const Results& results, Team team, Shared* shared) {
    const int lane = static_cast<int>(threadIdx.x % 32), column = lane % COLUMN_LANES;
    const int item_warp = team.warp % ITEM_WARPS;
    const u32 first = index * ITEMS / sharers.count, end = (index + 1) * ITEMS / sharers.count;
    const u32 stride = team.warps / ITEM_WARPS;
    for (u32 base = first + team.warp / ITEM_WARPS; base < end || ITEM_WARPS > 1; base += AT_ONCE * stride) {
      if (ITEM_WARPS > 1 && base - team.warp / ITEM_WARPS >= end) break;
      PartSum sum[AT_ONCE];
      UNROLL for (int i = 0; i < AT_ONCE; i++) {
        const Item item = item_at(base + i * stride, end, column);
        sum[i] = PartSum::empty();
        if (item.exists)
          sum[i] = gather(parts, sharers, lane / COLUMN_LANES + ROW_LANES * item_warp, item.head, item.dim);
      }
      UNROLL for (int i = 0; i < AT_ONCE; i++) {
        const Item item = item_at(base + i * stride, end, column);
        UNROLL for (int distance = COLUMN_LANES; distance < 32; distance *= 2) sum[i].merge_lane(distance);
        if constexpr (ITEM_WARPS > 1) {
          if (lane < COLUMN_LANES) shared->o[team.warp][column] = sum[i].o;
          if (lane == 0) shared->state[team.warp] = make_float2(sum[i].state.reference, sum[i].state.sum);
          __syncthreads();
          if (item_warp == 0 && lane < COLUMN_LANES) sum[i] = combine(*shared, team.warp, column);
          __syncthreads();
        }
        if (item.exists && item_warp == 0 && lane < COLUMN_LANES) store(sum[i], item, seq, results);
      }
    }
  }

  struct Item {
    int head;
    int dim;
    bool exists;
  };

  static DEVICE Item item_at(u32 item, u32 end, int column) {
    const int dim = static_cast<int>(item % CHUNKS) * DIMS + 4 * column;
    return {static_cast<int>(item / CHUNKS), dim, item < end && dim < HEAD_DIM};
  }

  static DEVICE void store(const PartSum& sum, const Item& item, u32 seq, const Results& results) {
    const u64 row = static_cast<u64>(seq) * NUM_Q_HEADS + item.head;
    store_bf16x4(results.output + row * HEAD_DIM + item.dim, sum.o,
                 sum.state.normalizer() * results.value_factor);
    if (item.dim == 0) results.store_lse(row, sum.state);
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
