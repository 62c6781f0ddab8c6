#include "access.h"

#include <stdarg.h>
#include <stdio.h>

#include <iterator>
#include <string>

namespace cupaged_emulator {
namespace check {
namespace {

const char* name_of(Access access) {
  static const char* const NAMES[] = {"read", "write", "atomic read", "atomic write", "atomic update"};
  return NAMES[static_cast<int>(access)];
}

bool is_copy(const Stamp& stamp) {
  const OwnerLayout owners = session.owners();
  return stamp.owner % owners.stride() >= owners.warps;
}

// A thread that left a stamp, or for whom a copy did, by its number in its block.
uint32_t thread_of(const Stamp& stamp) {
  const OwnerLayout owners = session.owners();
  const uint32_t local = stamp.owner % owners.stride();
  if (local == owners.mbarrier_copies()) return OwnerLayout::thread_of(stamp.lanes);
  uint32_t lanes = stamp.lanes;
  // Of several lanes any may be named but the running one, which does not race with itself.
  if (stamp.owner == running().check.owner) lanes &= ~running().bit();
  return local % owners.warps * WARP_LANES + static_cast<uint32_t>(__builtin_ctz(lanes));
}

std::string describe(const Block& block, const Stamp& stamp) {
  const uint32_t number = stamp.owner / session.owners().stride(), thread = thread_of(stamp);
  const dim3 dim = block.block_dim, grid = block.grid_dim;
  char text[200];
  snprintf(text, sizeof(text), "block (%u, %u, %u), thread (%u, %u, %u)", number % grid.x,
           number / grid.x % grid.y, number / grid.x / grid.y, thread % dim.x, thread / dim.x % dim.y,
           thread / dim.x / dim.y);
  return text;
}

[[noreturn]] void report_race(uintptr_t address, size_t bytes, const Visit& visit, const Entry& other,
                              const void* site) {
  const Block& block = *running().home;
  const std::string by = describe(block, other.stamp);
  const bool is_courier = visit.stamp.owner != visit.self.owner;
  std::string mine = name_of(visit.access);
  if (is_courier) mine += " by an asynchronous copy";
  const std::string where = session.name_of(block, address);
  if (is_copy(other.stamp) && writes(other.access))
    check_fault(
        FaultKind::async_copy, site, other.stamp.site,
        "%zu-byte %s of %s, into which an asynchronous copy issued by %s at @other@ has not been "
        "waited for",
        bytes, mine.c_str(), where.c_str(), by.c_str());
  check_fault(FaultKind::data_race, site, other.stamp.site,
              "data race: nothing orders this %zu-byte %s of %s after the %s%s by %s at @other@", bytes,
              mine.c_str(), where.c_str(), is_copy(other.stamp) ? "asynchronous copy's " : "",
              name_of(other.access), by.c_str());
}

[[noreturn]] void report_outside(uintptr_t address, size_t bytes, const char* what, const void* site) {
  const std::string nearest = session.nearest_to(*running().home, address, bytes);
  check_fault(FaultKind::out_of_bounds, site, 0, "%zu-byte %s outside every buffer of the launch: %s",
              bytes, what, nearest.c_str());
}

// Memory that lies in one piece from `first` on.
bool find_shared(uintptr_t address, uintptr_t first, size_t bytes, Granule* granules, Block& block,
                 Target* target) {
  if (address - first >= bytes) return false;
  *target = {first + bytes, granules + (address / 8 - first / 8), &block.check.shared};
  return true;
}

bool find_target(Block& block, uintptr_t address, Target* target) {
  BlockState& state = block.check;
  const StaticShared& fixed = block.worker->static_shared;
  return find_shared(address, reinterpret_cast<uintptr_t>(block.dynamic_shared),
                     block.dynamic_shared_bytes, state.dynamic_granules, block, target) ||
         find_shared(address, reinterpret_cast<uintptr_t>(fixed.data()), fixed.bytes(),
                     state.static_granules, block, target) ||
         session.find(address, target);
}

void visit_granules(const Target& target, uintptr_t address, size_t bytes, const Visit& visit,
                    const void* site) {
  Granule* granule = target.granules;
  const uintptr_t end = address + bytes;
  for (uintptr_t at = address; at < end; granule++) {
    const unsigned first = at % 8;
    const uintptr_t next = at - first + 8;
    const unsigned count = static_cast<unsigned>((end < next ? end : next) - at);
    const uint8_t mask = static_cast<uint8_t>(((1u << count) - 1u) << first);
    Entry other;
    const Finding finding = visit_granule(*granule, *target.space, visit, mask, &other);
    if (__builtin_expect(finding != Finding::nothing, 0)) {
      if (finding == Finding::race) report_race(address, bytes, visit, other, site);
      check_fault(FaultKind::uninitialised_shared, site, 0, "%zu-byte %s of %s, which nothing wrote",
                  bytes, name_of(visit.access), session.name_of(*running().home, at).c_str());
    }
    at = next;
  }
}

// A plain write of an atomic's location: what atomics released there is no longer to be seen.
void forget_releases(Block& block, const Target& target, uintptr_t address, size_t bytes) {
  Locations& locations = target.space->is_shared ? block.check.locations : session.locations();
  if (locations.size() > bytes) {
    for (size_t i = 0; i < bytes; i++) locations.erase(address + i);
    return;
  }
  for (auto at = locations.begin(); at != locations.end();)
    at = at->first - address < bytes ? locations.erase(at) : std::next(at);
}

void check_visit(Block& block, uintptr_t address, size_t bytes, const Visit& visit, const void* site) {
  Target target;
  if (!find_target(block, address, &target)) {
    if (session.is_exempt(address, bytes, writes(visit.access))) return;
    report_outside(address, bytes, name_of(visit.access), site);
  }
  if (target.granules == nullptr && writes(visit.access))
    check_fault(FaultKind::out_of_bounds, site, 0, "%zu-byte %s of %s, which is a pointer to const",
                bytes, name_of(visit.access), session.name_of(block, address).c_str());
  const size_t here = address + bytes <= target.end ? bytes : target.end - address;
  if (target.granules != nullptr) {
    visit_granules(target, address, here, visit, site);
    if (visit.access == Access::write) forget_releases(block, target, address, here);
  }
  if (here == bytes) return;
  // The next bytes may be another buffer's, with no gap between.
  Target next;
  if (target.space->is_shared || !session.find(target.end, &next))
    report_outside(address, bytes, name_of(visit.access), site);
  check_visit(block, target.end, bytes - here, visit, site);
}

}  // namespace

void check_access(uintptr_t address, size_t bytes, Access access, const void* site) {
  Fiber& self = running();
  const uintptr_t stack = reinterpret_cast<uintptr_t>(self.stack.low);
  if (address - stack < reinterpret_cast<uintptr_t>(self.stack.high) - stack) return;
  const ThreadState& state = self.check;
  check_visit(*self.home, address, bytes,
              {state, {state.owner, state.time, state.lane_bit, session.site_of(site)}, access}, site);
}

void check_prefetch(uintptr_t address, size_t bytes, const void* site) {
  if (session.is_exempt(address, bytes, false)) return;
  const uintptr_t end = address + bytes;
  for (uintptr_t at = address; at < end;) {
    Target target;
    if (!session.find(at, &target)) report_outside(address, bytes, "prefetch", site);
    at = target.end;
  }
}

void check_courier(const void* address, size_t bytes, Access access, const Stamp& stamp) {
  Fiber& self = running();
  check_visit(*self.home, reinterpret_cast<uintptr_t>(address), bytes, {self.check, stamp, access},
              self.check.site);
}

void check_fault(FaultKind kind, const void* site, uint32_t other_site, const char* format, ...) {
  Fiber& self = running();
  self.check.site = site;
  char text[sizeof(Report::message)];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof(text), format, arguments);
  va_end(arguments);
  Report& report = self.home->worker->report;
  report.set(kind, &self, "%s", text);
  report.other_place = other_site;
  abandon();
}

}  // namespace check
}  // namespace cupaged_emulator
