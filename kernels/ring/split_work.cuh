// Work dealt out by splits: every sequence is cut into num_splits pieces, and block b takes pieces b,
// b + gridDim.x, ... A piece depends on its own sequence only, so its result is the same bits in any
// batch.
#pragma once
#include "ring/pipeline.cuh"

// Part `index` of those that are `size` tiles long, counted from the sequence's first tile. May be
// empty.
DEVICE TokenRange chunk_range(TokenRange whole, u32 index, u32 size) {
  const u64 from = static_cast<u64>(index) * size * TILE_TOKENS, to = from + size * TILE_TOKENS;
  if (from >= whole.end) return {whole.end, whole.end};
  return {max(whole.begin, static_cast<u32>(from)), to < whole.end ? static_cast<u32>(to) : whole.end};
}

template <class Spec>
struct SplitWork {
  static constexpr u32 STAGE_TOKENS = Spec::STAGE_TILES * TILE_TOKENS;

  Lengths lengths;
  u32 num_splits;
  u32 split_tiles;  // tiles a split, or 0: equal splits

  DEVICE u64 pieces() const { return static_cast<u64>(lengths.num_seqs) * num_splits; }
  DEVICE u32 length(u32 seq) const { return lengths.length(seq); }

  struct Cursor {
    u64 piece;
    u32 seq, split;
    u32 at;  // position of the next tile
    TokenRange range;

    static DEVICE Cursor first(const SplitWork& work) {
      Cursor cursor = {};
      cursor.enter(work, blockIdx.x);
      return cursor;
    }
    DEVICE void enter(const SplitWork& work, u64 number) {
      piece = number;
      if (done(work)) return;
      seq = static_cast<u32>(piece / work.num_splits);
      split = static_cast<u32>(piece % work.num_splits);
      const TokenRange all = work.lengths.range_of(work.length(seq));
      range = work.split_tiles == 0 ? split_range(all, split, work.num_splits)
                                    : chunk_range(all, split, work.split_tiles);
      at = range.begin / TILE_TOKENS * TILE_TOKENS;
    }
    DEVICE bool done(const SplitWork& work) const { return piece >= work.pieces(); }
    DEVICE bool at_end() const { return range.empty() || at >= range.end; }
    DEVICE bool begins_sequence(const SplitWork& work) const {
      return !range.empty() && range.begin == work.lengths.range_of(work.length(seq)).begin;
    }

    // Also to pieces without tokens.
    DEVICE void next_piece(const SplitWork& work) { enter(work, piece + gridDim.x); }

    DEVICE void skip_stages(const SplitWork& work, u32 stages) {
      skip_empty(work);
      for (; stages > 0 && !done(work); stages--) {
        at += STAGE_TOKENS;
        skip_empty(work);
      }
    }
    DEVICE void skip_empty(const SplitWork& work) {
      while (!done(work) && at_end()) next_piece(work);
    }

    DEVICE Unit unit(const SplitWork& work) const {
      TokenRange whole = range;
      if constexpr (Spec::CAUSAL) {
        const TokenRange common = work.lengths.whole_of(work.length(seq));
        whole = {max(common.begin, range.begin), min(common.end, range.end)};
      }
      return {seq, at, range, whole};
    }
  };
};
