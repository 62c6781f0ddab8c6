// Which tokens of a sequence are attended.
#pragma once
#include "attention/fragments.cuh"

// False where a length is negative or needs table columns that do not exist.
DEVICE bool length_fits(i32 seq_len, u32 max_blocks_per_seq, u32 block_size) {
  return seq_len >= 0 && static_cast<u64>(seq_len) <= static_cast<u64>(max_blocks_per_seq) * block_size;
}

// Part `index` of `parts` of a range: contiguous, cut between tiles.
DEVICE TokenRange split_range(TokenRange whole, u32 index, u32 parts) {
  const u32 first = whole.begin / TILE_TOKENS;
  const u64 tiles = (whole.end + TILE_TOKENS - 1) / TILE_TOKENS - first;
  const u32 from = first + static_cast<u32>(tiles * index / parts);
  const u32 to = first + static_cast<u32>(tiles * (index + 1u) / parts);
  return {max(whole.begin, from * TILE_TOKENS), min(whole.end, to * TILE_TOKENS)};
}

struct Lengths {
  const i32* seq_lens;
  u32 num_seqs;
  u32 window;  // newest tokens attended; 0: all
  u32 max_blocks_per_seq;
  u32 block_size;
  u32 newer;  // query tokens after the first, each of which sees one token more than the one before

  // Attended by a query token that has `after` newer ones.
  DEVICE TokenRange range_before(u32 seq_len, u32 after) const {
    const u32 end = seq_len > after ? seq_len - after : 0u;
    return {window != 0u && end > window ? end - window : 0u, end};
  }
  // The length, or 0 where it does not fit.
  DEVICE u32 usable(i32 length) const {
    return length_fits(length, max_blocks_per_seq, block_size) ? static_cast<u32>(length) : 0u;
  }
  // Attended by any query token.
  DEVICE TokenRange range_of(u32 length) const { return {range_before(length, newer).begin, length}; }
  // Attended by all of them.
  DEVICE TokenRange whole_of(u32 length) const {
    return {range_before(length, 0).begin, range_before(length, newer).end};
  }
  DEVICE u32 length(u32 seq) const { return usable(seq_lens[seq]); }
  DEVICE bool fits(u32 seq) const { return length_fits(seq_lens[seq], max_blocks_per_seq, block_size); }
};
