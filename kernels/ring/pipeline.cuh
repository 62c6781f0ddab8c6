// Filling the ring. There is no producer warp: the warps take turns, each issuing the copies of one
// stage in the middle of an iteration, between its use of K and its use of V.
#pragma once
#include "ptx.cuh"
#include "ring/plan.cuh"
#include "ring/stage.cuh"

// A stage's worth of a sequence. `range` holds the tokens that count, cut off where the block's share
// ends.
struct Unit {
  u32 seq;
  u32 start;  // position of its first tile, a multiple of 16
  TokenRange range;
};

struct Pools {
  const u8* k;
  const u8* v;
  const i32* block_tables;
  u32 max_blocks_per_seq;
  u32 num_blocks;
  PoolGeometry geometry;
};

template <class Layout, int BLOCK_SIZE, int STAGES, int WARPS>
struct Pipeline {
  struct Shared {
    u64 full[STAGES];     // a stage's bytes have arrived
    u64 empty[STAGES];    // all warps have read it
    u32 invalid[STAGES];  // some block of it is outside the pool
  };

  // What a lane must know to issue its copies of a unit; looked up one turn ahead.
  struct Order {
    u32 block[Layout::ROUNDS];
    u32 token[Layout::ROUNDS];  // within the block
    bool live[Layout::ROUNDS];
  };

  Shared& shared;
  u8* ring;
  const Pools& pools;

  // By one thread; a __syncthreads must follow.
  static DEVICE void init(Shared& shared) {
    for (int s = 0; s < STAGES; s++) {
      ptx::mbarrier_init(&shared.full[s], 1);
      ptx::mbarrier_init(&shared.empty[s], WARPS);
    }
    ptx::mbarrier_init_fence();
  }

  static DEVICE StageCopy<Layout> copy(int round) {
    return {round * 32 + static_cast<int>(threadIdx.x % WARP_SIZE)};
  }

  // Looks up the blocks; only those that hold attended tokens. A tile is fetched whole or not at all: a
  // run of it without attended tokens is stood in for by the nearest one that has some.
  DEVICE Order prepare(const Unit& unit) const {
    Order order;
    const i32* table = pools.block_tables + static_cast<u64>(unit.seq) * pools.max_blocks_per_seq;
    UNROLL for (int round = 0; round < Layout::ROUNDS; round++) {
      const auto part = copy(round);
      const u32 tile = unit.start + part.tile() * TILE_TOKENS;
      order.live[round] = part.exists() && tile < unit.range.end && tile + TILE_TOKENS > unit.range.begin;
      const u32 attended = max(unit.range.begin, min(unit.start + part.token(), unit.range.end - 1));
      const u32 first = attended / Layout::RUN * Layout::RUN;
      order.token[round] = first % BLOCK_SIZE;
      order.block[round] = order.live[round] ? static_cast<u32>(table[first / BLOCK_SIZE]) : 0u;
    }
    return order;
  }

  // Issues the copies into stage s, by all lanes of one warp. The stage must be empty.
  DEVICE void fill(int s, const Order& order) const {
    u32 bytes = 0;
    bool invalid = false;
    UNROLL for (int round = 0; round < Layout::ROUNDS; round++) {
      const bool is_scales = copy(round).is_scales();
      bytes += Layout::DATA_COPY_BYTES * __popc(__ballot_sync(FULL_WARP, order.live[round] && !is_scales));
      if constexpr (Layout::SCALES_APART)
        bytes += Layout::SCALE_COPY_BYTES * __popc(__ballot_sync(FULL_WARP, order.live[round] && is_scales));
      invalid |= order.block[round] >= pools.num_blocks;
    }
    invalid = __any_sync(FULL_WARP, invalid);
    if (threadIdx.x % WARP_SIZE == 0) {
      shared.invalid[s] = invalid;
      ptx::mbarrier_arrive_expect_tx(&shared.full[s], bytes);
    }
    __syncwarp();
    UNROLL for (int round = 0; round < Layout::ROUNDS; round++) {
      const auto part = copy(round);
      if (!order.live[round]) continue;
      // A block outside the pool is read as block 0 and the result discarded.
      const u64 block = order.block[round] < pools.num_blocks ? order.block[round] : 0u;
      const u8* pool = part.is_value() ? pools.v : pools.k;
      const u8* source = pool + block * pools.geometry.block_stride +
                         part.block_offset(pools.geometry, order.token[round]);
      ptx::bulk_copy_evict_first(ring + s * Layout::STAGE_BYTES + part.stage_offset(), source, part.bytes(),
                                 &shared.full[s]);
    }
  }

  DEVICE void wait_full(int s, u32 parity) const { ptx::mbarrier_wait_parity(&shared.full[s], parity); }
  DEVICE void wait_empty(int s, u32 parity) const { ptx::mbarrier_wait_parity(&shared.empty[s], parity); }

  // This warp has read stage s.
  DEVICE void release(int s) const {
    __syncwarp();
    if (threadIdx.x % WARP_SIZE == 0) ptx::mbarrier_arrive(&shared.empty[s]);
  }
};
