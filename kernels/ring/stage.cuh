// The ring of shared-memory stages that decode streams a cache through.
//
// A stage holds STAGE_TILES tiles of 16 tokens of one sequence, for the block's KV heads: for each tile
// an image of K, then one of V, each as it lies in the pool (rows [16, heads, row] or [heads, 16, row],
// then the scale rows of formats that have them). A piece of an image is what is contiguous in the pool:
// it comes by one copy. Images are 128-byte aligned; bulk copies to misaligned ones are 15 to 19 %
// slower, which no padding against bank conflicts wins back.
#pragma once
#include "cache/geometry.cuh"
#include "ring/shape.cuh"

// Tokens of a tile that lie in one block.
template <class Spec>
DEVICE constexpr int run_tokens() {
  return greatest_common_divisor(Spec::BLOCK_SIZE, TILE_TOKENS);
}

// 16 tokens of K, or of V.
template <class Spec, class Format>
struct TileImage {
  static constexpr int HEADS = Spec::BLOCK_HEADS;
  static constexpr bool ALL_HEADS = HEADS == Spec::NUM_KV_HEADS;
  static constexpr int RUN = run_tokens<Spec>();
  // A whole block, all its heads: contiguous in either order.
  static constexpr bool WHOLE_BLOCK = Spec::BLOCK_SIZE == TILE_TOKENS && ALL_HEADS;
  static constexpr int PIECE_TOKENS = Spec::HEADS_FIRST || ALL_HEADS ? RUN : 1;
  static constexpr int PIECE_HEADS = Spec::HEADS_FIRST && !WHOLE_BLOCK ? 1 : HEADS;
  static constexpr int TOKEN_PIECES = TILE_TOKENS / PIECE_TOKENS;
  static constexpr int PIECES = TOKEN_PIECES * (HEADS / PIECE_HEADS);

  static constexpr bool JOINED = Spec::JOINED && Format::SCALE_BYTES > 0;
  static_assert(!JOINED || WHOLE_BLOCK, "a joined block is one tile");
  static constexpr bool SCALES_APART = Format::SCALE_BYTES > 0 && !JOINED;
  static constexpr int ROW_COUNT = TILE_TOKENS * HEADS;
  static constexpr int SCALES = ROW_COUNT * Format::ROW_BYTES;  // where the scales begin
  static constexpr int BYTES = round_up(SCALES + ROW_COUNT * Format::SCALE_BYTES, 128);
  static constexpr int LOADED_BYTES = SCALES + ROW_COUNT * Format::SCALE_BYTES;
  static constexpr int PIECE_BYTES =
      PIECE_TOKENS * PIECE_HEADS * (Format::ROW_BYTES + (JOINED ? Format::SCALE_BYTES : 0));
  static constexpr int PIECE_SCALE_BYTES = PIECE_TOKENS * PIECE_HEADS * Format::SCALE_BYTES;
  static_assert(!Spec::BULK || (PIECE_BYTES % 16 == 0 && (!SCALES_APART || PIECE_SCALE_BYTES % 16 == 0)),
                "bulk copies move multiples of 16 bytes");

  // Rows of the image between tokens, and between heads.
  static constexpr int TOKEN_ROWS = Spec::HEADS_FIRST ? 1 : HEADS;
  static constexpr int HEAD_ROWS = Spec::HEADS_FIRST ? TILE_TOKENS : 1;

  static DEVICE int row_of(int token, int head) { return token * TOKEN_ROWS + head * HEAD_ROWS; }

  // Of a piece: its first token within the tile, and its first head.
  static DEVICE int piece_token(int piece) { return piece % TOKEN_PIECES * PIECE_TOKENS; }
  static DEVICE int piece_head(int piece) { return piece / TOKEN_PIECES * PIECE_HEADS; }
  static DEVICE int piece_row(int piece) { return row_of(piece_token(piece), piece_head(piece)); }
};

// Strides of a pool in bytes; what the order of a block's rows leaves open is passed to the kernel.
template <class Spec, class Format>
DEVICE PoolGeometry pool_geometry(u64 block_stride, u64 scale_section) {
  constexpr u64 TOKEN_ROWS = Spec::HEADS_FIRST ? 1 : Spec::NUM_KV_HEADS;
  constexpr u64 HEAD_ROWS = Spec::HEADS_FIRST ? Spec::BLOCK_SIZE : 1;
  return {block_stride,  TOKEN_ROWS * Format::ROW_BYTES,   HEAD_ROWS * Format::ROW_BYTES,
          scale_section, TOKEN_ROWS * Format::SCALE_BYTES, HEAD_ROWS * Format::SCALE_BYTES};
}

template <class Spec>
struct StageLayout {
  using KeyImage = TileImage<Spec, typename Spec::KeyFormat>;
  using ValueImage = TileImage<Spec, typename Spec::ValueFormat>;
  static constexpr int TILES = Spec::STAGE_TILES;
  static constexpr int TOKENS = TILES * TILE_TOKENS;
  static constexpr int TILE_BYTES = KeyImage::BYTES + ValueImage::BYTES;
  static constexpr int BYTES = TILES * TILE_BYTES;
  static constexpr u32 TILE_LOADED_BYTES = KeyImage::LOADED_BYTES + ValueImage::LOADED_BYTES;

  static constexpr int RUN = run_tokens<Spec>();
  static constexpr int RUNS = TOKENS / RUN;  // of a stage, each in one block

  static DEVICE u8* key_image(u8* stage, int tile) { return stage + tile * TILE_BYTES; }
  static DEVICE u8* value_image(u8* stage, int tile) {
    return stage + tile * TILE_BYTES + KeyImage::BYTES;
  }
};

// The tiles of a stage that one warp works on: every TOKEN_WARPS-th, from its own position on.
template <class Spec>
struct StagedTiles {
  using Layout = StageLayout<Spec>;
  u8* stage;
  Lane lane;
  u32 start;  // position of the stage's first token
  int head;   // among the block's KV heads
  int first_tile;

  DEVICE int tile(int n) const { return n * Spec::TOKEN_WARPS + first_tile; }
  DEVICE u32 position(int n) const { return start + TILE_TOKENS * tile(n); }

  template <class Image, class Format>
  DEVICE CacheRow row(const u8* image, int token) const {
    const int index = Image::row_of(token, head);
    return {image + index * Format::ROW_BYTES, image + Image::SCALES + index * Format::SCALE_BYTES};
  }
  DEVICE KeyRows keys(int n) const {
    const u8* image = Layout::key_image(stage, tile(n));
    const int token = lane.key_token();
    using Image = typename Layout::KeyImage;
    using Format = typename Spec::KeyFormat;
    return {{row<Image, Format>(image, token), row<Image, Format>(image, token + 8)}, {true, true}};
  }
  DEVICE ValueRows values(int n) const {
    const u8* image = Layout::value_image(stage, tile(n));
    ValueRows rows;
    UNROLL for (int j = 0; j < 4; j++)
      rows.row[j] = row<typename Layout::ValueImage, typename Spec::ValueFormat>(image, lane.value_token(j));
    return rows;
  }
};
