#include "shadow.h"

#include <sys/mman.h>

#include <algorithm>
#include <new>

#include "state.h"

namespace cupaged_emulator {
namespace check {
namespace {

constexpr size_t WINDOW = 4;  // entries of a list that a new one may merge with

// True where `clock`, about the block of the stamp, includes what it stands for.
bool includes(const BlockClock& clock, const ThreadState& self, uint32_t owner_in_block,
              const Stamp& stamp) {
  const ClockLayout layout{self.warps};
  const OwnerLayout owners{self.warps};
  if (owner_in_block < self.warps)
    return stamp.time <= clock.all_threads ||
           clock.knows(layout.thread(owner_in_block, 0), stamp.lanes, stamp.time);
  if (owner_in_block == owners.mbarrier_copies())
    return clock.at(layout.mbarrier(OwnerLayout::mbarrier_of(stamp.lanes))) >= stamp.time;
  return clock.knows(layout.thread_copies(owner_in_block - self.warps, 0), stamp.lanes, stamp.time);
}

bool ordered_slowly(const ThreadState& self, const Stamp& stamp, uint32_t owner_in_block) {
  const OwnerLayout owners{self.warps};
  if (owner_in_block < owners.stride()) return includes(*self.own_block, self, owner_in_block, stamp);
  const BlockClock* other = self.known->of(stamp.owner / owners.stride());
  return other != nullptr && includes(*other, self, stamp.owner % owners.stride(), stamp);
}

// True where an earlier access happened before what `self` does now.
inline bool ordered(const ThreadState& self, const Stamp& stamp) {
  const uint32_t owner_in_block = stamp.owner - self.first_owner;
  if (owner_in_block >= self.warps) return ordered_slowly(self, stamp, owner_in_block);
  if (stamp.time <= self.all_threads) return true;
  uint32_t others = stamp.lanes;
  if (stamp.owner == self.owner) others &= ~self.lane_bit;
  return others == 0 || self.own_block->knows(owner_in_block * ClockLayout::LANES, others, stamp.time);
}

bool conflict(Access a, Access b) { return (writes(a) || writes(b)) && !(is_atomic(a) && is_atomic(b)); }

bool same_moment(const Stamp& a, const Stamp& b) {
  return a.owner == b.owner && a.time == b.time && a.site == b.site;
}

// Drops, from a list, what a later access by a thread to all of its bytes stands for as well.
void prune(std::vector<Entry>& list, const Visit& visit, uint8_t bytes) {
  const auto superseded = [&](const Entry& entry) {
    return (entry.bytes & ~bytes) == 0 && (writes(visit.access) || !writes(entry.access)) &&
           ordered(visit.self, entry.stamp);
  };
  list.erase(std::remove_if(list.begin(), list.end(), superseded), list.end());
}

void add_to_list(std::vector<Entry>& list, size_t* prune_at, const Visit& visit, uint8_t bytes) {
  const bool by_thread = visit.stamp.owner == visit.self.owner;
  const size_t window = list.size() > WINDOW ? list.size() - WINDOW : 0;
  for (size_t i = list.size(); by_thread && i-- > window;) {
    Entry& entry = list[i];
    if (entry.access != visit.access || entry.bytes != bytes) continue;
    if (same_moment(entry.stamp, visit.stamp)) {
      entry.stamp.lanes |= visit.stamp.lanes;
      return;
    }
    if (entry.stamp.owner == visit.stamp.owner && entry.stamp.lanes == visit.stamp.lanes) {
      entry.stamp = visit.stamp;
      return;
    }
  }
  if (list.size() >= *prune_at) {
    if (by_thread) prune(list, visit, bytes);
    *prune_at = std::max<size_t>(16, 2 * list.size());
  }
  list.push_back({visit.stamp, bytes, visit.access});
}

Overflow& overflow_of(Granule& granule, Space& space) {
  if (granule.overflow == 0) granule.overflow = space.overflows.take();
  return space.overflows[granule.overflow];
}

// An entry of the list that races with the access, or null. Adds the bytes that it writes to *written.
const Entry* race_in(const std::vector<Entry>& list, const Visit& visit, uint8_t bytes,
                     uint8_t* written) {
  for (const Entry& entry : list) {
    if (writes(entry.access)) *written |= entry.bytes;
    if ((entry.bytes & bytes) != 0 && conflict(entry.access, visit.access) &&
        !ordered(visit.self, entry.stamp))
      return &entry;
  }
  return nullptr;
}

const Entry* race_in(const Overflow& overflow, const Visit& visit, uint8_t bytes, uint8_t* written) {
  const Entry* found = race_in(overflow.writes, visit, bytes, written);
  if (found == nullptr && writes(visit.access)) found = race_in(overflow.reads, visit, bytes, written);
  // Atomics race with no atomic, but even then they count as written.
  if (found == nullptr) found = race_in(overflow.atomics, visit, bytes, written);
  return found;
}

// Forgets accesses to bytes that a write has now replaced; all of them happened before it.
void cut(std::vector<Entry>& list, uint8_t bytes) {
  for (Entry& entry : list) entry.bytes &= static_cast<uint8_t>(~bytes);
  list.erase(
      std::remove_if(list.begin(), list.end(), [](const Entry& entry) { return entry.bytes == 0; }),
      list.end());
}

void cut_overflow(Granule& granule, Space& space, uint8_t bytes) {
  Overflow& overflow = space.overflows[granule.overflow];
  cut(overflow.writes, bytes);
  cut(overflow.reads, bytes);
  cut(overflow.atomics, bytes);
  if (!overflow.writes.empty() || !overflow.reads.empty() || !overflow.atomics.empty()) return;
  space.overflows.give_back(granule.overflow);
  granule.overflow = 0;
}

void set_entry(Granule& granule, int i, const Stamp& stamp, uint8_t bytes, bool is_write) {
  granule.stamps[i] = stamp;
  granule.bytes[i] = bytes;
  granule.writes =
      static_cast<uint8_t>((granule.writes & ~(1u << i)) | (static_cast<unsigned>(is_write) << i));
}

Finding race_with(const Granule& granule, int i, Entry* other) {
  const bool is_write = (granule.writes >> i) & 1u;
  *other = {granule.stamps[i], granule.bytes[i], is_write ? Access::write : Access::read};
  return Finding::race;
}

void note_write(Granule& granule, Space& space, const Visit& visit, uint8_t bytes) {
  if (granule.overflow != 0) cut_overflow(granule, space, bytes);
  int free = -1;
  for (int i = Granule::ENTRIES - 1; i >= 0; i--) {
    granule.bytes[i] &= static_cast<uint8_t>(~bytes);
    if (granule.bytes[i] == 0) {
      free = i;
    } else if (((granule.writes >> i) & 1u) != 0 && same_moment(granule.stamps[i], visit.stamp) &&
               granule.stamps[i].lanes == visit.stamp.lanes) {
      granule.bytes[i] |= bytes;
      return;
    }
  }
  if (free >= 0) {
    set_entry(granule, free, visit.stamp, bytes, true);
  } else {
    overflow_of(granule, space).writes.push_back({visit.stamp, bytes, Access::write});
  }
}

Finding write_granule(Granule& granule, Space& space, const Visit& visit, uint8_t bytes, Entry* other) {
  for (int i = 0; i < static_cast<int>(Granule::ENTRIES); i++)
    if ((granule.bytes[i] & bytes) != 0 && !ordered(visit.self, granule.stamps[i]))
      return race_with(granule, i, other);
  uint8_t written = 0;
  if (granule.overflow != 0) {
    const Entry* race = race_in(space.overflows[granule.overflow], visit, bytes, &written);
    if (race != nullptr) return *other = *race, Finding::race;
  }
  note_write(granule, space, visit, bytes);
  return Finding::nothing;
}

// A read's entry merges with one of the same moment, or goes over one that it supersedes, into a free
// one, or into the overflow. A courier's supersedes none: who learns of it does not learn what came
// before.
Finding read_granule(Granule& granule, Space& space, const Visit& visit, uint8_t bytes, Entry* other) {
  const Stamp& stamp = visit.stamp;
  const bool by_thread = stamp.owner == visit.self.owner;
  uint8_t written = 0;
  int place = -1, merge = -1;
  for (int i = 0; i < static_cast<int>(Granule::ENTRIES); i++) {
    const uint8_t held = granule.bytes[i];
    Stamp& earlier = granule.stamps[i];
    if (held == 0) {
      place = i;
    } else if ((granule.writes >> i) & 1u) {
      written |= held;
      if ((held & bytes) != 0 && !ordered(visit.self, earlier)) return race_with(granule, i, other);
    } else if (by_thread && earlier.owner == stamp.owner) {
      if (earlier.time == stamp.time) {
        // Noted before, and nobody has written since.
        if ((earlier.lanes & stamp.lanes) != 0 && (bytes & ~held) == 0) return Finding::nothing;
        if (earlier.site == stamp.site && held == bytes) merge = i;
      } else if ((held & ~bytes) == 0) {
        earlier.lanes &= ~stamp.lanes;
        if (earlier.lanes == 0) granule.bytes[i] = 0, place = i;
      }
    } else if (by_thread && (held & ~bytes) == 0 && ordered(visit.self, earlier)) {
      place = i;
    }
  }
  if (granule.overflow != 0) {
    const Entry* race = race_in(space.overflows[granule.overflow], visit, bytes, &written);
    if (race != nullptr) return *other = *race, Finding::race;
  }
  if (space.is_shared && (bytes & ~written) != 0) return Finding::uninitialised;
  if (merge >= 0) {
    granule.stamps[merge].lanes |= stamp.lanes;
  } else if (place >= 0) {
    set_entry(granule, place, stamp, bytes, false);
  } else {
    Overflow& overflow = overflow_of(granule, space);
    add_to_list(overflow.reads, &overflow.prune_reads_at, visit, bytes);
  }
  return Finding::nothing;
}

Finding access_atomically(Granule& granule, Space& space, const Visit& visit, uint8_t bytes,
                          Entry* other) {
  uint8_t written = 0;
  for (int i = 0; i < static_cast<int>(Granule::ENTRIES); i++) {
    const bool is_write = (granule.writes >> i) & 1u;
    if (is_write) written |= granule.bytes[i];
    if ((granule.bytes[i] & bytes) != 0 && (is_write || writes(visit.access)) &&
        !ordered(visit.self, granule.stamps[i]))
      return race_with(granule, i, other);
  }
  Overflow& overflow = overflow_of(granule, space);
  const Entry* race = race_in(overflow.writes, visit, bytes, &written);
  if (race == nullptr && writes(visit.access)) race = race_in(overflow.reads, visit, bytes, &written);
  if (race != nullptr) return *other = *race, Finding::race;
  // Only for shared memory does it matter what other atomics wrote: their list may be long.
  if (space.is_shared) {
    for (const Entry& entry : overflow.atomics)
      if (writes(entry.access)) written |= entry.bytes;
    if ((bytes & ~written) != 0 && visit.access != Access::atomic_write) return Finding::uninitialised;
  }
  add_to_list(overflow.atomics, &overflow.prune_atomics_at, visit, bytes);
  return Finding::nothing;
}

}  // namespace

Finding visit_granule(Granule& granule, Space& space, const Visit& visit, uint8_t bytes, Entry* other) {
  if (granule.generation != space.generation) {
    granule.generation = space.generation;
    granule.overflow = 0;
    granule.bytes[0] = granule.bytes[1] = granule.bytes[2] = 0;
    granule.writes = 0;
  }
  switch (visit.access) {
    case Access::read:
      return read_granule(granule, space, visit, bytes, other);
    case Access::write:
      return write_granule(granule, space, visit, bytes, other);
    default:
      return access_atomically(granule, space, visit, bytes, other);
  }
}

// ---- memory

void Overflow::clear() {
  writes.clear();
  reads.clear();
  atomics.clear();
  prune_reads_at = prune_atomics_at = 16;
}

uint32_t OverflowPool::take() {
  if (!free_.empty()) {
    const uint32_t number = free_.back();
    free_.pop_back();
    (*this)[number].clear();
    return number;
  }
  if (used_ == items_.size()) items_.emplace_back();
  (*this)[++used_].clear();
  return used_;
}

void OverflowPool::clear() {
  used_ = 0;
  free_.clear();
}

void ShadowArena::reset(size_t granules) {
  used_ = 0;
  if (granules <= size_) return;
  release();
  void* memory = mmap(nullptr, granules * sizeof(Granule), PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  memory_ = static_cast<Granule*>(memory);
  size_ = granules;
}

Granule* ShadowArena::take(size_t granules) {
  Granule* first = memory_ + used_;
  used_ += granules;
  return first;
}

void ShadowArena::trim() {
  constexpr size_t MOST_KEPT_BYTES = size_t{256} << 20;
  if (size_ * sizeof(Granule) > MOST_KEPT_BYTES) release();
}

void ShadowArena::release() {
  if (memory_ != nullptr) munmap(memory_, size_ * sizeof(Granule));
  memory_ = nullptr;
  size_ = 0;
}

}  // namespace check
}  // namespace cupaged_emulator
