// Who works on what, decided on the device from seq_lens alone, so that a captured graph serves any lengths.
//
// The tiles of 16 tokens of all sequences, one sequence after another, are dealt out to the blocks in equal
// contiguous shares. A block thus meets whole sequences, and at most two that it shares with others: the one
// it begins with and the one it ends with. Within its share a block takes as many tiles of one sequence at a
// time as a stage holds.
#pragma once
#include "attention/fragments.cuh"
#include "attention/lengths.cuh"

DEVICE u32 tiles_of(TokenRange range) {
  if (range.empty()) return 0;
  return (range.end + TILE_TOKENS - 1) / TILE_TOKENS - range.begin / TILE_TOKENS;
}

// tile_start[i] = tiles of sequences before i, for i = 0 .. num_seqs, and a copy of seq_lens; by one warp.
DEVICE void scan_tiles(const Lengths& lengths, u32* tile_start, i32* seq_lens) {
  const u32 lane = threadIdx.x % WARP_SIZE;
  u32 before = 0;
  for (u32 first = 0; first < lengths.num_seqs; first += WARP_SIZE) {
    const u32 seq = first + lane;
    u32 sum = 0;
    if (seq < lengths.num_seqs) {
      const i32 length = lengths.seq_lens[seq];
      seq_lens[seq] = length;
      sum = tiles_of(lengths.range_of(length));
    }
    UNROLL for (u32 distance = 1; distance < WARP_SIZE; distance *= 2) {
      const u32 left = __shfl_up_sync(FULL_WARP, sum, distance);
      if (lane >= distance) sum += left;
    }
    if (seq < lengths.num_seqs) tile_start[seq + 1] = before + sum;
    before += __shfl_sync(FULL_WARP, sum, WARP_SIZE - 1);
  }
  if (lane == 0) tile_start[0] = 0;
}

// Equal shares: block i owns tiles [first_tile(i), first_tile(i + 1)).
struct Shares {
  u32 total;   // tiles
  u32 blocks;  // that have any

  static DEVICE Shares among(u32 total, u32 grid) { return {total, min(total, grid)}; }
  DEVICE u32 first_tile(u32 block) const {
    return static_cast<u32>(static_cast<u64>(block) * total / blocks);
  }
  DEVICE u32 block_of(u32 tile) const {
    return static_cast<u32>((static_cast<u64>(tile + 1u) * blocks - 1u) / total);
  }
};

// The sequence that owns a tile.
DEVICE u32 sequence_of_tile(const u32* tile_start, u32 num_seqs, u32 tile) {
  u32 low = 0, high = num_seqs;
  while (high - low > 1) {
    const u32 middle = (low + high) / 2;
    if (tile_start[middle] <= tile) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

// The blocks that share a sequence, and where each left its part.
struct Sharers {
  u32 first;  // block
  u32 count;
  u32 first_slot;

  // Each block has two slots for parts: 0 for the sequence that its share begins with, 1 for one that
  // begins inside its share.
  static DEVICE u32 slot(u32 block, bool begins_inside) { return 2 * block + begins_inside; }

  static DEVICE Sharers of(const Shares& shares, u32 first_tile, u32 end_tile) {
    const u32 first = shares.block_of(first_tile), last = shares.block_of(end_tile - 1);
    return {first, last - first + 1, slot(first, first_tile > shares.first_tile(first))};
  }
  DEVICE u32 slot_of(u32 index) const { return index == 0 ? first_slot : 2 * (first + index); }
};
