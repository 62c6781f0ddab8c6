// The ring of shared-memory stages that decode streams a cache through.
//
// A stage holds STAGE_TILES tiles of 16 tokens of one sequence, all KV heads: for each tile an image of
// K, then one of V, each as it lies in the pool (rows [16, NUM_KV_HEADS, row], then the scale rows of
// formats that have them). Bulk copies fetch it: one a run of tokens that are contiguous in a block, one
// more for the run's scales where these lie apart. Destinations are 128-byte aligned; misaligned ones
// are 15 to 19 % slower, which no padding against bank conflicts wins back.
#pragma once
#include "attention/fragments.cuh"
#include "cache/geometry.cuh"

DEVICE constexpr int greatest_common_divisor(int a, int b) {
  return b == 0 ? a : greatest_common_divisor(b, a % b);
}
DEVICE constexpr int round_up(int value, int multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// JOINED: a block is exactly one tile with its scales right behind, so that both come in one copy.
template <class Format, int NUM_KV_HEADS, int BLOCK_SIZE, int TILES, bool JOINED>
struct StageLayout {
  static constexpr int STAGE_TILES = TILES;
  static constexpr int STAGE_TOKENS = TILES * TILE_TOKENS;
  static constexpr int TOKEN_BYTES = NUM_KV_HEADS * Format::ROW_BYTES;
  static constexpr int TOKEN_SCALE_BYTES = NUM_KV_HEADS * Format::SCALE_BYTES;
  static constexpr int SCALES = TILE_TOKENS * TOKEN_BYTES;  // where an image's scales begin
  static constexpr int IMAGE_BYTES = round_up(TILE_TOKENS * (TOKEN_BYTES + TOKEN_SCALE_BYTES), 128);
  static constexpr int STAGE_BYTES = TILES * 2 * IMAGE_BYTES;

  static constexpr int RUN = greatest_common_divisor(BLOCK_SIZE, TILE_TOKENS);  // tokens a copy
  static constexpr int RUNS = TILE_TOKENS / RUN;
  static constexpr bool SCALES_APART = Format::SCALE_BYTES > 0 && !JOINED;
  static constexpr int SECTIONS = SCALES_APART ? 2 : 1;
  static constexpr int COPIES = TILES * 2 * RUNS * SECTIONS;
  static constexpr int ROUNDS = (COPIES + 31) / 32;  // copies a lane issues for a stage
  static constexpr int DATA_COPY_BYTES = RUN * (TOKEN_BYTES + (JOINED ? TOKEN_SCALE_BYTES : 0));
  static constexpr int SCALE_COPY_BYTES = RUN * TOKEN_SCALE_BYTES;
  static_assert(!JOINED || BLOCK_SIZE == TILE_TOKENS, "a joined block is one tile");
  static_assert(DATA_COPY_BYTES % 16 == 0 && (!SCALES_APART || SCALE_COPY_BYTES % 16 == 0),
                "bulk copies move multiples of 16 bytes");
};

// One copy of a stage: which tokens, of K or V, values or scales.
template <class Layout>
struct StageCopy {
  int index;

  DEVICE bool exists() const { return index < Layout::COPIES; }
  DEVICE bool is_scales() const { return Layout::SCALES_APART && index % Layout::SECTIONS == 1; }
  DEVICE int run() const { return index / Layout::SECTIONS % Layout::RUNS; }
  DEVICE bool is_value() const { return index / (Layout::SECTIONS * Layout::RUNS) % 2 == 1; }
  DEVICE int tile() const { return index / (Layout::SECTIONS * Layout::RUNS * 2); }

  // First token, from the stage's.
  DEVICE int token() const { return tile() * TILE_TOKENS + run() * Layout::RUN; }
  DEVICE u32 bytes() const { return is_scales() ? Layout::SCALE_COPY_BYTES : Layout::DATA_COPY_BYTES; }

  DEVICE int stage_offset() const {
    const int image = (2 * tile() + is_value()) * Layout::IMAGE_BYTES;
    return image + (is_scales() ? Layout::SCALES + run() * Layout::SCALE_COPY_BYTES
                                : run() * Layout::DATA_COPY_BYTES);
  }
  DEVICE u64 block_offset(const PoolGeometry& geometry, u32 token_in_block) const {
    return is_scales() ? scale_offset(geometry, token_in_block, 0)
                       : data_offset(geometry, token_in_block, 0);
  }
};

// The tiles of a stage that one warp works on: every TOKEN_WARPS-th, from its own position on.
template <class Format, class Layout, int TOKEN_WARPS>
struct StagedTiles {
  const u8* stage;
  Lane lane;
  u32 start;  // position of the stage's first token
  int head;   // KV head
  int first_tile;

  DEVICE int tile(int n) const { return n * TOKEN_WARPS + first_tile; }
  DEVICE u32 position(int n) const { return start + TILE_TOKENS * tile(n); }

  DEVICE CacheRow row(int n, int is_value, int token) const {
    const u8* image = stage + (2 * tile(n) + is_value) * Layout::IMAGE_BYTES;
    return {image + token * Layout::TOKEN_BYTES + head * Format::ROW_BYTES,
            image + Layout::SCALES + token * Layout::TOKEN_SCALE_BYTES + head * Format::SCALE_BYTES};
  }
  DEVICE KeyRows keys(int n) const {
    const int token = lane.key_token();
    return {{row(n, 0, token), row(n, 0, token + 8)}, {true, true}};
  }
  DEVICE ValueRows values(int n) const {
    ValueRows rows;
    UNROLL for (int j = 0; j < 4; j++) rows.row[j] = row(n, 1, lane.value_token(j));
    return rows;
  }
};
