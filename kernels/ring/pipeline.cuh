// Filling the ring. There is no producer warp: the warps take turns, each asking for one stage in the
// middle of an iteration, between its use of K and its use of V.
#pragma once
#include "attention/lengths.cuh"
#include "ptx.cuh"
#include "ring/stage.cuh"

// A stage's worth of a sequence.
struct Unit {
  u32 seq;
  u32 start;  // position of its first tile, a multiple of 16; in the range's first tile or later
  TokenRange
      range;  // tokens that count for some query token, cut off where the work on the sequence ends
  TokenRange whole;  // tokens that count for all
};

struct Pools {
  const u8* k;
  const u8* v;
  const i32* block_tables;
  u32 table_stride;  // entries between sequences
  u32 num_blocks;
  PoolGeometry k_geometry;
  PoolGeometry v_geometry;
};

// One copy of a stage: a piece of K or V, values or scales.
template <class Spec>
struct StageCopy {
  using Layout = StageLayout<Spec>;
  using K = typename Layout::KeyImage;
  using V = typename Layout::ValueImage;
  static constexpr int K_KINDS = K::SCALES_APART ? 2 : 1, V_KINDS = V::SCALES_APART ? 2 : 1;
  static constexpr int TILE_COPIES = (K_KINDS + V_KINDS) * K::PIECES;
  static constexpr int COPIES = Layout::TILES * TILE_COPIES;
  int index;

  DEVICE int tile() const { return index / TILE_COPIES; }
  DEVICE int kind() const { return index % TILE_COPIES / K::PIECES; }
  DEVICE int piece() const { return index % K::PIECES; }  // K and V have the same pieces
  DEVICE bool is_value() const { return kind() >= K_KINDS; }
  DEVICE bool is_scales() const { return kind() == (is_value() ? K_KINDS + 1 : 1); }
  DEVICE u32 bytes() const {
    const int k = is_scales() ? K::PIECE_SCALE_BYTES : K::PIECE_BYTES;
    const int v = is_scales() ? V::PIECE_SCALE_BYTES : V::PIECE_BYTES;
    return static_cast<u32>(is_value() ? v : k);
  }
  // From a block's start to this copy's section and head, and between tokens.
  DEVICE u64 head_offset(const Pools& pools, int head) const {
    const u64 k =
        is_scales() ? scale_offset(pools.k_geometry, 0, head) : data_offset(pools.k_geometry, 0, head);
    const u64 v =
        is_scales() ? scale_offset(pools.v_geometry, 0, head) : data_offset(pools.v_geometry, 0, head);
    return is_value() ? v : k;
  }
  DEVICE u64 token_stride(const Pools& pools) const {
    const u64 k = is_scales() ? pools.k_geometry.scale_token_stride : pools.k_geometry.token_stride;
    const u64 v = is_scales() ? pools.v_geometry.scale_token_stride : pools.v_geometry.token_stride;
    return is_value() ? v : k;
  }
  DEVICE int stage_offset() const {
    const int row = K::piece_row(piece());
    const int k = is_scales() ? K::SCALES + row * Spec::KeyFormat::SCALE_BYTES
                              : row * (K::PIECE_BYTES / (K::PIECE_TOKENS * K::PIECE_HEADS));
    const int v = is_scales() ? V::SCALES + row * Spec::ValueFormat::SCALE_BYTES
                              : row * (V::PIECE_BYTES / (V::PIECE_TOKENS * V::PIECE_HEADS));
    return tile() * Layout::TILE_BYTES + (is_value() ? K::BYTES + v : k);
  }
};

// Lanes of a warp that tell "empty" that they have read a stage. One is enough, after a __syncwarp; a
// race checker that does not follow that order from lane to lane is given kernels in which each lane
// does.
#ifdef RING_EVERY_LANE_ARRIVES
constexpr u32 EMPTY_LANES = WARP_SIZE;
#else
constexpr u32 EMPTY_LANES = 1;
#endif

template <class Spec, int WARPS>
struct Pipeline {
  using Layout = StageLayout<Spec>;
  static constexpr int RUN_ROUNDS = divide_up(Layout::RUNS, WARP_SIZE);
  // Where a lane has one copy a stage, each of a whole tile, and registers to remember it.
  static constexpr bool AHEAD = Spec::BULK && StageCopy<Spec>::COPIES <= static_cast<int>(WARP_SIZE) &&
                                Layout::RUN == TILE_TOKENS && WARPS <= 8;

  struct Shared {
    u64 full[Spec::STAGES];     // a stage's bytes have arrived
    u64 empty[Spec::STAGES];    // all warps have read it
    u32 invalid[Spec::STAGES];  // some block of it is outside the pool
  };

  // What is needed to ask for a unit: lane i holds the blocks of runs i, i + 32, ...; looked up one turn
  // ahead.
  struct Order {
    Unit unit;
    u32 block[RUN_ROUNDS];

