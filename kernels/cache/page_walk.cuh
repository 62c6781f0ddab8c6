// From a token's position in its sequence to its cached rows, through the block table.
#pragma once
#include "attention/fragments.cuh"
#include "cache/geometry.cuh"

// One sequence's view of the pools. BLOCK_SIZE: tokens a block.
template <int BLOCK_SIZE>
struct PageWalk {
  const u8* k_pool;
  const u8* v_pool;
  const i32* table;  // this sequence's row
  u32 num_blocks;    // ids from here on (negative ones too, read as unsigned) are outside the pool
  u32 head;          // KV head
  PoolGeometry geometry;

  struct Block {
    u64 offset;  // bytes from a pool's start
    bool valid;
  };

  // A block outside the pool reads as block 0, whose data the caller must not use.
  DEVICE Block block_of(u32 position) const {
    const u32 id = static_cast<u32>(table[position / BLOCK_SIZE]);
    const bool valid = id < num_blocks;
    return {(valid ? id : 0u) * geometry.block_stride, valid};
  }

  DEVICE CacheRow row(const u8* pool, Block block, u32 position) const {
    const u32 token = position % BLOCK_SIZE;
    const u8* start = pool + block.offset;
    return {start + data_offset(geometry, token, head), start + scale_offset(geometry, token, head)};
  }
};

// The tile of 16 tokens that starts at `start` (a multiple of 16), read straight from the pools. Tokens
// outside the range are never looked up: the table may hold anything there; their rows stand in as some
// live token's.
template <int BLOCK_SIZE>
struct PooledTile {
  const PageWalk<BLOCK_SIZE>& walk;
  Lane lane;
  u32 start;
  TokenRange range;

  // Whether the whole tile lies in one block, dead tokens included.
  static constexpr bool ONE_BLOCK = BLOCK_SIZE % TILE_TOKENS == 0;

  DEVICE u32 position(int) const { return start; }

  DEVICE u32 readable(u32 position) const {
    return ONE_BLOCK ? position : max(range.begin, min(position, range.end - 1));
  }

  DEVICE KeyRows keys(int) const {
    KeyRows rows;
    UNROLL for (int i = 0; i < 2; i++) {
      const u32 position = readable(start + lane.key_token() + 8 * i);
      const auto block = walk.block_of(ONE_BLOCK ? start : position);
      rows.row[i] = walk.row(walk.k_pool, block, position);
      rows.valid[i] = block.valid;
    }
    return rows;
  }

  DEVICE ValueRows values(int) const {
    ValueRows rows;
    UNROLL for (int j = 0; j < 4; j++) {
      const u32 position = readable(start + lane.value_token(j));
      const auto block = walk.block_of(ONE_BLOCK ? start : position);
      rows.row[j] = walk.row(walk.v_pool, block, position);
    }
    return rows;
  }
};
