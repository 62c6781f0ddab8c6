// Requests to the cache, which the emulator does not have.
#include "collectives.h"

namespace cupaged_emulator {

void prefetch(const void* global) {
  CUPAGED_NOTE_SITE();
  note_prefetch(global, 1);
}

void prefetch_bulk(const void* global, uint32_t bytes) {
  CUPAGED_NOTE_SITE();
  if (reinterpret_cast<uintptr_t>(global) % 16 != 0 || bytes % 16 != 0 || bytes == 0)
    fault(FaultKind::async_copy,
          "bulk prefetch: global address %p and size %u must be multiples of 16, the size not 0", global,
          bytes);
  note_prefetch(global, bytes);
}

}  // namespace cupaged_emulator
