// cp.async: copies of single threads, in groups.
#include "async_copy.h"

#include <string.h>

#include "collectives.h"
#include "order.h"

namespace cupaged_emulator {

void ThreadCopies::wait(unsigned allowed) {
  size_t count = 0;
  while (count < pending_.size() && pending_[count].group + allowed < open_group_) count++;
  land(landed_ + count);
}

void ThreadCopies::land(uint64_t count) {
  if (count <= landed_) return;
  const auto end = pending_.begin() + static_cast<ptrdiff_t>(count - landed_);
  for (auto copy = pending_.begin(); copy != end; ++copy)
    memcpy(copy->shared, copy->global, copy->bytes);
  pending_.erase(pending_.begin(), end);
  landed_ = count;
}

void copy_async(void* shared, const void* global, unsigned bytes) {
  CUPAGED_NOTE_SITE();
  Fiber& self = running();
  Block& block = *self.home;
  if (reinterpret_cast<uintptr_t>(shared) % bytes != 0 ||
      reinterpret_cast<uintptr_t>(global) % bytes != 0)
    fault(FaultKind::async_copy,
          "cp.async of %u bytes: shared address %p and global address %p must be "
          "multiples of %u",
          bytes, shared, global, bytes);
  if (!block.dynamic.contains(shared, bytes) && !block.worker->static_shared.contains(shared, bytes))
    fault(FaultKind::async_copy, "cp.async of %u bytes: the target %p is not in shared memory", bytes,
          shared);
  order::copy_issued(self, shared, global, bytes);
  if (block.worker->schedule == Schedule::random && block.worker->coin()) {
    memcpy(shared, global, bytes);
    return;
  }
  memset(shared, POISON_BYTE, bytes);
  self.copies.add(shared, global, bytes);
}

void copy_async_commit() {
  Fiber& self = running();
  self.copies.commit();
  order::copies_committed(self);
}

void copy_async_wait(unsigned pending_groups) {
  Fiber& self = running();
  self.copies.wait(pending_groups);
  order::copies_waited_for(self, pending_groups);
}

}  // namespace cupaged_emulator
