// What check mode keeps for threads and blocks.
#pragma once
#include <stddef.h>
#include <stdint.h>

#include <unordered_map>
#include <vector>

#include "shadow.h"

namespace cupaged_emulator {
namespace check {

constexpr unsigned NUM_SCOPES = 2;  // Scope in hooks.h: fences of a block, of the device

struct ThreadState {
  uint32_t owner = 0;        // this thread's warp
  uint32_t first_owner = 0;  // of this block
  uint32_t warps = 0;        // of this block
  uint32_t lane_bit = 0;
  Time time = 0;                          // stamped on accesses
  Time all_threads = 0;                   // of own_block
  const BlockClock* own_block = nullptr;  // the part of `known` about this block
  ClockRef known;
  // What relaxed stores publish: all that was known at the last fence of each scope.
  ClockRef fenced[NUM_SCOPES];
  // What relaxed loads saw and the next fence of each scope makes known.
  ClockRef seen[NUM_SCOPES];
  // Time of the last cp.async of each committed group that was not waited for.
  std::vector<Time> copy_groups;
  Time last_copy = 0;
  // In the kernel: the last call into the emulator.
  const void* site = nullptr;
};

struct MbarrierState {
  uint64_t* barrier;
  ClockRef arrived;    // in this phase
  ClockRef completed;  // up to the last phase
};

// What atomics released at one address.
struct Location {
  ClockRef released;
  // By threads of one block, also at the scope of the block.
  ClockRef released_to_block;
  uint32_t block = 0;
};
using Locations = std::unordered_map<uintptr_t, Location>;

struct BlockState {
  uint32_t number = 0;  // in the grid
  Space shared;
  Granule* static_granules = nullptr;
  Granule* dynamic_granules = nullptr;
  std::vector<MbarrierState> mbarriers;
  Locations locations;
};

}  // namespace check
}  // namespace cupaged_emulator