    // Tiles that hold attended tokens: the first ones. The others are not fetched.
    DEVICE int live_tiles() const {
      return static_cast<int>(min(static_cast<u32>(Layout::TILES),
                                  (unit.range.end - unit.start + TILE_TOKENS - 1) / TILE_TOKENS));
    }
    // A run of a live tile without attended tokens is stood in for by the nearest one that has some.
    DEVICE u32 run_start(int run) const {
      const u32 position = unit.start + run * Layout::RUN;
      if constexpr (Layout::RUN == TILE_TOKENS) return position;
      return max(unit.range.begin, min(position, unit.range.end - 1)) / Layout::RUN * Layout::RUN;
    }
    // By all lanes together.
    DEVICE u32 block_of(int run) const {
      u32 found = __shfl_sync(FULL_WARP, block[0], run % WARP_SIZE);
      UNROLL for (int round = 1; round < RUN_ROUNDS; round++) {
        const u32 other = __shfl_sync(FULL_WARP, block[round], run % WARP_SIZE);
        if (run / WARP_SIZE == round) found = other;
      }
      return found;
    }
  };

  // What a lane's copies into any stage have in common. Worked out ahead, so that little is left to do once a
  // block's number has arrived.
  struct LaneCopy {
    const u8* source;  // in block 0
    u64 block_stride;
  };

  Shared& shared;
  u8* ring;
  const Pools& pools;
  int first_head;  // of the block's KV heads
  LaneCopy ahead;

  static DEVICE Pipeline of(Shared& shared, u8* ring, const Pools& pools, int first_head) {
    Pipeline pipeline = {shared, ring, pools, first_head, {}};
    if constexpr (AHEAD) pipeline.ahead = pipeline.lane_copy({lane()});
    return pipeline;
  }

  // By one thread; a __syncthreads must follow.
  static DEVICE void init(Shared& shared) {
    // Bytes complete a stage, or the copies of all lanes of the warp that asked, and its own word.
    constexpr u32 FULL_ARRIVALS = Spec::BULK ? 1 : WARP_SIZE + 1;
    for (int s = 0; s < Spec::STAGES; s++) {
      ptx::mbarrier_init(&shared.full[s], FULL_ARRIVALS);
      ptx::mbarrier_init(&shared.empty[s], WARPS * EMPTY_LANES);
    }
    ptx::mbarrier_init_fence();
  }

  static DEVICE int lane() { return static_cast<int>(threadIdx.x % WARP_SIZE); }
  DEVICE u8* stage(int s) const { return ring + s * Layout::BYTES; }

  DEVICE Order prepare(const Unit& unit) const {
    Order order = {unit, {}};
    const i32* table = pools.block_tables + static_cast<u64>(unit.seq) * pools.table_stride;
    const int live_runs = order.live_tiles() * (TILE_TOKENS / Layout::RUN);
    UNROLL for (int round = 0; round < RUN_ROUNDS; round++) {
      const int run = round * static_cast<int>(WARP_SIZE) + lane();
      order.block[round] =
          run < live_runs ? static_cast<u32>(table[order.run_start(run) / Spec::BLOCK_SIZE]) : 0u;
    }
    return order;
  }

  // Asks for the stage's bytes, by all lanes of one warp. The stage must be empty.
  DEVICE void fill(int s, const Order& order) const {
    bool invalid = false;
    UNROLL for (int round = 0; round < RUN_ROUNDS; round++) invalid |= order.block[round] >= pools.num_blocks;
    invalid = __any_sync(FULL_WARP, invalid);
    if (lane() == 0) shared.invalid[s] = invalid;
    if constexpr (Spec::BULK) {
      if (lane() == 0)
        ptx::mbarrier_arrive_expect_tx(&shared.full[s], order.live_tiles() * Layout::TILE_LOADED_BYTES);
      __syncwarp();
      fill_by_bulk_copies(s, order);
    } else {
      using K = typename Layout::KeyImage;
      using V = typename Layout::ValueImage;
      fill_by_lanes<K, typename Spec::KeyFormat, false>(Layout::key_image(stage(s), 0), pools.k, pools.k_geometry, order);
      fill_by_lanes<V, typename Spec::ValueFormat, false>(Layout::value_image(stage(s), 0), pools.v, pools.v_geometry, order);
      if constexpr (K::SCALES_APART)
        fill_by_lanes<K, typename Spec::KeyFormat, true>(Layout::key_image(stage(s), 0), pools.k, pools.k_geometry, order);
      if constexpr (V::SCALES_APART)
        fill_by_lanes<V, typename Spec::ValueFormat, true>(Layout::value_image(stage(s), 0), pools.v, pools.v_geometry, order);
      ptx::cp_async_mbarrier_arrive_noinc(&shared.full[s]);
      __syncwarp();
      if (lane() == 0) ptx::mbarrier_arrive(&shared.full[s]);
    }
  }

