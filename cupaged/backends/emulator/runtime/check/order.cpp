// What orders memory: the events of runtime/order.h, atomics and fences.
#include "../order.h"

#include <algorithm>
#include <mutex>

#include "../launch.h"
#include "access.h"

namespace cupaged_emulator {
namespace check {
namespace {

void learn(ThreadState& self, const ClockRef& clock) {
  ClockRef both = join(self.known, clock);
  if (both == self.known) return;
  self.known = std::move(both);
  self.own_block = self.known->of(self.first_owner / session.owners().stride());
  self.all_threads = self.own_block->all_threads;
}

// All that happened before now, for this thread; what it does from now on is not part of it.
ClockRef publish(const Fiber& fiber) {
  const ThreadState& state = fiber.check;
  const ClockLayout layout{state.warps};
  return changed(state.known, fiber.home->check.number, [&](BlockClock& block) {
    block.raise(layout.thread(fiber.warp->index, fiber.lane), state.time);
  });
}

void step(Fiber& fiber) { fiber.check.time = session.tick(); }

MbarrierState* find_mbarrier(Block& block, const uint64_t* barrier) {
  for (MbarrierState& state : block.check.mbarriers)
    if (state.barrier == barrier) return &state;
  return nullptr;
}

Location& location_of(Fiber& fiber, const void* address) {
  const uintptr_t key = reinterpret_cast<uintptr_t>(address);
  Block& block = *fiber.home;
  const bool is_shared =
      block.dynamic.contains(address, 1) || block.worker->static_shared.contains(address, 1);
  return is_shared ? block.check.locations[key] : session.locations()[key];
}

bool acquires(Order order) { return order == Order::acquire || order == Order::acquire_release; }
bool releases(Order order) { return order == Order::release || order == Order::acquire_release; }

void take_over(Fiber& fiber, const Location& location, Order order) {
  ThreadState& state = fiber.check;
  const bool same_block = location.block == fiber.home->check.number;
  if (acquires(order)) {
    learn(state, location.released);
    if (same_block) learn(state, location.released_to_block);
    return;
  }
  ClockRef& by_device_fence = state.seen[static_cast<int>(Scope::device)];
  ClockRef& by_block_fence = state.seen[static_cast<int>(Scope::block)];
  by_device_fence = join(by_device_fence, location.released);
  if (!same_block) return;
  by_device_fence = join(by_device_fence, location.released_to_block);
  by_block_fence = join(by_block_fence, location.released_to_block);
}

void leave_behind(Fiber& fiber, Location& location, Order order, bool is_update) {
  const ThreadState& state = fiber.check;
  ClockRef device = state.fenced[static_cast<int>(Scope::device)];
  ClockRef block = state.fenced[static_cast<int>(Scope::block)];
  if (releases(order)) {
    device = block = publish(fiber);
    step(fiber);
  }
  // An update continues what earlier ones released; a store begins anew.
  const uint32_t number = fiber.home->check.number;
  const bool continues_block = is_update && location.block == number;
  location.released = is_update ? join(location.released, device) : device;
  location.released_to_block = continues_block ? join(location.released_to_block, block) : block;
  location.block = number;
}

}  // namespace
}  // namespace check

// ---- called by kernels

void note_access(const void* address, size_t bytes, Access access) {
  check::check_access(reinterpret_cast<uintptr_t>(address), bytes, access, running().check.site);
}

void note_atomic(const void* address, size_t bytes, Access access, Order order) {
  check::check_atomic(address, bytes, access, order, __builtin_return_address(0));
}

void check::check_atomic(const void* address, size_t bytes, Access access, Order order,
                         const void* site) {
  Fiber& self = running();
  self.check.site = site;
  if (reinterpret_cast<uintptr_t>(address) % bytes != 0)
    check_fault(FaultKind::misaligned, site, 0, "%zu-byte atomic at address %p", bytes, address);
  note_access(address, bytes, access);
  Location& location = location_of(self, address);
  if (access != Access::atomic_write) take_over(self, location, order);
  if (access != Access::atomic_read)
    leave_behind(self, location, order, access == Access::atomic_update);
}

void note_prefetch(const void* address, size_t bytes) {
  check::check_prefetch(reinterpret_cast<uintptr_t>(address), bytes, running().check.site);
}

void note_fence(Scope scope) {
  Fiber& self = running();
  check::ThreadState& state = self.check;
  const int device = static_cast<int>(Scope::device), block = static_cast<int>(Scope::block);
  check::learn(state, state.seen[block]);
  state.seen[block] = check::ClockRef();
  if (scope == Scope::device) {
    check::learn(state, state.seen[device]);
    state.seen[device] = check::ClockRef();
  }
  state.fenced[block] = check::publish(self);
  if (scope == Scope::device) state.fenced[device] = state.fenced[block];
  check::step(self);
}

// ---- called by the runtime

namespace order {

namespace {

std::mutex one_launch;

}  // namespace

LaunchScope::LaunchScope(const LaunchRequest& request) {
  one_launch.lock();
  const size_t shared_granules = request.shared->bytes / 8 + 2 + (request.dynamic_shared_bytes + 7) / 8;
  const uint64_t resident = request.cooperative != 0 ? volume(request.grid) : 1;
  try {
    check::session.begin(*request.setup, reinterpret_cast<const void*>(request.entry),
                         static_cast<uint32_t>(volume(request.block)), resident * shared_granules);
  } catch (...) {
    one_launch.unlock();
    throw;
  }
}

LaunchScope::~LaunchScope() {
  check::session.end();
  one_launch.unlock();
}

void block_created(Block& block) { check::session.add_block(block); }

void block_started(Block& block) {
  using namespace check;
  session.restart_block(block);
  const OwnerLayout owners = session.owners();
  ClockRef nothing(new Clock);
  nothing->parts.push_back({block.check.number, Ref<BlockClock>(new BlockClock)});
  const Time start = session.tick();
  for (Fiber& fiber : block.fibers) {
    ThreadState& state = fiber.check;
    state = ThreadState();
    state.warps = owners.warps;
    state.first_owner = block.check.number * owners.stride();
    state.owner = state.first_owner + fiber.warp->index;
    state.lane_bit = fiber.bit();
    state.time = start;
    state.known = nothing;
    state.own_block = nothing->parts[0].known.get();
  }
}

// Threads that have exited count as having arrived: their accesses happened before, like the others'.
void barrier_released(Block& block) {
  using namespace check;
  ClockRef all;
  for (Fiber& fiber : block.fibers) all = join(all, fiber.check.known);
  const Time before = session.now();
  all = changed(all, block.check.number, [&](BlockClock& known) {
    known.all_threads = before;
    const size_t threads = session.owners().warps * WARP_LANES;
    if (known.entries.size() <= threads) {
      known.entries.clear();
    } else {
      std::fill_n(known.entries.begin(), threads, 0);
    }
  });
  const Time after = session.tick();
  const BlockClock* own = all->of(block.check.number);
  for (Fiber& fiber : block.fibers) {
    ThreadState& state = fiber.check;
    state.known = all;
    state.own_block = own;
    state.all_threads = before;
    state.time = after;
  }
}

void lanes_synchronised(Warp& warp, uint32_t lanes) {
  using namespace check;
  Fiber* const first = &running().home->fibers[warp.index * WARP_LANES];
  const auto each = [&](auto&& action) {
    for (uint32_t left = lanes; left != 0; left &= left - 1) action(first[__builtin_ctz(left)]);
  };
  ClockRef all;
  each([&](Fiber& fiber) { all = join(all, fiber.check.known); });
  const ClockLayout layout{session.owners().warps};
  const uint32_t number = first->home->check.number;
  all = changed(all, number, [&](BlockClock& known) {
    each([&](Fiber& fiber) { known.raise(layout.thread(warp.index, fiber.lane), fiber.check.time); });
  });
  const Time after = session.tick();
  const BlockClock* own = all->of(number);
  each([&](Fiber& fiber) {
    ThreadState& state = fiber.check;
    state.known = all;
    state.own_block = own;
    state.all_threads = own->all_threads;
    state.time = after;
  });
}

namespace {

// Of the courier of the thread's cp.async copies, at a time after all of them so far.
check::Stamp next_copy_stamp(Fiber& fiber) {
  using namespace check;
  ThreadState& state = fiber.check;
  const uint32_t owner = state.first_owner + session.owners().thread_copies(fiber.warp->index);
  state.last_copy = session.tick();
  return {owner, state.last_copy, fiber.bit(), session.site_of(state.site)};
}

}  // namespace

void copy_issued(Fiber& fiber, const void* shared, const void* global, size_t bytes) {
  using namespace check;
  const Stamp stamp = next_copy_stamp(fiber);
  check_courier(global, bytes, Access::read, stamp);
  check_courier(shared, bytes, Access::write, stamp);
}

void copies_committed(Fiber& fiber) { fiber.check.copy_groups.push_back(fiber.check.last_copy); }

void copies_waited_for(Fiber& fiber, unsigned allowed) {
  using namespace check;
  ThreadState& state = fiber.check;
  if (state.copy_groups.size() <= allowed) return;
  const auto rest = state.copy_groups.end() - static_cast<ptrdiff_t>(allowed);
  const Time landed = *(rest - 1);
  state.copy_groups.erase(state.copy_groups.begin(), rest);
  const ClockLayout layout{state.warps};
  learn(state, changed(state.known, fiber.home->check.number, [&](BlockClock& known) {
          known.raise(layout.thread_copies(fiber.warp->index, fiber.lane), landed);
        }));
}

void mbarrier_initialised(Fiber& fiber, uint64_t* barrier) {
  using namespace check;
  auto& all = fiber.home->check.mbarriers;
  MbarrierState* state = find_mbarrier(*fiber.home, barrier);
  if (state != nullptr) {
    state->arrived = state->completed = ClockRef();
    return;
  }
  if (all.size() == ClockLayout::MAX_MBARRIERS)
    check_fault(FaultKind::launch, fiber.check.site, 0,
                "check mode follows at most %u mbarriers of a block", ClockLayout::MAX_MBARRIERS);
  all.push_back({barrier, ClockRef(), ClockRef()});
}

void mbarrier_arrived(Fiber& fiber, const uint64_t* barrier) {
  using namespace check;
  MbarrierState* state = find_mbarrier(*fiber.home, barrier);
  state->arrived = join(state->arrived, publish(fiber));
  step(fiber);
}

uint32_t copy_arrival_issued(Fiber& fiber, const uint64_t* barrier) {
  using namespace check;
  const Stamp stamp = next_copy_stamp(fiber);
  check_courier(barrier, sizeof(*barrier), Access::atomic_update, stamp);
  return stamp.time;
}

void copies_arrived(Block& block, const uint64_t* barrier, const CopyArrival* arrivals, size_t count) {
  using namespace check;
  const ClockLayout layout{session.owners().warps};
  Ref<BlockClock> landed(new BlockClock);
  for (size_t i = 0; i < count; i++) {
    const Fiber& issuer = *arrivals[i].issuer;
    landed->raise(layout.thread_copies(issuer.warp->index, issuer.lane), arrivals[i].time);
  }
  ClockRef clock(new Clock);
  clock->parts.push_back({block.check.number, std::move(landed)});
  MbarrierState* state = find_mbarrier(block, barrier);
  state->arrived = join(state->arrived, clock);
}

void bulk_copy_issued(Fiber& fiber, const BulkCopy& copy) {
  using namespace check;
  const ThreadState& state = fiber.check;
  const MbarrierState* first = fiber.home->check.mbarriers.data();
  const uint32_t number = static_cast<uint32_t>(find_mbarrier(*fiber.home, copy.barrier) - first);
  const uint32_t thread = fiber.warp->index * WARP_LANES + fiber.lane;
  const Stamp stamp{state.first_owner + session.owners().mbarrier_copies(), session.tick(),
                    OwnerLayout::mbarrier_lanes(number, thread), session.site_of(state.site)};
  check_courier(copy.global, copy.bytes, Access::read, stamp);
  check_courier(copy.shared, copy.bytes, Access::write, stamp);
}

void mbarrier_completed(Block& block, const uint64_t* barrier) {
  using namespace check;
  MbarrierState* state = find_mbarrier(block, barrier);
  const unsigned number = static_cast<unsigned>(state - block.check.mbarriers.data());
  const ClockLayout layout{session.owners().warps};
  // A phase completes by arrivals, so there is a clock to add the copies to.
  state->completed =
      join(state->completed, changed(state->arrived, block.check.number, [&](BlockClock& known) {
             known.raise(layout.mbarrier(number), session.tick());
           }));
  state->arrived = ClockRef();
}

void mbarrier_waited_for(Fiber& fiber, const uint64_t* barrier) {
  check::learn(fiber.check, check::find_mbarrier(*fiber.home, barrier)->completed);
}

}  // namespace order
}  // namespace cupaged_emulator
