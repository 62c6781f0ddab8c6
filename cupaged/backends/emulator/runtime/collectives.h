// Waiting for the other lanes of a warp or the other threads of a block.
#pragma once
#include "scheduler.h"

namespace cupaged_emulator {

// Meets the lanes of `mask` in a collective; returns when all that have not exited were there and it
// ran. `argument` is this lane's, valid until then.
void meet(uint32_t mask, const Collective& collective, void* argument);

// Stops the launch where a shuffle, vote or matrix instruction is wrong. Never returns.
template <class... Arguments>
[[noreturn]] void fault(FaultKind kind, const char* format, Arguments... arguments) {
  Fiber& self = running();
  self.home->worker->report.set(kind, &self, format, arguments...);
  abandon();
}

}  // namespace cupaged_emulator
