// Who works on what, decided on the device from seq_lens alone, so that a captured graph serves any
// lengths.
//
// The tiles of 16 tokens of all sequences, one sequence after another, are dealt out to the blocks in
// equal contiguous shares. A block thus meets whole sequences, and at most two that it shares with
// others: the one it begins with and the one it ends with. Within its share a block takes as many tiles
// of one sequence at a time as a stage holds.
//
// Beginning a sequence takes a block some time, worth `sequence_cost` tiles. So that shares take equally
// long, each sequence is counted with that many tiles more: it owns positions [start, start + cost +
// tiles), and its first tile stands at start + cost. A share that begins among the first `cost`
// positions begins with the first tile; one that ends there has nothing of the sequence.
#pragma once
#include "attention/fragments.cuh"
#include "attention/lengths.cuh"

DEVICE u32 tiles_of(TokenRange range) {
  if (range.empty()) return 0;
  return (range.end + TILE_TOKENS - 1) / TILE_TOKENS - range.begin / TILE_TOKENS;
}

// Sum over this lane and those below.
DEVICE u32 scan_warp(u32 sum) {
  UNROLL for (u32 distance = 1; distance < WARP_SIZE; distance *= 2) {
    const u32 left = __shfl_up_sync(FULL_WARP, sum, distance);
    if (threadIdx.x % WARP_SIZE >= distance) sum += left;
  }
  return sum;
}

// Positions of a sequence. One without tiles has none.
DEVICE u32 positions_of(const Lengths& lengths, u32 length, u32 sequence_cost) {
  const u32 tiles = tiles_of(lengths.range_of(length));
  return tiles == 0u ? 0u : tiles + sequence_cost;
}

// starts[i] = position where sequence i begins, for i = 0 .. num_seqs, and a copy of the lengths (0 for those
// that do not fit); by one warp.
DEVICE void scan_sequences(const Lengths& lengths, u32 sequence_cost, u32* starts, u32* copies) {
  const u32 lane = threadIdx.x % WARP_SIZE;
  u32 before = 0;
#pragma unroll 1
  for (u32 first = 0; first < lengths.num_seqs; first += WARP_SIZE) {
    const u32 seq = first + lane;
    u32 sum = 0;
    if (seq < lengths.num_seqs) {
      const u32 length = lengths.length(seq);
      copies[seq] = length;
      sum = positions_of(lengths, length, sequence_cost);
    }
    sum = scan_warp(sum);
    if (seq < lengths.num_seqs) starts[seq + 1] = before + sum;
    before += __shfl_sync(FULL_WARP, sum, WARP_SIZE - 1);
  }
  if (lane == 0) starts[0] = 0;
}

// The same into global memory, for more sequences than a block's shared memory holds: by one block of
// 32 * WARPS threads, each warp a contiguous part.
template <int WARPS>
DEVICE void scan_many_sequences(const Lengths& lengths, u32 sequence_cost, u32* starts, u32* copies) {
  __shared__ u32 sums[WARPS];
  const u32 lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE;
  const u32 part = (lengths.num_seqs + WARPS - 1) / WARPS;
  const u32 begin = min(lengths.num_seqs, warp * part), end = min(lengths.num_seqs, begin + part);
  u32 sum = 0;
  for (u32 seq = begin + lane; seq < end; seq += WARP_SIZE)
    sum += positions_of(lengths, lengths.length(seq), sequence_cost);
  sum = __shfl_sync(FULL_WARP, scan_warp(sum), WARP_SIZE - 1);
  if (lane == 0) sums[warp] = sum;
  __syncthreads();
  u32 before = 0;
  for (u32 other = 0; other < warp; other++) before += sums[other];
  if (threadIdx.x == 0) starts[0] = 0;
  for (u32 first = begin; first < end; first += WARP_SIZE) {
    const u32 seq = first + lane;
    u32 own = 0;
    if (seq < end) {
      copies[seq] = lengths.length(seq);
      own = positions_of(lengths, copies[seq], sequence_cost);
    }
    own = scan_warp(own);
    if (seq < end) starts[seq + 1] = before + own;
    before += __shfl_sync(FULL_WARP, own, WARP_SIZE - 1);
  }
}

// Equal shares: block i owns positions [begin(i), begin(i + 1)), begin(i) = floor(i * total / blocks).
struct Shares {
  u32 total;   // positions
  u32 blocks;  // that have any
  u32 quotient, remainder;

  static DEVICE Shares among(u32 total, u32 grid) {
    const u32 blocks = min(total, grid), divisor = max(blocks, 1u);
    return {total, blocks, total / divisor, total % divisor};
  }
  // In 32 bits: a grid has at most 2^16 blocks.
  DEVICE u32 begin(u32 block) const { return block * quotient + block * remainder / blocks; }
  // [begin(block), begin(block + 1)), by one division.
  DEVICE TokenRange positions(u32 block) const {
    const u32 product = block * remainder, extra = product / blocks;
    const u32 first = block * quotient + extra;
    return {first, first + quotient + (product - extra * blocks + remainder >= blocks)};
  }
  DEVICE u32 block_of(u32 position) const {
    if (position < 0xffffffffu / blocks) return ((position + 1u) * blocks - 1u) / total;
    return static_cast<u32>((static_cast<u64>(position + 1u) * blocks - 1u) / total);
  }
};

// The sequence that owns a position.
DEVICE u32 sequence_at(const u32* starts, u32 num_seqs, u32 position) {
  u32 low = 0, high = num_seqs;
  while (high - low > 1) {
    const u32 middle = (low + high) / 2;
    if (starts[middle] <= position) {
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

  // Of the sequence that begins at `start` and ends before `end`.
  static DEVICE Sharers of(const Shares& shares, u32 start, u32 end, u32 sequence_cost) {
    const u32 first = shares.block_of(start + sequence_cost), last = shares.block_of(end - 1);
    return {first, last - first + 1, slot(first, start > shares.begin(first))};
  }
  DEVICE u32 slot_of(u32 index) const { return index == 0 ? first_slot : 2 * (first + index); }
};
