#include "collectives.h"

#include "order.h"

namespace cupaged_emulator {
namespace {

const Collective SYNCWARP = {"__syncwarp", nullptr};

void complete(Block& block, Warp& warp, Meeting& meeting, uint32_t running_lane) {
  const uint32_t lanes = meeting.arrived;
  const Collective& collective = *meeting.collective;
  meeting.arrived = 0;
  block.worker->progress++;
  if (collective.run != nullptr) {
    collective.run(lanes, warp.arguments);
  } else {
    order::lanes_synchronised(warp, lanes);
  }
  const uint32_t waiting = lanes & ~running_lane;
  if (waiting != 0) block.wake(warp, waiting);
}

// The meeting that lanes of this mask use: the pending one of the same mask, or a free one. Lanes may
// wait under overlapping masks at once: those that wait for a lane which first meets others.
Meeting& meeting_of(Warp& warp, uint32_t mask) {
  if (mask == warp.existing) return warp.whole;
  Meeting* found = nullptr;
  for (unsigned i = 0; i < warp.num_parts; i++) {
    Meeting& meeting = warp.parts[i];
    if (meeting.arrived == 0) {
      found = &meeting;
    } else if (meeting.mask == mask) {
      return meeting;
    }
  }
  // Every part in use holds a waiting lane of its own, so there is always one left.
  return found != nullptr ? *found : warp.parts[warp.num_parts++];
}

void release_barrier(Block& block, Fiber* running_thread) {
  BlockBarrier& barrier = block.barrier;
  switch (barrier.kind) {
    case BarrierVote::none:
      barrier.result = 0;
      break;
    case BarrierVote::any:
      barrier.result = barrier.votes != 0;
      break;
    case BarrierVote::all:
      barrier.result = barrier.votes == barrier.arrived;
      break;
    case BarrierVote::count:
      barrier.result = static_cast<int>(barrier.votes);
      break;
  }
  barrier.arrived = barrier.votes = 0;
  block.worker->progress++;
  order::barrier_released(block);
  if (running_thread != nullptr) running_thread->warp->at_barrier &= ~running_thread->bit();
  for (Warp& warp : block.warps) {
    if (warp.at_barrier == 0) continue;
    block.wake(warp, warp.at_barrier);
    warp.at_barrier = 0;
  }
}

}  // namespace

void meet(uint32_t mask, const Collective& collective, void* argument) {
  Fiber& self = running();
  Warp& warp = *self.warp;
  const uint32_t bit = self.bit();
  if ((mask & bit) == 0)
    fault(FaultKind::warp_mismatch, "%s: mask 0x%08x leaves out the calling lane %u", collective.name,
          mask, self.lane);
  mask &= warp.existing;
  Meeting& meeting = meeting_of(warp, mask);
  if (meeting.arrived == 0) {
    meeting.mask = mask;
    meeting.collective = &collective;
  } else if (meeting.collective != &collective) {
    fault(FaultKind::warp_mismatch, "%s(mask 0x%08x) meets %s of lanes 0x%08x in the same warp",
          collective.name, mask, meeting.collective->name, meeting.arrived);
  }
  meeting.arrived |= bit;
  warp.arguments[self.lane] = argument;
  if (meeting.arrived == (mask & warp.alive)) {
    complete(*self.home, warp, meeting, bit);
    maybe_step_back(self);
  } else {
    suspend(self);
  }
}

void complete_after_exit(Block& block, Warp& warp) {
  if (warp.whole.arrived != 0 && warp.whole.arrived == warp.alive) complete(block, warp, warp.whole, 0);
  for (unsigned i = 0; i < warp.num_parts; i++) {
    Meeting& meeting = warp.parts[i];
    if (meeting.arrived != 0 && meeting.arrived == (meeting.mask & warp.alive))
      complete(block, warp, meeting, 0);
  }
  if (block.barrier.arrived != 0 && block.barrier.arrived == block.alive)
    release_barrier(block, nullptr);
}

void warp_sync(uint32_t mask) {
  CUPAGED_NOTE_SITE();
  meet(mask, SYNCWARP, nullptr);
}

uint32_t active_lanes() {
  const Fiber& self = running();
  // Lanes that wait in a collective or at a barrier are elsewhere in the program.
  const Warp& warp = *self.warp;
  return self.bit() | warp.ready | warp.yielded;
}

int block_barrier(BarrierVote kind, bool predicate) {
  static const char* const NAMES[] = {"__syncthreads", "__syncthreads_or", "__syncthreads_and",
                                      "__syncthreads_count"};
  CUPAGED_NOTE_SITE();
  Fiber& self = running();
  Block& block = *self.home;
  BlockBarrier& barrier = block.barrier;
  if (barrier.arrived == 0) {
    barrier.kind = kind;
  } else if (barrier.kind != kind) {
    fault(FaultKind::warp_mismatch, "%s meets %s of %u other threads", NAMES[static_cast<int>(kind)],
          NAMES[static_cast<int>(barrier.kind)], barrier.arrived);
  }
  barrier.arrived++;
  barrier.votes += predicate;
  self.warp->at_barrier |= self.bit();
  if (barrier.arrived == block.alive) {
    release_barrier(block, &self);
    const int result = barrier.result;
    maybe_step_back(self);
    return result;
  }
  suspend(self);
  // Nobody completes the next barrier before this thread arrives there: the result is still this one's.
  return barrier.result;
}

}  // namespace cupaged_emulator
