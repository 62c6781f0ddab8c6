// Which tokens of a sequence are attended.
#pragma once
#include "attention/fragments.cuh"

// Attended tokens of a sequence: the newest `window`, or all where window is 0.
DEVICE TokenRange attended_range(u32 seq_len, u32 window) {
  return {window != 0u && seq_len > window ? seq_len - window : 0u, seq_len};
}

// False where a length is negative or needs table columns that do not exist.
DEVICE bool length_fits(i32 seq_len, u32 max_blocks_per_seq, u32 block_size) {
  return seq_len >= 0 && static_cast<u64>(seq_len) <= static_cast<u64>(max_blocks_per_seq) * block_size;
}

struct Lengths {
  const i32* seq_lens;
  u32 num_seqs;
  u32 window;
  u32 max_blocks_per_seq;
  u32 block_size;

  // Attended tokens of a length; none where it does not fit.
  DEVICE TokenRange range_of(i32 length) const {
    return length_fits(length, max_blocks_per_seq, block_size)
               ? attended_range(static_cast<u32>(length), window)
               : TokenRange{0, 0};
  }
  DEVICE TokenRange range(u32 seq) const { return range_of(seq_lens[seq]); }
  DEVICE bool fits(u32 seq) const { return length_fits(seq_lens[seq], max_blocks_per_seq, block_size); }
};
