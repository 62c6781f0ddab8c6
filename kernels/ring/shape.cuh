// Which warp of which block works on what.
//
// A block has BLOCK_HEADS KV heads, and of each BLOCK_HEAD_TILES tiles of 8 query rows: a warp for every
// WARP_ROW_TILES of them, times TOKEN_WARPS. Where that is not everything, grid rows (blockIdx.y) are
// slices: each has other heads or rows and its own blocks. Rows of a KV head are its query heads, query
// token after query token.
#pragma once
#include "attention/fragments.cuh"
#include "ring/spec.cuh"

template <class Spec>
struct RingShape {
  static constexpr int HEAD_TILES = divide_up(Spec::HEAD_ROWS, TILE_HEADS);
  static constexpr int HEAD_SLICES = divide_up(HEAD_TILES, Spec::BLOCK_HEAD_TILES);  // of a KV head
  static constexpr int SLICES = Spec::NUM_KV_HEADS / Spec::BLOCK_HEADS * HEAD_SLICES;
  static constexpr int HEAD_WARPS = Spec::BLOCK_HEAD_TILES / Spec::WARP_ROW_TILES;
  static constexpr int WARP_ROWS = TILE_HEADS * Spec::WARP_ROW_TILES;  // at most
  static constexpr int GROUPS = Spec::BLOCK_HEADS * HEAD_WARPS;
  static constexpr int WARPS = GROUPS * Spec::TOKEN_WARPS;
  static constexpr int THREADS = 32 * WARPS;
  static_assert(Spec::BLOCK_HEAD_TILES % Spec::WARP_ROW_TILES == 0, "whole warps");
  static_assert(Spec::NUM_KV_HEADS % Spec::BLOCK_HEADS == 0, "slices of as many heads");
  static_assert(HEAD_SLICES == 1 || Spec::BLOCK_HEADS == 1, "slices of heads, or of one head's rows");

  // Rows of a KV head that one slice has, and of all its KV heads together.
  static constexpr int SLICE_HEAD_ROWS = smaller(Spec::HEAD_ROWS, TILE_HEADS* Spec::BLOCK_HEAD_TILES);
  static constexpr int SLICE_ROWS = Spec::BLOCK_HEADS * SLICE_HEAD_ROWS;

  static DEVICE int warp() { return static_cast<int>(threadIdx.x / WARP_SIZE); }
  static DEVICE int merge_group() { return warp() % GROUPS; }
  static DEVICE int token_warp() { return warp() / GROUPS; }
  static DEVICE int slice() { return SLICES == 1 ? 0 : static_cast<int>(blockIdx.y); }
  // The slice's first KV head and first of its rows.
  static DEVICE int slice_head() { return slice() / HEAD_SLICES * Spec::BLOCK_HEADS; }
  static DEVICE int slice_row() { return slice() % HEAD_SLICES * (TILE_HEADS * Spec::BLOCK_HEAD_TILES); }

  static DEVICE int local_head() { return merge_group() / HEAD_WARPS; }
  static DEVICE int kv_head() { return slice_head() + local_head(); }
  static DEVICE int head_warp() { return merge_group() % HEAD_WARPS; }

  // This warp's rows that exist.
  static DEVICE int rows() {
    return smaller(WARP_ROWS, Spec::HEAD_ROWS - slice_row() - WARP_ROWS * head_warp());
  }
  // The query row of column `column` of this warp, and its place among the slice's rows.
  static DEVICE int head_row(int column) { return slice_row() + WARP_ROWS * head_warp() + column; }
  static DEVICE int slice_index(int column) {
    return local_head() * SLICE_HEAD_ROWS + WARP_ROWS * head_warp() + column;
  }
};

// A query row: a query token and a query head.
template <class Spec>
struct QueryRowIndex {
  int kv_head;
  int token;
  int head;

  static DEVICE QueryRowIndex of(int kv_head, int head_row) {
    if constexpr (Spec::QUERY_TOKENS == 1) return {kv_head, 0, kv_head * Spec::GQA_RATIO + head_row};
    return {kv_head, head_row / Spec::GQA_RATIO, kv_head * Spec::GQA_RATIO + head_row % Spec::GQA_RATIO};
  }
  // Row `index` of the slice's.
  static DEVICE QueryRowIndex of_slice(int index) {
    using Shape = RingShape<Spec>;
    return of(Shape::slice_head() + index / Shape::SLICE_HEAD_ROWS,
              Shape::slice_row() + index % Shape::SLICE_HEAD_ROWS);
  }
  // Whether it exists: the last slice of a KV head may be short.
  static DEVICE bool in_slice(int index) {
    using Shape = RingShape<Spec>;
    return Shape::HEAD_SLICES == 1 ||
           Shape::slice_row() + index % Shape::SLICE_HEAD_ROWS < Spec::HEAD_ROWS;
  }
  // Among the rows of all sequences, [num_seqs, query_tokens, num_q_heads].
  DEVICE u64 flat(u32 seq) const {
    return (static_cast<u64>(seq) * Spec::QUERY_TOKENS + token) * Spec::NUM_Q_HEADS + head;
  }
};
