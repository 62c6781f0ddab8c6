// Work dealt out by the plan: a contiguous share of the positions of all sequences.
#pragma once
#include "ring/pipeline.cuh"
#include "ring/plan.cuh"

template <class Spec>
struct PlannedWork {
  static constexpr u32 COST = Spec::SEQUENCE_COST;
  static constexpr u32 STAGE_TILES = Spec::STAGE_TILES;

  Lengths lengths;
  const u32* starts;     // [num_seqs + 1]
  const u32* length_of;  // [num_seqs], 0 where a length does not fit
  u32 begin, end;        // this block's share, in the plan's positions

  DEVICE u32 length(u32 seq) const { return length_of[seq]; }

  struct Cursor {
    u32 seq;
    u32 at;   // position of the next tile
    u32 end;  // of this sequence's part of the share

    static DEVICE Cursor first(const PlannedWork& work) {
      Cursor cursor = {sequence_at(work.starts, work.lengths.num_seqs, work.begin), work.begin, 0};
      cursor.enter_sequence(work);
      return cursor;
    }
    // From any position to the tile there, or the next that there is in the share.
    DEVICE void enter_sequence(const PlannedWork& work) {
      if (at >= work.end) return;
      while (at >= work.starts[seq + 1]) seq++;
      at = max(at, work.starts[seq] + COST);
      end = min(work.end, work.starts[seq + 1]);
    }
    DEVICE bool done(const PlannedWork& work) const { return at >= work.end; }
    DEVICE bool at_end() const { return false; }  // a sequence without tiles has no positions
    DEVICE bool begins_sequence(const PlannedWork& work) const { return at == work.starts[seq] + COST; }

    DEVICE void next_piece(const PlannedWork& work) {
      at = end;
      enter_sequence(work);
    }
    DEVICE void skip_stages(const PlannedWork& work, u32 stages) {
      const u32 ahead = at + stages * STAGE_TILES;
      if (ahead < end) {
        at = ahead;
        return;
      }
      for (; stages > 0 && !done(work); stages--) {
        at += STAGE_TILES;
        if (at >= end) next_piece(work);
      }
    }

    DEVICE Unit unit(const PlannedWork& work) const {
      const u32 length = work.length(seq);
      TokenRange range = work.lengths.range_of(length);
      // From positions to tiles of the sequence; may wrap: it is a difference.
      const u32 shift = range.begin / TILE_TOKENS - (work.starts[seq] + COST);
      range.end = min(range.end, (shift + end) * TILE_TOKENS);
      TokenRange whole = range;
      if constexpr (Spec::CAUSAL) {
        const TokenRange common = work.lengths.whole_of(length);
        whole = {max(common.begin, range.begin), min(common.end, range.end)};
      }
      return {seq, (shift + at) * TILE_TOKENS, range, whole};
    }
  };
};
