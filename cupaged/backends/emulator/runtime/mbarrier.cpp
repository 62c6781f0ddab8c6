// mbarriers and the copies that complete on them: bulk copies, by their bytes, and cp.async, by
// arrivals.
//
// The barrier's state lies in its 64-bit word of shared memory, like the device's (in another layout).
// A phase completes when all arrivals are in and all expected bytes have landed. Copies land, and
// arrive, when somebody waits for a phase that lacks nothing else.
#include <stdio.h>
#include <string.h>

#include "async_copy.h"
#include "collectives.h"
#include "order.h"

namespace cupaged_emulator {
namespace {

constexpr uint32_t MAX_ARRIVALS = (1u << 20) - 1;
constexpr uint64_t INITIALISED = 1;

struct BarrierState {
  uint64_t parity : 1;     // of the phase in progress
  uint64_t arrivals : 20;  // that every phase needs
  uint64_t missing : 20;   // that this phase still needs
  int64_t bytes : 21;      // expected and not landed; below 0: landed before being expected
  uint64_t tag : 2;        // INITIALISED; never so in poisoned memory
};
static_assert(sizeof(BarrierState) == sizeof(uint64_t), "an mbarrier is one word");

BarrierState read_state(const uint64_t* barrier) {
  BarrierState state;
  memcpy(&state, barrier, sizeof(state));
  return state;
}

void write_state(uint64_t* barrier, const BarrierState& state) {
  memcpy(barrier, &state, sizeof(state));
}

// The state, after checks of address and initialisation.
BarrierState checked_state(const uint64_t* barrier, const char* what) {
  if (reinterpret_cast<uintptr_t>(barrier) % sizeof(uint64_t) != 0)
    fault(FaultKind::async_copy, "%s: the barrier's address %p is not a multiple of 8", what,
          static_cast<const void*>(barrier));
  const Block& block = *running().home;
  if (!block.dynamic.contains(barrier, sizeof(*barrier)) &&
      !block.worker->static_shared.contains(barrier, sizeof(*barrier)))
    fault(FaultKind::async_copy, "%s: the barrier %p is not in shared memory", what,
          static_cast<const void*>(barrier));
  const BarrierState state = read_state(barrier);
  if (state.tag != INITIALISED)
    fault(FaultKind::async_copy, "%s: the mbarrier %p was not initialised, or overwritten since", what,
          static_cast<const void*>(barrier));
  return state;
}

long long bytes_in_flight(const Block& block, const uint64_t* barrier) {
  long long bytes = 0;
  for (const BulkCopy& copy : block.bulk_copies)
    if (copy.barrier == barrier) bytes += copy.bytes;
  return bytes;
}

unsigned arrivals_in_flight(const Block& block, const uint64_t* barrier) {
  for (const CopyArrivals& arrivals : block.copy_arrivals)
    if (arrivals.barrier == barrier) return static_cast<unsigned>(arrivals.in_flight.size());
  return 0;
}

std::vector<CopyArrival>& arrivals_to(Block& block, uint64_t* barrier) {
  for (CopyArrivals& arrivals : block.copy_arrivals)
    if (arrivals.barrier == barrier) return arrivals.in_flight;
  block.copy_arrivals.push_back({barrier, {}});
  return block.copy_arrivals.back().in_flight;
}

// A phase must have room for one more arrival, beside those in flight: with more, it could complete
// before the copies that it is there for.
void check_arrival(const Block& block, const uint64_t* barrier, const BarrierState& state) {
  const unsigned in_flight = arrivals_in_flight(block, barrier);
  if (state.missing > in_flight) return;
  if (in_flight != 0)
    fault(FaultKind::async_copy,
          "mbarrier %p: an arrival beyond the %u of its phase, for which %u arrivals of cp.async copies "
          "are in flight",
          static_cast<const void*>(barrier), static_cast<unsigned>(state.arrivals), in_flight);
  fault(FaultKind::async_copy,
        "mbarrier %p: an arrival beyond the %u of its phase, which still expects "
        "%lld bytes",
        static_cast<const void*>(barrier), static_cast<unsigned>(state.arrivals),
        static_cast<long long>(state.bytes));
}

// Starts the next phase if this one is complete.
void advance(Block& block, uint64_t* barrier, BarrierState state) {
  if (state.missing == 0 && state.bytes < 0)
    fault(FaultKind::async_copy, "mbarrier %p: %lld more bytes landed than its phase expects",
          static_cast<void*>(barrier), -static_cast<long long>(state.bytes));
  if (state.missing == 0 && state.bytes == 0) {
    const long long early = bytes_in_flight(block, barrier);
    if (early != 0)
      fault(FaultKind::async_copy,
            "mbarrier %p: %lld bytes are in flight that its phase does not expect",
            static_cast<void*>(barrier), early);
    state.parity ^= 1;
    state.missing = state.arrivals;
    block.worker->progress++;
    order::mbarrier_completed(block, barrier);
  }
  write_state(barrier, state);
}

void land(const BulkCopy& copy) { memcpy(copy.shared, copy.global, copy.bytes); }

// Called when a phase lacks only bytes: lets its copies land, once all of them are on their way.
void land_copies(Block& block, uint64_t* barrier, BarrierState state) {
  const long long in_flight = bytes_in_flight(block, barrier);
  if (in_flight > state.bytes)
    fault(FaultKind::async_copy,
          "mbarrier %p: its phase still expects %lld bytes, but bulk copies of %lld "
          "bytes are in flight",
          static_cast<void*>(barrier), static_cast<long long>(state.bytes), in_flight);
  if (in_flight < state.bytes) return;
  std::vector<BulkCopy> others;
  for (const BulkCopy& copy : block.bulk_copies) {
    if (copy.barrier == barrier) {
      land(copy);
    } else {
      others.push_back(copy);
    }
  }
  block.bulk_copies.swap(others);
  state.bytes = 0;
  advance(block, barrier, state);
}

void land_and_arrive(Block& block, uint64_t* barrier, BarrierState state, const CopyArrival* arrivals,
                     size_t count) {
  for (size_t i = 0; i < count; i++) arrivals[i].issuer->copies.land(arrivals[i].copies);
  order::copies_arrived(block, barrier, arrivals, count);
  state.missing -= count;
  block.worker->progress++;
  advance(block, barrier, state);
}

// Somebody waits for the phase: lets what is in flight land where the phase lacks nothing else.
void land_for_waiter(Block& block, uint64_t* barrier, BarrierState state) {
  const unsigned in_flight = arrivals_in_flight(block, barrier);
  if (state.missing != in_flight) return;
  if (in_flight != 0) {
    std::vector<CopyArrival> arrivals;
    arrivals.swap(arrivals_to(block, barrier));
    land_and_arrive(block, barrier, state, arrivals.data(), arrivals.size());
    if (state.bytes == 0) return;
    state = read_state(barrier);
  }
  land_copies(block, barrier, state);
}

void check_bulk_copy(const Block& block, const void* shared, const void* global, uint32_t bytes) {
  if (reinterpret_cast<uintptr_t>(shared) % 16 != 0 || reinterpret_cast<uintptr_t>(global) % 16 != 0 ||
      bytes % 16 != 0 || bytes == 0)
    fault(FaultKind::async_copy,
          "bulk copy: shared address %p, global address %p and size %u must be "
          "multiples of 16, the size not 0",
          shared, global, bytes);
  if (bytes > MAX_ARRIVALS)
    fault(FaultKind::async_copy, "bulk copy: %u bytes are more than an mbarrier counts (%u)", bytes,
          MAX_ARRIVALS);
  if (!block.dynamic.contains(shared, bytes) && !block.worker->static_shared.contains(shared, bytes))
    fault(FaultKind::async_copy, "bulk copy of %u bytes: the target %p is not in shared memory", bytes,
          shared);
}

}  // namespace

void mbarrier_init(uint64_t* barrier, uint32_t arrivals) {
  CUPAGED_NOTE_SITE();
  if (reinterpret_cast<uintptr_t>(barrier) % sizeof(uint64_t) != 0 || arrivals == 0 ||
      arrivals > MAX_ARRIVALS)
    fault(FaultKind::async_copy,
          "mbarrier.init: address %p must be a multiple of 8, arrivals %u from 1 to %u",
          static_cast<void*>(barrier), arrivals, MAX_ARRIVALS);
  note_access(barrier, sizeof(*barrier), Access::write);
  BarrierState state = {};
  state.arrivals = state.missing = arrivals;
  state.tag = INITIALISED;
  write_state(barrier, state);
  order::mbarrier_initialised(running(), barrier);
}

void mbarrier_arrive(uint64_t* barrier, uint32_t expected_bytes) {
  CUPAGED_NOTE_SITE();
  BarrierState state = checked_state(barrier, "mbarrier.arrive");
  note_access(barrier, sizeof(*barrier), Access::atomic_update);
  check_arrival(*running().home, barrier, state);
  if (state.bytes + static_cast<long long>(expected_bytes) > static_cast<long long>(MAX_ARRIVALS))
    fault(FaultKind::async_copy, "mbarrier %p: %lld expected bytes are more than it counts (%u)",
          static_cast<void*>(barrier), state.bytes + static_cast<long long>(expected_bytes),
          MAX_ARRIVALS);
  order::mbarrier_arrived(running(), barrier);
  state.missing--;
  state.bytes += expected_bytes;
  running().home->worker->progress++;
  advance(*running().home, barrier, state);
}

bool mbarrier_try_wait(uint64_t* barrier, uint32_t parity) {
  CUPAGED_NOTE_SITE();
  parity &= 1u;
  BarrierState state = checked_state(barrier, "mbarrier.try_wait");
  note_access(barrier, sizeof(*barrier), Access::atomic_read);
  if (state.parity == parity) {
    land_for_waiter(*running().home, barrier, state);
    state = read_state(barrier);
  }
  if (state.parity == parity) {
    yield("mbarrier.try_wait", barrier, false);
    state = read_state(barrier);
  }
  if (state.parity == parity) return false;
  order::mbarrier_waited_for(running(), barrier);
  return true;
}

void bulk_copy(void* shared, const void* global, uint32_t bytes, uint64_t* barrier) {
  CUPAGED_NOTE_SITE();
  Fiber& self = running();
  Block& block = *self.home;
  BarrierState state = checked_state(barrier, "bulk copy");
  check_bulk_copy(block, shared, global, bytes);
  const BulkCopy copy{shared, global, bytes, barrier, &self};
  order::bulk_copy_issued(self, copy);
  if (block.worker->schedule == Schedule::random && block.worker->coin()) {
    land(copy);
    state.bytes -= bytes;
    advance(block, barrier, state);
    return;
  }
  memset(shared, POISON_BYTE, bytes);
  block.bulk_copies.push_back(copy);
}

void copy_async_arrive(uint64_t* barrier) {
  CUPAGED_NOTE_SITE();
  Fiber& self = running();
  Block& block = *self.home;
  const BarrierState state = checked_state(barrier, "cp.async.mbarrier.arrive");
  check_arrival(block, barrier, state);
  const CopyArrival arrival{&self, self.copies.issued(), order::copy_arrival_issued(self, barrier)};
  if (block.worker->schedule == Schedule::random && block.worker->coin()) {
    land_and_arrive(block, barrier, state, &arrival, 1);
    return;
  }
  arrivals_to(block, barrier).push_back(arrival);
  block.worker->progress++;
}

bool all_copies_landed(Block& block) {
  for (const CopyArrivals& arrivals : block.copy_arrivals) {
    if (arrivals.in_flight.empty()) continue;
    block.worker->report.set(FaultKind::async_copy, arrivals.in_flight.front().issuer,
                             "the block ended with %zu arrivals of cp.async copies in flight to "
                             "mbarrier %p: nobody waited for "
                             "them",
                             arrivals.in_flight.size(), static_cast<const void*>(arrivals.barrier));
    return false;
  }
  if (block.bulk_copies.empty()) return true;
  const BulkCopy& first = block.bulk_copies.front();
  block.worker->report.set(
      FaultKind::async_copy, first.issuer,
      "the block ended with %zu bulk copies in flight, the first of them of %u bytes to "
      "%p: nobody waited for them",
      block.bulk_copies.size(), first.bytes, first.shared);
  return false;
}

void describe_mbarrier(const Block& block, const uint64_t* barrier, char* text, size_t size) {
  const BarrierState state = read_state(barrier);
  const int used = snprintf(
      text, size,
      "mbarrier %p (phase parity %u) lacks %u arrivals and %lld bytes, of which %lld are in flight",
      static_cast<const void*>(barrier), static_cast<unsigned>(state.parity),
      static_cast<unsigned>(state.missing), static_cast<long long>(state.bytes),
      bytes_in_flight(block, barrier));
  const unsigned arrivals = arrivals_in_flight(block, barrier);
  if (arrivals != 0 && used > 0 && static_cast<size_t>(used) < size)
    snprintf(text + used, size - used, ", as are %u of the arrivals", arrivals);
}

}  // namespace cupaged_emulator
