// Which accesses to each byte can still take part in a race.
//
// Every 8 bytes of memory have a granule: the last writes of its bytes, and the reads and atomics since.
// Accesses carry a mask of bytes, so that threads that write neighbouring bytes do not conflict. Three
// entries lie in the granule itself; the rare rest goes to an overflow. A granule of an older generation
// (another launch, another block) counts as empty: nothing is ever cleared.
#pragma once
#include <stdint.h>

#include <deque>
#include <vector>

#include "../../include/emulator/hooks.h"
#include "clock.h"

namespace cupaged_emulator {
namespace check {

// Who accessed and when. `owner` numbers the warps of all blocks of the launch, see OwnerLayout.
struct Stamp {
  uint32_t owner;
  Time time;
  uint32_t lanes;  // of that warp, all at the same time and place; of mbarrier copies: see OwnerLayout
  uint32_t site;   // in the kernel's code
};

// Each block has numbers for its warps, then for the cp.async couriers of its warps, then one for the
// couriers of its mbarriers, whose `lanes` hold mbarrier and issuing thread.
struct OwnerLayout {
  uint32_t warps = 0;

  uint32_t stride() const { return 2 * warps + 1; }
  uint32_t thread_copies(uint32_t warp) const { return warps + warp; }
  uint32_t mbarrier_copies() const { return 2 * warps; }
  static uint32_t mbarrier_lanes(uint32_t mbarrier, uint32_t thread) {
    return (mbarrier << 16) | thread;
  }
  static uint32_t mbarrier_of(uint32_t lanes) { return lanes >> 16; }
  static uint32_t thread_of(uint32_t lanes) { return lanes & 0xffffu; }
};

inline bool writes(Access access) { return access != Access::read && access != Access::atomic_read; }
inline bool is_atomic(Access access) { return access >= Access::atomic_read; }

struct Entry {
  Stamp stamp;
  uint8_t bytes;
  Access access;
};

struct Overflow {
  std::vector<Entry> writes, reads, atomics;
  size_t prune_reads_at = 16, prune_atomics_at = 16;

  void clear();
};

// Overflows of one memory and one generation.
class OverflowPool {
 public:
  Overflow& operator[](uint32_t number) { return items_[number - 1]; }
  uint32_t take();
  void give_back(uint32_t number) { free_.push_back(number); }
  void clear();

 private:
  std::deque<Overflow> items_;
  std::vector<uint32_t> free_;
  uint32_t used_ = 0;
};

struct alignas(64) Granule {
  static constexpr unsigned ENTRIES = 3;
  uint32_t generation;
  uint32_t overflow;       // its number, 0 for none
  uint8_t bytes[ENTRIES];  // 0: the entry is free
  uint8_t writes;          // a bit for each entry
  uint32_t unused;
  Stamp stamps[ENTRIES];
};
static_assert(sizeof(Granule) == 64, "a granule is a cache line");

// What a memory's granules have in common.
struct Space {
  uint32_t generation = 0;
  bool is_shared = false;  // whose bytes must be written before they are read
  OverflowPool overflows;
};

// An access as granules see it: `stamp` is left behind; `known` says what it is ordered after.
struct ThreadState;
struct Visit {
  const ThreadState& self;
  Stamp stamp;
  Access access;
};

enum class Finding { nothing, race, uninitialised };

// Checks an access to some bytes of a granule and notes it; `other` is set where there is a race.
Finding visit_granule(Granule& granule, Space& space, const Visit& visit, uint8_t bytes, Entry* other);

// Memory for granules that keeps its pages from launch to launch.
class ShadowArena {
 public:
  // Room for so many granules; gives all granules taken before back.
  void reset(size_t granules);
  Granule* take(size_t granules);
  // After a launch: keeps no more than a moderate amount of memory.
  void trim();

 private:
  void release();
  Granule* memory_ = nullptr;
  size_t size_ = 0, used_ = 0;
};

}  // namespace check
}  // namespace cupaged_emulator