  DEVICE void wait_full(int s, u32 parity) const { ptx::mbarrier_wait_parity(&shared.full[s], parity); }
  DEVICE void wait_empty(int s, u32 parity) const { ptx::mbarrier_wait_parity(&shared.empty[s], parity); }

  // This warp has read stage s.
  DEVICE void release(int s) const {
    __syncwarp();
    if (lane() < static_cast<int>(EMPTY_LANES)) ptx::mbarrier_arrive(&shared.empty[s]);
  }

 private:
  // A block outside the pool is read as block 0 and the result discarded.
  DEVICE u64 readable(u32 block) const { return block < pools.num_blocks ? block : 0u; }

  // A piece's token within its block.
  template <class Image>
  static DEVICE u32 token_in_block(const Order& order, int tile, int piece) {
    const int token = tile * TILE_TOKENS + Image::piece_token(piece);
    return order.run_start(token / Layout::RUN) % Spec::BLOCK_SIZE + token % Layout::RUN;
  }

  DEVICE void fill_by_bulk_copies(int s, const Order& order) const {
    using Copy = StageCopy<Spec>;
    using K = typename Layout::KeyImage;
    const int live_tiles = order.live_tiles();
    UNROLL for (int first = 0; first < Copy::COPIES; first += WARP_SIZE) {
      const Copy copy = {first + lane()};
      const int tile = smaller(copy.tile(), Layout::TILES - 1);
      const u32 block =
          order.block_of((tile * TILE_TOKENS + K::piece_token(copy.piece())) / Layout::RUN);
      if (copy.tile() >= live_tiles) continue;
      LaneCopy lane = ahead;
      if constexpr (!AHEAD) lane = lane_copy(copy);
      const u64 token = token_in_block<K>(order, tile, copy.piece()) * copy.token_stride(pools);
      ptx::bulk_copy_evict_first(stage(s) + copy.stage_offset(),
                                 lane.source + readable(block) * lane.block_stride + token, copy.bytes(),
                                 &shared.full[s]);
    }
  }

  DEVICE LaneCopy lane_copy(StageCopy<Spec> copy) const {
    const bool is_value = copy.is_value();
    const int head = first_head + Layout::KeyImage::piece_head(copy.piece());
    return {(is_value ? pools.v : pools.k) + copy.head_offset(pools, head),
            is_value ? pools.v_geometry.block_stride : pools.k_geometry.block_stride};
  }

  // One image of every tile, its values or its scales; the lanes share each piece.
  template <class Image, class Format, bool SCALES>
  DEVICE void fill_by_lanes(u8* images, const u8* pool, const PoolGeometry& geometry, const Order& order) const {
    constexpr int PIECE_BYTES = SCALES ? Image::PIECE_SCALE_BYTES : Image::PIECE_BYTES;
    constexpr int ROW_BYTES = PIECE_BYTES / (Image::PIECE_TOKENS * Image::PIECE_HEADS);
    constexpr int CHUNK = smaller(16, power_of_two_divisor(PIECE_BYTES));
    constexpr int PIECE_CHUNKS = PIECE_BYTES / CHUNK;
    constexpr int TILE_CHUNKS = Image::PIECES * PIECE_CHUNKS;
    const int live_chunks = order.live_tiles() * TILE_CHUNKS;
    for (int first = 0; first < live_chunks; first += WARP_SIZE) {
      const int chunk = smaller(first + lane(), live_chunks - 1);
      const int tile = chunk / TILE_CHUNKS, piece = chunk % TILE_CHUNKS / PIECE_CHUNKS;
      const u32 block = order.block_of((tile * TILE_TOKENS + Image::piece_token(piece)) / Layout::RUN);
      const int within = chunk % PIECE_CHUNKS * CHUNK;
      const u32 token = token_in_block<Image>(order, tile, piece);
      const int head = first_head + Image::piece_head(piece);
      const u8* source = pool + readable(block) * geometry.block_stride + within +
                         (SCALES ? scale_offset(geometry, token, head) : data_offset(geometry, token, head));
      u8* target = images + tile * Layout::TILE_BYTES + (SCALES ? Image::SCALES : 0) +
                   Image::piece_row(piece) * ROW_BYTES + within;
      if (first + lane() < live_chunks) copy_chunk<CHUNK>(target, source);
    }
  }

  template <int BYTES>
  static DEVICE void copy_chunk(u8* target, const u8* source) {
    if constexpr (BYTES == 16) {
      ptx::cp_async_16(target, source);
    } else if constexpr (BYTES >= 4) {
      ptx::cp_async_small<BYTES>(target, source);
    } else {
      UNROLL for (int i = 0; i < BYTES; i++) target[i] = source[i];
    }
  }
};
