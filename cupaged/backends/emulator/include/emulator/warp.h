// Barriers, shuffles and votes.
#pragma once
#include "bits.h"

inline void __syncthreads() {
  cupaged_emulator::block_barrier(cupaged_emulator::BarrierVote::none, false);
}
inline int __syncthreads_or(int predicate) {
  return cupaged_emulator::block_barrier(cupaged_emulator::BarrierVote::any, predicate != 0);
}
inline int __syncthreads_and(int predicate) {
  return cupaged_emulator::block_barrier(cupaged_emulator::BarrierVote::all, predicate != 0);
}
inline int __syncthreads_count(int predicate) {
  return cupaged_emulator::block_barrier(cupaged_emulator::BarrierVote::count, predicate != 0);
}
inline void __syncwarp(unsigned int mask = 0xffffffffu) { cupaged_emulator::warp_sync(mask); }

inline unsigned int __ballot_sync(unsigned int mask, int predicate) {
  return cupaged_emulator::warp_vote(cupaged_emulator::Vote::ballot, mask, predicate != 0);
}
inline int __any_sync(unsigned int mask, int predicate) {
  return static_cast<int>(
      cupaged_emulator::warp_vote(cupaged_emulator::Vote::any, mask, predicate != 0));
}
inline int __all_sync(unsigned int mask, int predicate) {
  return static_cast<int>(
      cupaged_emulator::warp_vote(cupaged_emulator::Vote::all, mask, predicate != 0));
}
inline unsigned int __activemask() { return cupaged_emulator::active_lanes(); }

namespace cupaged_emulator {

template <class T>
inline T shuffle(Shuffle kind, unsigned int mask, T value, unsigned int source) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8, "shuffles move 4 or 8 bytes");
  uint64_t bits = 0;
  __builtin_memcpy(&bits, &value, sizeof(T));
  bits = warp_shuffle(kind, mask, bits, source);
  __builtin_memcpy(&value, &bits, sizeof(T));
  return value;
}

// A warp falls into segments of `width` lanes (a power of two); sources outside the caller's own
// segment become the caller itself.
inline unsigned int segment_start(unsigned int width) { return lane_of_thread() & ~(width - 1u); }

}  // namespace cupaged_emulator

template <class T>
inline T __shfl_sync(unsigned int mask, T value, int source, int width = 32) {
  using namespace cupaged_emulator;
  const unsigned int size = static_cast<unsigned int>(width);
  const unsigned int lane = segment_start(size) | (static_cast<unsigned int>(source) & (size - 1u));
  return shuffle(Shuffle::indexed, mask, value, lane);
}

template <class T>
inline T __shfl_up_sync(unsigned int mask, T value, unsigned int delta, int width = 32) {
  using namespace cupaged_emulator;
  const unsigned int lane = lane_of_thread();
  const unsigned int room = lane - segment_start(static_cast<unsigned int>(width));
  return shuffle(Shuffle::up, mask, value, delta <= room ? lane - delta : lane);
}

template <class T>
inline T __shfl_down_sync(unsigned int mask, T value, unsigned int delta, int width = 32) {
  using namespace cupaged_emulator;
  const unsigned int lane = lane_of_thread(), size = static_cast<unsigned int>(width);
  const unsigned int room = segment_start(size) + size - 1u - lane;
  return shuffle(Shuffle::down, mask, value, delta <= room ? lane + delta : lane);
}

// Lanes of a lower segment may be read, as on the device; those of a higher one may not.
template <class T>
inline T __shfl_xor_sync(unsigned int mask, T value, int lane_mask, int width = 32) {
  using namespace cupaged_emulator;
  const unsigned int lane = lane_of_thread(), size = static_cast<unsigned int>(width);
  const unsigned int source = lane ^ static_cast<unsigned int>(lane_mask);
  return shuffle(Shuffle::exchange, mask, value, source < segment_start(size) + size ? source : lane);
}

inline void __nanosleep(unsigned int) { cupaged_emulator::yield("__nanosleep", nullptr, false); }
inline long long clock64() { return static_cast<long long>(cupaged_emulator::clock_ticks()); }
inline int clock() { return static_cast<int>(cupaged_emulator::clock_ticks()); }
[[noreturn]] inline void __trap() { cupaged_emulator::trap("__trap"); }
